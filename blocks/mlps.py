"""MLPs: what each token computes alone.

Shapes: D model width, F hidden width.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Self

from torch import Tensor, nn

from zoo.mixers.options import AtLeast, Options
from zoo.mixers.projection import project

__all__ = ["GELUMLP", "MLPOptions", "SwiGLU", "SwiGLUOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPOptions(Options):
    """Options of an MLP with two matrices.

    Attributes:
        hidden_dim: F; 4 D if None.
    """

    hidden_dim: Annotated[int, AtLeast(1)] | None = None

    def resolve(self, dim: int) -> Self:
        """Fill in the hidden width."""
        return self if self.hidden_dim else replace(self, hidden_dim=4 * dim)

    def num_params(self, dim: int) -> int:
        """Both matrices."""
        assert self.hidden_dim, "resolve(dim) comes first"
        return 2 * dim * self.hidden_dim

    def flops_per_token(self, dim: int, length: int) -> float:
        """A multiply-add for each parameter."""
        del length
        return 2 * self.num_params(dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class SwiGLUOptions(MLPOptions):
    """Options of `SwiGLU`.

    Attributes:
        hidden_dim: F; 8/3 D, rounded up to a multiple of 256, if None.
    """

    def resolve(self, dim: int) -> Self:
        """Fill in the hidden width."""
        return self if self.hidden_dim else replace(self, hidden_dim=-(-8 * dim // (3 * 256)) * 256)

    def num_params(self, dim: int) -> int:
        """Gate, value and output matrices."""
        assert self.hidden_dim, "resolve(dim) comes first"
        return 3 * dim * self.hidden_dim


class SwiGLU(nn.Module):
    """W_o (SiLU(W_g x) * W_v x) (arXiv 2002.05202), W_g above W_v in one matrix.

    Args:
        options: resolved options.
        dim: D.
    """

    Config = SwiGLUOptions

    def __init__(self, options: SwiGLUOptions, dim: int) -> None:
        super().__init__()
        assert options.hidden_dim, "resolve(dim) comes first"
        self.in_proj = nn.Linear(dim, 2 * options.hidden_dim, bias=False)
        self.out_proj = nn.Linear(options.hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        gate, value = project(self.in_proj, x, [self.out_proj.in_features] * 2)
        return self.out_proj(nn.functional.silu(gate) * value)


class GELUMLP(nn.Module):
    """W_o GELU(W_i x) (arXiv 1606.08415).

    Args:
        options: resolved options.
        dim: D.
    """

    Config = MLPOptions

    def __init__(self, options: MLPOptions, dim: int) -> None:
        super().__init__()
        assert options.hidden_dim, "resolve(dim) comes first"
        self.in_proj = nn.Linear(dim, options.hidden_dim, bias=False)
        self.out_proj = nn.Linear(options.hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.out_proj(nn.functional.gelu(self.in_proj(x)))
