"""Root mean square norm, over a head or over the model's width.

Shapes: d size of the last dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["RMSNorm", "StaticFloat"]

StaticFloat = tuple[float]
"""A float inside a tuple stays a constant of a compiled graph; a bare one, read from a module, becomes an input of a
graph with dynamic shapes, and the graph is traced a second time when that turns out not to pay."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467).

    Args:
        dim: d.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps: StaticFloat = (eps,)
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d] in the dtype of x, computed in fp32."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps[0])
