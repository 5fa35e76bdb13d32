"""What full and sliding-window attention have in common: projections, norms, rotary positions, and the cache.

Shapes: B batch, T sequence length, D model width, H heads, G key/value heads, d_h head dim, S slots of the cache.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from zoo.kernels.attention import attention
from zoo.kernels.cache_read import read_cache
from zoo.kernels.ring import write
from zoo.mixers.context import AttentionMask, Context, canonical
from zoo.mixers.contract import Mixer, State
from zoo.mixers.feature_maps import HeadNorm, head_norm
from zoo.mixers.rotary import RotaryOptions, rotate

__all__ = ["AttentionOptions", "SoftmaxAttention"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions(RotaryOptions):
    """Options of softmax attention.

    Attributes:
        qk_norm: norm of queries and keys per head: "rms" is learned; "l2" gives cosines, whose logits are scaled by
            d_h^1/2 (as rms without its weights would); "none".
        backend: the implementation, see `zoo.kernels.attention.attention`. From a state that has seen tokens, several
            go through "sdpa", or "reference", and one through `zoo.kernels.cache_read.read_cache`.
    """

    qk_norm: HeadNorm = "none"
    backend: Literal["auto", "sdpa", "flash", "flex", "xformers", "triton", "reference"] = "auto"

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values in the fused projection."""
        H, G, d_h = self.heads
        return H * d_h, G * d_h, G * d_h

    def visible_keys(self, length: int) -> float:
        """Keys that a token sees, on average over a sequence of ``length``."""
        return (length + 1) / 2

    def num_slots(self, length: int) -> int:
        """Keys that decoding ``length`` tokens must hold."""
        return length

    def num_params(self, dim: int) -> int:
        """Projections, and the norms of queries and keys."""
        H, _, d_h = self.heads
        return dim * (sum(self.widths) + H * d_h) + (2 * d_h if self.qk_norm == "rms" else 0)

    def flops_per_token(self, dim: int, length: int) -> float:
        """Projections, and 2 d_h for the logit and for the value of each visible key."""
        H, _, d_h = self.heads
        return 2 * dim * (sum(self.widths) + H * d_h) + 4 * H * d_h * self.visible_keys(length)

    def state_bytes(self, dim: int, length: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Keys and values of every slot."""
        del dim
        return self.num_slots(length) * sum(self.widths[1:]) * dtype.itemsize


class SoftmaxAttention(Mixer):
    """softmax(q k^T) v with grouped heads, rotary positions and optional norms of q and k.

    Args:
        options: resolved options.
        dim: D.
        window: visible keys, the token itself included; None for all.
    """

    def __init__(self, options: AttentionOptions, dim: int, window: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = options.heads
        self.widths = list(options.widths)
        self.qk_norm = options.qk_norm
        self.mask = canonical(AttentionMask(window, self.head_dim, options.backend))
        self.rotary = canonical(options.rotary_table)
        self.shared = (self.mask,) if self.rotary is None else (self.mask, self.rotary)
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.q_norm = head_norm(options.qk_norm, self.head_dim)
        self.k_norm = head_norm(options.qk_norm, self.head_dim)
        self.out_proj = nn.Linear(self.num_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, State | None]:
        """See `Mixer.forward`."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.in_proj(x).split(self.widths, -1))
        q = rotate(self.q_norm(q), context, self.rotary)
        k = rotate(self.k_norm(k), context, self.rotary)
        o = self._attend(q, k, v, context, state)
        return self.out_proj(o.flatten(-2)), state

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None) -> Tensor:
        scale = self.head_dim ** (0.5 if self.qk_norm == "l2" else -0.5)
        if state is None or context.fresh:
            o = attention(q, k, v, scale=scale, **self.mask.arguments(context))
            self._remember(k, v, context, state)
            return o
        past = state["keys"], state["values"]
        if context.steps:
            self._remember(k, v, context, state)
            assert context.start is not None
            impl = "reference" if self.mask.backend == "reference" else "auto"
            o, _ = read_cache(q[:, 0], *past, context.start + 1, scale=scale, impl=impl)  # all that a ring has room for
            return o[:, None].to(v.dtype)
        keys, values = (torch.cat([old.to(new.dtype), new], 1) for old, new in zip(past, (k, v), strict=True))
        o = attention(q, keys, values, scale=scale, **self.mask.arguments(context))
        self._remember(k, v, context, state)  # only now, as the first tokens see what the last ones replace
        return o

    @staticmethod
    def _remember(k: Tensor, v: Tensor, context: Context, state: State | None) -> None:
        if state is not None:
            assert context.start is not None
            write(state["keys"], k, context.start, context.lengths)
            write(state["values"], v, context.start, context.lengths)

    def earliest(self, seen: int) -> int:
        """The first, unless a ring has begun to forget."""
        return 0 if self.mask.window is None or seen <= self.mask.window else seen

    def init_state(self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype) -> State:
        """``keys`` and ``values`` [B, S, G, d_h]: a ring of the last S = window tokens, or of all max_length."""
        shape = batch_size, self.mask.window or max_length, self.num_kv_heads, self.head_dim
        return {name: torch.zeros(shape, device=device, dtype=dtype) for name in ("keys", "values")}
