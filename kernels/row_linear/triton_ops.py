"""The torch.library op of the Triton kernel that multiplies a matrix by one row.

Shapes: K numbers of the row, d the size of what is normalised, N rows of the matrix.
"""

import torch
from torch import Tensor

# The kernel, and Triton with it, is imported at the first call: registering the op needs neither.


@torch.library.custom_op("zoo::row_linear_triton", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def row_linear(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    gate: Tensor | None,
    residual: Tensor | None,
    constant: bool,
) -> Tensor:
    """`multiply_row` as an op."""
    from zoo.kernels.row_linear.triton.launch import multiply_row

    with torch.cuda.device_of(x):
        return multiply_row(x, weight, norm_weight, eps, gate, residual, constant=constant)


@row_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    gate: Tensor | None,
    residual: Tensor | None,
    constant: bool,
) -> Tensor:
    return x.new_empty(weight.shape[0])
