"""DeltaNet: linear attention whose state is written by the delta rule (arXiv 2406.06484).

Shapes: B batch, T sequence length, D model width, H query heads, G key/value heads, d_k and d_v their sizes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from zoo.kernels.delta_rule import chunk_delta_rule, step_delta_rule
from zoo.kernels.delta_step import delta_step
from zoo.kernels.precision import precise_dtype
from zoo.mixers.context import Context
from zoo.mixers.contract import Mixer, State
from zoo.mixers.feature_maps import (
    Decay,
    ShortConvolution,
    Strength,
    StrengthKind,
    convolve,
    l1_normalize,
)
from zoo.mixers.heads import HeadOptions
from zoo.mixers.norms import RMSNorm
from zoo.mixers.options import AtLeast, Between, Component, OptionError, component
from zoo.mixers.projection import project

__all__ = ["DeltaNet", "DeltaNetOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNetOptions(HeadOptions):
    """Options of `DeltaNet`.

    Attributes:
        beta: writing strength: learned, in (0, 1) or (0, 2), or a fixed number.
        feature_map: applied to queries and keys (values pass through SiLU).
        qk_norm: what queries and keys are divided by.
        conv_size: taps of the short convolution on queries, keys and values; 0 for none.
        conv_bias: whether it has a bias.
        output_gate: whether the output is multiplied by SiLU of a projection of the input.
        expand_k: d_k over head_dim.
        expand_v: d_v over head_dim.
    """

    typical_head_dim: ClassVar[int] = 128
    decays: ClassVar[bool] = False
    """Whether the memory's decay is projected from the input."""

    beta: StrengthKind = "sigmoid"
    feature_map: Component = component("feature_map", "silu")
    qk_norm: Literal["l2", "l1", "none"] = "l2"
    conv_size: Annotated[int, Between(0, 64)] = 4
    conv_bias: bool = False
    output_gate: bool = False
    expand_k: Annotated[float, AtLeast(0)] = 1.0
    expand_v: Annotated[float, AtLeast(0)] = 1.0

    def validate(self) -> None:
        """A bias needs a convolution."""
        if self.conv_bias and not self.conv_size:
            raise OptionError("conv_bias", self.conv_bias, "false where conv_size is 0")

    def resolve(self, dim: int) -> Self:
        """Fill in the heads; the expanded sizes must be whole numbers."""
        resolved = super(DeltaNetOptions, self).resolve(dim)  # slots=True makes a new class, unknown to super()
        for key in ("expand_k", "expand_v"):
            size = getattr(self, key) * resolved.heads[2]
            if round(size) < 1 or not math.isclose(size, round(size)):
                raise OptionError(key, getattr(self, key), f"a factor that makes head_dim = {resolved.head_dim} whole")
        return resolved

    @property
    def head_sizes(self) -> tuple[int, int]:
        """d_k and d_v."""
        head_dim = self.heads[2]
        return round(self.expand_k * head_dim), round(self.expand_v * head_dim)

    @property
    def learns_beta(self) -> bool:
        """Whether beta is projected from the input."""
        return isinstance(self.beta, str)

    @property
    def projected(self) -> tuple[int, int, int, int, int, int]:
        """Widths of queries, keys, values, beta, decay and gate in the fused projection."""
        (H, G, _), (d_k, d_v) = self.heads, self.head_sizes
        return H * d_k, G * d_k, G * d_v, G * self.learns_beta, G * self.decays, H * d_v * self.output_gate

    def num_params(self, dim: int) -> int:
        """Projections, convolution, the output norm, and what a feature map of the user's own learns."""
        (H, _, _), (_, d_v) = self.heads, self.head_sizes
        taps = sum(self.projected[:3]) * (self.conv_size + self.conv_bias)
        return dim * (sum(self.projected) + H * d_v) + taps + d_v + self.feature_map.options.num_params(dim)

    def flops_per_token(self, dim: int, length: int) -> float:
        """Projections, convolution, and the recurrence: read old value, write, read out: 2 d_k d_v each."""
        del length
        (H, G, _), (d_k, d_v) = self.heads, self.head_sizes
        projections = 2 * dim * (sum(self.projected) + H * d_v)
        return projections + 2 * self.conv_size * sum(self.projected[:3]) + (4 * G + 2 * H) * d_k * d_v

    def state_bytes(self, dim: int, length: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """The fp32 memory of each head and the convolution's taps: the same at every length."""
        del dim, length
        (_, G, _), (d_k, d_v) = self.heads, self.head_sizes
        memory = G * d_k * d_v * precise_dtype(dtype).itemsize
        return memory + self.conv_size * sum(self.projected[:3]) * dtype.itemsize


class DeltaNet(Mixer):
    """q, k = norm(phi(conv(W x))), v = SiLU(conv(W x)); delta rule; RMSNorm per head, optional gate; W_o.

    Args:
        options: resolved options.
        dim: D.
        feature_map: makes phi.
    """

    Config = DeltaNetOptions

    def __init__(self, options: DeltaNetOptions, dim: int, feature_map: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.options = options
        self.num_heads, self.num_kv_heads, _ = options.heads
        self.d_k, self.d_v = options.head_sizes
        self.qkv_widths, self.gate_widths = list(options.projected[:3]), list(options.projected[3:5])
        self.widths = [sum(self.qkv_widths), sum(self.gate_widths), options.projected[5]]
        self.in_proj = nn.Linear(dim, sum(options.projected), bias=False)
        self.conv = (
            ShortConvolution(self.widths[0], options.conv_size, bias=options.conv_bias) if options.conv_size else None
        )
        self.beta = Strength(options.beta, self.num_kv_heads)
        self.decay = Decay(self.num_kv_heads) if options.decays else None
        self.feature_map = feature_map()
        self.conv_activates = self.conv is not None and options.feature_map.name == "silu"  # as values have SiLU too
        self.has_step = self.conv_activates and options.qk_norm in ("l2", "none")
        self.norm = RMSNorm(self.d_v)
        self.out_proj = nn.Linear(self.num_heads * self.d_v, dim, bias=False)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, State | None]:
        """See `Mixer.forward`."""
        qkv, gates, output_gate = project(self.in_proj, x, self.widths)
        beta, decay = gates.split(self.gate_widths, -1)
        g = None if self.decay is None else context.hide_padding(self.decay(decay))
        if state is not None and context.steps and context.lengths is None and self.has_step:
            o = self._step(qkv, beta, g, context, state)
        else:
            q, k, v = self._features(qkv, context, state)
            o = self._apply_rule(q, k, v, context.hide_padding(self.beta(beta)), g, context, state)
        o = self.norm(o).flatten(-2)
        if self.options.output_gate:
            o = o * nn.functional.silu(output_gate)
        return self.out_proj(o), state

    def _step(self, qkv: Tensor, beta: Tensor, g: Tensor | None, context: Context, state: State) -> Tensor:
        """Of one token in each row all that stands between the projections."""
        assert self.conv is not None
        assert context.start is not None
        o = delta_step(
            qkv[:, 0],
            self.conv.weight,
            state["taps"],
            context.start,
            state["memory"],
            beta[:, 0] if self.options.learns_beta else None,
            bias=self.conv.bias,
            g=None if g is None else g[:, 0],
            strength=self.beta.factor[0],
            qk_l2norm=self.options.qk_norm == "l2",
        )
        return o[:, None]

    def _apply_rule(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, context: Context, state: State | None
    ) -> Tensor:
        """The memory in the state is updated; a token with beta and g of 0 leaves it as it is."""
        norm = self.options.qk_norm == "l2"
        memory = None if state is None else state["memory"]
        if memory is not None and context.steps:
            return step_delta_rule(q, k, v, beta, memory, g=g, qk_l2norm=norm)
        initial = None if context.fresh else memory
        o, final = chunk_delta_rule(
            q, k, v, beta, g=g, initial_state=initial, cu_seqlens=context.cu_seqlens, qk_l2norm=norm
        )
        if memory is not None:
            memory.copy_(final)
        return o

    def _features(self, qkv: Tensor, context: Context, state: State | None) -> tuple[Tensor, Tensor, Tensor]:
        activation = "silu" if self.conv_activates else None
        q, k, v = convolve(self.conv, qkv, self.qkv_widths, context, state, activation)
        if not self.conv_activates:
            q, k, v = self.feature_map(q), self.feature_map(k), nn.functional.silu(v)
        q = q.unflatten(-1, (self.num_heads, self.d_k))
        k = k.unflatten(-1, (self.num_kv_heads, self.d_k))
        if self.options.qk_norm == "l1":
            q, k = l1_normalize(q), l1_normalize(k)
        return q, k, v.unflatten(-1, (self.num_kv_heads, self.d_v))

    def init_state(self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype) -> State:
        """``memory`` [B, G, d_k, d_v] fp32, and ``taps`` [B, K, C] where there is a convolution."""
        del max_length
        shape = batch_size, self.num_kv_heads, self.d_k, self.d_v
        state = {"memory": torch.zeros(shape, device=device, dtype=precise_dtype(dtype))}
        if self.conv is not None:
            state["taps"] = self.conv.new_taps(batch_size, device, dtype)
        return state
