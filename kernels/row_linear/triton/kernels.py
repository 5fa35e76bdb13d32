"""Each program multiplies a few rows of the matrix by the whole vector, which it makes of its inputs by itself.

What stands in front of the product is computed by every program again: that is a few numbers more for each thread,
where a launch of its own would take as long as reading a megabyte.
"""

import triton
import triton.language as tl

from zoo.kernels.triton.early import release_next, wait_for_last


@triton.jit
def _scale(x, eps, K: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """x over the root mean square of its run of SIZE numbers."""
    if SIZE == K:
        scaled = x * tl.rsqrt(tl.sum(x * x) / SIZE + eps)
    else:
        runs = tl.reshape(x, [BLOCK // SIZE, SIZE])
        scales = tl.rsqrt(tl.sum(runs * runs, 1) / SIZE + eps)
        scaled = tl.reshape(runs * scales[:, None], [BLOCK])
    return scaled


@triton.jit(do_not_specialize=["eps"])
def row_linear_kernel(
    x,
    weight,
    norm_weight,
    gate,
    residual,
    y,
    num_rows,
    eps,
    K: tl.constexpr,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CONSTANT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS rows of the matrix, whose rows are ROW numbers apart."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK)
    there, in_row = row < num_rows, dim < K
    at = weight + row[:, None].to(tl.int64) * ROW + dim[None, :]
    mask = there[:, None] & in_row[None, :]
    if CONSTANT:  # on its way while the launch before ends
        matrix = tl.load(at, mask=mask, other=0.0)
    wait_for_last(EARLY)
    release_next(EARLY)
    vector = tl.load(x + dim, mask=in_row, other=0.0).to(tl.float32)
    if norm_weight is not None:
        learned = tl.load(norm_weight + dim % SIZE, mask=in_row, other=0.0).to(tl.float32)
        vector = tl.where(in_row, _scale(vector, eps, K, SIZE, BLOCK) * learned, 0.0)  # 0 / 0 where no run is
    if gate is not None:
        opening = tl.load(gate + dim, mask=in_row, other=0.0).to(tl.float32)
        vector *= opening * tl.sigmoid(opening)
    if not CONSTANT:
        matrix = tl.load(at, mask=mask, other=0.0)
    out = tl.sum(matrix.to(tl.float32) * vector[None, :], 1)
    if residual is not None:
        out += tl.load(residual + row, mask=there, other=0.0).to(tl.float32)
    tl.store(y + row, out.to(y.dtype.element_ty), mask=there)
