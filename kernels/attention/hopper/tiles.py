"""Parts that the kernels share: blocks of 64 rows that arrive in shared memory by themselves, and products of them.

Such a block has a barrier, which is passed when the block is there. Blocks that follow each other go round a ring of
STAGES places; the n-th lies at place n % STAGES, and its barrier is passed for the (n // STAGES)-th time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
)

__all__ = [
    "TILE",
    "WARPS",
    "arrived",
    "fetch",
    "make_barriers",
    "make_ring",
    "product_layout",
    "start_product",
    "store_tile",
    "wait_for_all",
]

# Every warp waits for the others: its name since Triton 3.7, and the one before.
wait_for_all = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
TILE = gl.constexpr(64)  # rows, or keys, of a block
WARPS = gl.constexpr(4)
_BYTES = gl.constexpr(2)  # of a number


@gluon.constexpr_function
def product_layout(columns):
    """Where a product of 64 rows and so many columns lies in registers."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS.value, 1], instr_shape=[16, columns, 16])


@gluon.jit
def make_barriers(STAGES: gl.constexpr):
    """Barriers, each for what arrives at one place."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(barriers.index(place), count=1)
    return barriers


@gluon.jit
def make_ring(x, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """Places for blocks of what a descriptor reads, in columns of BLOCK."""
    return gl.allocate_shared_memory(x.dtype, [STAGES, 1, 1, TILE, BLOCK], x.layout)


@gluon.jit
def fetch(x, ring, barriers, n, head, batch, row, exists, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """Send for the n-th block, rows from `row` on of a head and a row of the batch, if it exists."""
    barrier = barriers.index(n % STAGES)
    mbarrier.expect(barrier, TILE * BLOCK * _BYTES, pred=exists)
    tma.async_copy_global_to_shared(x, [head, batch, row, 0], barrier, ring.index(n % STAGES), pred=exists)


@gluon.jit
def arrived(ring, barriers, n, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """The n-th block [64, BLOCK], once it is there."""
    mbarrier.wait(barriers.index(n % STAGES), (n // STAGES) & 1)
    return ring.index(n % STAGES).reshape([TILE, BLOCK])


@gluon.jit
def start_product(x, y):
    """x y^T [64, 64] of two blocks, to be waited for."""
    zero = gl.zeros([TILE, TILE], gl.float32, layout=product_layout(TILE))
    return warpgroup_mma(x, y.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def store_tile(matrix, x, token, row, end, ROW: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr):
    """Rows from `row` on of a document that begins at row `token` of a matrix, up to its end and column DIM."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK, BLOCK // 8], [WARPS, 1], [1, 0])
    x = gl.convert_layout(x.to(matrix.dtype.element_ty), LAYOUT)
    index = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    inside = (row + index < end)[:, None] & (column < DIM)[None, :]
    gl.store(matrix + (token + row) * ROW + index[:, None] * ROW + column[None, :], x, mask=inside)
