"""Rotary position embedding (arXiv 2104.09864), for every mixer that compares queries with keys.

Shapes: B batch, T sequence length, H heads, d_h head dim.
"""

from dataclasses import dataclass
from typing import Annotated, Self

import torch
from torch import Tensor

from zoo.kernels.precision import precise
from zoo.mixers.context import Context, RotaryTable
from zoo.mixers.heads import HeadOptions
from zoo.mixers.options import AtLeast, OptionError

__all__ = ["RotaryOptions", "rotate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryOptions(HeadOptions):
    """Heads that may be rotated by their position.

    Attributes:
        rope: whether they are.
        rope_theta: base of the rotary frequencies.
    """

    rope: bool = True
    rope_theta: Annotated[float, AtLeast(1)] = 10000.0

    def resolve(self, dim: int) -> Self:
        """Fill in the heads; rotary positions turn pairs, so head_dim must be even."""
        resolved = super(RotaryOptions, self).resolve(dim)  # slots=True makes a new class, unknown to super()
        if self.rope and resolved.heads[2] % 2:
            raise OptionError("head_dim", resolved.head_dim, "an even number, or rope: false")
        return resolved

    @property
    def rotary_table(self) -> RotaryTable | None:
        """What the model builds once for all layers, of resolved options."""
        return RotaryTable(self.heads[2], (self.rope_theta,)) if self.rope else None


def rotate(x: Tensor, context: Context, wanted: RotaryTable | None) -> Tensor:
    """Turn each head by its position, the two halves of a head forming the pairs.

    Args:
        x: [B, T, H, d_h].
        context: with the table in it.
        wanted: the table; None to leave x as it is.

    Returns:
        [B, T, H, d_h] in the dtype of x.
    """
    if wanted is None:
        return x
    table = context.tables[wanted]
    assert table is not None
    cos, sin = table.unbind(0)
    a, b = precise(x).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
