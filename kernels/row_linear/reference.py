"""A matrix times one row, in plain PyTorch: the oracle, and the form where Triton cannot.

Shapes: K numbers of the row, d the size of what is normalised, N rows of the matrix.
"""

import torch.nn.functional as F
from torch import Tensor


def row_linear_reference(
    x: Tensor, weight: Tensor, norm_weight: Tensor | None, eps: float, gate: Tensor | None, residual: Tensor | None
) -> Tensor:
    """y = W (norm(x) * SiLU(gate)) + residual.

    Args:
        x: [..., d], K numbers.
        weight: [N, K].
        norm_weight: [d], or None.
        eps: of the norm.
        gate: K numbers, or None.
        residual: N numbers, or None.

    Returns:
        y [N].
    """
    if norm_weight is not None:
        x = F.rms_norm(x, norm_weight.shape, norm_weight, eps)
    x = x.reshape(-1)
    if gate is not None:
        x = x * F.silu(gate.reshape(-1))
    y = F.linear(x, weight)
    return y if residual is None else y + residual.reshape(-1)
