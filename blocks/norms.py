"""Norms over the model's width.

Shapes: D model width.
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from zoo.mixers import norms
from zoo.mixers.options import Between, Options

__all__ = ["LayerNorm", "NormOptions", "RMSNorm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NormOptions(Options):
    """Options of `RMSNorm`.

    Attributes:
        eps: added to the mean square.
    """

    eps: Annotated[float, Between(0, 1)] = 1e-6

    def num_params(self, dim: int) -> int:
        """A weight for each channel."""
        return dim


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNormOptions(NormOptions):
    """Options of `LayerNorm`.

    Attributes:
        bias: whether a bias is added.
    """

    bias: bool = False

    def num_params(self, dim: int) -> int:
        """A weight, and a bias if wanted, for each channel."""
        return dim * (1 + self.bias)


class RMSNorm(norms.RMSNorm):
    """x / rms(x) * weight (arXiv 1910.07467).

    Args:
        options: resolved options.
        dim: D.
    """

    Config = NormOptions

    def __init__(self, options: NormOptions, dim: int) -> None:
        super().__init__(dim, options.eps)


class LayerNorm(nn.LayerNorm):
    """(x - mean) / std * weight, and a bias if wanted (arXiv 1607.06450).

    Args:
        options: resolved options.
        dim: D.
    """

    Config = LayerNormOptions

    def __init__(self, options: LayerNormOptions, dim: int) -> None:
        super().__init__(dim, bias=options.bias)
        self.static_eps: norms.StaticFloat = (options.eps,)

    def forward(self, input: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return nn.functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.static_eps[0])
