"""Gated DeltaNet: DeltaNet whose memory fades (arXiv 2412.06464).

Shapes: G key/value heads, d_k and d_v the sizes of their keys and values.
"""

from dataclasses import dataclass
from typing import ClassVar

from zoo.mixers.delta_net import DeltaNet, DeltaNetOptions

__all__ = ["GatedDeltaNet", "GatedDeltaNetOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaNetOptions(DeltaNetOptions):
    """Options of `GatedDeltaNet`: those of DeltaNet, whose output gate is on by default."""

    decays: ClassVar[bool] = True

    output_gate: bool = True

    def num_params(self, dim: int) -> int:
        """DeltaNet's, and the rate and bias of each decay."""
        return super(GatedDeltaNetOptions, self).num_params(dim) + 2 * self.heads[1]

    def flops_per_token(self, dim: int, length: int) -> float:
        """DeltaNet's, and the decay of each memory: d_k d_v."""
        (_, G, _), (d_k, d_v) = self.heads, self.head_sizes
        return super(GatedDeltaNetOptions, self).flops_per_token(dim, length) + G * d_k * d_v


class GatedDeltaNet(DeltaNet):
    """DeltaNet with S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, where `Decay` makes g of W x."""

    Config = GatedDeltaNetOptions
