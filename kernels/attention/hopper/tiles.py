"""Parts that the kernels share: blocks of rows that arrive in shared memory by themselves, and products of them.

Such a block has a barrier, which is passed when the block is there. Blocks that follow each other go round a ring of
STAGES places; the n-th lies at place n % STAGES, whose barrier n // STAGES blocks have passed before it. A block may be
sent once every warp is done with the one that lay there: products are, that a warp has waited for. Then all warps wait
for each other, or, where one warp loads for groups of others, each group says so at a barrier of the place's own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
)

__all__ = [
    "NUMBER_BYTES",
    "ROW_BYTES",
    "TILE",
    "WARPS",
    "arrived",
    "expect",
    "free",
    "load_tile",
    "make_barriers",
    "make_numbers_ring",
    "make_ring",
    "product_layout",
    "send",
    "send_numbers",
    "start_product",
    "store_tile",
    "wait_for_all",
    "wait_until_filled",
    "wait_until_free",
]

# Every warp of a group waits for the others: its name since Triton 3.7, and the one before.
wait_for_all = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
TILE = gl.constexpr(64)  # rows, or keys, of a block
WARPS = gl.constexpr(4)
ROW_BYTES = gl.constexpr(TILE.value * 2)  # of a block, times its columns
NUMBER_BYTES = gl.constexpr(TILE.value * 4)  # of a float32 for each row


@gluon.constexpr_function
def product_layout(columns):
    """Where a product of 64 rows and so many columns lies in registers."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS.value, 1], instr_shape=[16, columns, 16])


@gluon.jit
def make_barriers(STAGES: gl.constexpr, COUNT: gl.constexpr = 1):
    """Barriers, each for what arrives at one place, or for so many groups of warps that are done with it."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(barriers.index(place), count=COUNT)
    return barriers


@gluon.jit
def make_ring(x, BLOCK: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr = TILE):
    """Places for blocks of what a descriptor reads, in columns of BLOCK."""
    return gl.allocate_shared_memory(x.dtype, [STAGES, 1, 1, ROWS, BLOCK], x.layout)


@gluon.jit
def expect(barriers, n, exists, BYTES: gl.constexpr):
    """So many bytes will arrive with the n-th block, if it exists; known before all warps wait for each other."""
    STAGES: gl.constexpr = barriers.shape[0]
    mbarrier.expect(barriers.index(n % STAGES), BYTES, pred=exists)


@gluon.jit
def send(x, ring, barriers, n, head, batch, row, exists):
    """The n-th block is on its way, if it exists: rows from `row` on of a head and a row of the batch."""
    STAGES: gl.constexpr = barriers.shape[0]
    barrier = barriers.index(n % STAGES)
    tma.async_copy_global_to_shared(x, [head, batch, row, 0], barrier, ring.index(n % STAGES), pred=exists)


@gluon.jit
def wait_until_filled(barriers, n):
    """Until the n-th block is there."""
    STAGES: gl.constexpr = barriers.shape[0]
    mbarrier.wait(barriers.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def arrived(ring, barriers, n):
    """The n-th block [rows, columns], once it is there."""
    STAGES: gl.constexpr = barriers.shape[0]
    wait_until_filled(barriers, n)
    return ring.index(n % STAGES).reshape([ring.shape[3], ring.shape[4]])


@gluon.jit
def free(barriers, n):
    """This group of warps is done with the n-th block."""
    STAGES: gl.constexpr = barriers.shape[0]
    mbarrier.arrive(barriers.index(n % STAGES), count=1)


@gluon.jit
def wait_until_free(barriers, n):
    """Until every group of warps is done with what lay at the n-th block's place before."""
    STAGES: gl.constexpr = barriers.shape[0]
    mbarrier.wait(barriers.index(n % STAGES), (n // STAGES + 1) & 1)


@gluon.jit
def make_numbers_ring(STAGES: gl.constexpr):
    """Places for the numbers of the rows of blocks."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE], layout)


@gluon.jit
def send_numbers(x, ring, barriers, n, at_head, place, exists):
    """Numbers of the rows of the n-th block are on their way, if it exists: of a head, counted over the batch."""
    STAGES: gl.constexpr = barriers.shape[0]
    barrier = barriers.index(n % STAGES)
    tma.async_copy_global_to_shared(x, [at_head, place], barrier, ring.index(n % STAGES), pred=exists)


@gluon.jit
def start_product(x, y):
    """x y^T of a block of 64 rows and another, to be waited for."""
    COLUMNS: gl.constexpr = y.shape[0]
    zero = gl.zeros([TILE, COLUMNS], gl.float32, layout=product_layout(COLUMNS))
    return warpgroup_mma(x, y.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def load_tile(matrix, token, row, end, ROW: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr):
    """Rows from `row` on of a document that begins at row `token` of a matrix; 0 from its end and column DIM on."""
    place, inside = _places(row, end, ROW, DIM, BLOCK)
    return gl.load(matrix + (token + row) * ROW + place, mask=inside, other=0.0)


@gluon.jit
def store_tile(matrix, x, token, row, end, ROW: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr):
    """The counterpart of `load_tile`, once every product of this group of warps is done."""
    wait_for_all()  # what the conversion puts into shared memory may lie where another warp's product still reads
    x = gl.convert_layout(x.to(matrix.dtype.element_ty), row_layout(BLOCK))
    place, inside = _places(row, end, ROW, DIM, BLOCK)
    gl.store(matrix + (token + row) * ROW + place, x, mask=inside)


@gluon.constexpr_function
def row_layout(columns):
    """Where rows lie in registers that are read or written at once, 16 bytes by each thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [WARPS.value, 1], [1, 0])


@gluon.jit
def _places(row, end, ROW: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr):
    """Of 64 rows: places of their numbers, and which there are."""
    LAYOUT: gl.constexpr = row_layout(BLOCK)
    index = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    return index[:, None] * ROW + column[None, :], (row + index < end)[:, None] & (column < DIM)[None, :]
