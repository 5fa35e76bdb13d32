"""A matrix times one row on CUDA: allocates, and launches the kernel.

Shapes: K numbers of the row, d the size of what is normalised, N rows of the matrix.
"""

import triton
from torch import Tensor

from zoo.kernels.row_linear.triton.kernels import row_linear_kernel
from zoo.kernels.tiling import block_size
from zoo.kernels.triton.early import early_options

_NUMBERS = 8192  # of the matrix in a program
_MOST_ROWS = 4
_WARP = 2048  # numbers of the matrix for a warp, which keeps enough of them on their way


def multiply_row(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    gate: Tensor | None,
    residual: Tensor | None,
    *,
    constant: bool,
) -> Tensor:
    """y of `row_linear`, in one launch; its arguments."""
    (num_rows, count), size = weight.shape, x.shape[-1]
    y = x.new_empty(num_rows)
    if weight.stride(1) != 1:
        weight, constant = weight.contiguous(), False
    x, gate, residual, norm_weight = (
        None if part is None else part.reshape(-1).contiguous() for part in (x, gate, residual, norm_weight)
    )
    block = block_size(count)
    rows = max(1, min(_MOST_ROWS, _NUMBERS // block))
    row_linear_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        weight,
        norm_weight,
        gate,
        residual,
        y,
        num_rows,
        eps,
        K=count,
        ROW=weight.stride(0),
        SIZE=size,
        BLOCK=block,
        ROWS=rows,
        CONSTANT=constant,
        num_warps=max(1, min(8, rows * block // _WARP)),
        **early_options(y.device),
    )
    return y
