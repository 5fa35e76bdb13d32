"""What full and sliding-window attention have in common: projections, norms, rotary positions, and the cache.

Shapes: B batch, T sequence length, D model width, H heads, G key/value heads, d_h head dim, S slots of the cache.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

import torch
from torch import Tensor, nn

from zoo.kernels.attention import attention
from zoo.kernels.precision import precise
from zoo.mixers.context import AttentionMask, Context, RotaryTable, slot_positions
from zoo.mixers.contract import Mixer, State
from zoo.mixers.feature_maps import l2_normalize
from zoo.mixers.heads import HeadOptions
from zoo.mixers.norms import RMSNorm
from zoo.mixers.options import AtLeast, OptionError

__all__ = ["AttentionOptions", "SoftmaxAttention", "rotate", "write_ring"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions(HeadOptions):
    """Options of softmax attention.

    Attributes:
        qk_norm: norm of queries and keys per head: "rms" is learned; "l2" gives cosines, whose logits are scaled by
            d_h^1/2 (as rms without its weights would); "none".
        rope: whether queries and keys are rotated by their position.
        rope_theta: base of the rotary frequencies.
        backend: the implementation, see `zoo.kernels.attention.attention`.
    """

    qk_norm: Literal["rms", "l2", "none"] = "none"
    rope: bool = True
    rope_theta: Annotated[float, AtLeast(1)] = 10000.0
    backend: Literal["auto", "sdpa", "reference"] = "auto"

    def resolve(self, dim: int) -> Self:
        """Fill in the heads; rotary positions turn pairs, so head_dim must be even."""
        resolved = super(AttentionOptions, self).resolve(dim)  # slots=True makes a new class, unknown to super()
        if self.rope and resolved.heads[2] % 2:
            raise OptionError("head_dim", resolved.head_dim, "an even number, or rope: false")
        return resolved

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
        self.backend = options.backend
        self.qk_norm = options.qk_norm
        self.mask = AttentionMask(window)
        self.rotary = RotaryTable(self.head_dim, (options.rope_theta,)) if options.rope else None
        self.shared = (self.mask,) if self.rotary is None else (self.mask, self.rotary)
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=False)
        if options.qk_norm == "rms":
            self.q_norm = RMSNorm(self.head_dim)
            self.k_norm = RMSNorm(self.head_dim)
        self.out_proj = nn.Linear(self.num_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, State | None]:
        """See `Mixer.forward`."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.in_proj(x).split(self.widths, -1))
        q, k = self._normalize(q, k)
        if self.rotary is not None:
            table = context.tables[self.rotary]
            assert table is not None
            q, k = rotate(q, table), rotate(k, table)
        if state is not None:
            start = context.positions[:, 0]
            k, v, state = _append(k, v, state, start)
        scale = self.head_dim ** (0.5 if self.qk_norm == "l2" else -0.5)
        o = attention(q, k, v, mask=context.tables[self.mask], scale=scale, impl=self.backend)
        return self.out_proj(o.flatten(-2)), state

    def _normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.qk_norm == "rms":
            return self.q_norm(q), self.k_norm(k)
        if self.qk_norm == "l2":
            return l2_normalize(q), l2_normalize(k)
        return q, k

    def init_state(self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype) -> State:
        """``keys`` and ``values`` [B, S, G, d_h]: a ring of the last S = window tokens, or of all max_length."""
        shape = batch_size, self.mask.window or max_length, self.num_kv_heads, self.head_dim
        return {name: torch.zeros(shape, device=device, dtype=dtype) for name in ("keys", "values")}


def _append(k: Tensor, v: Tensor, state: State, start: Tensor) -> tuple[Tensor, Tensor, State]:
    """Cached and new keys and values side by side, and the cache with the new ones written into it."""
    cached = state["keys"].to(k.dtype), state["values"].to(v.dtype)
    written = {"keys": write_ring(state["keys"], k, start), "values": write_ring(state["values"], v, start)}
    return torch.cat([cached[0], k], 1), torch.cat([cached[1], v], 1), written


def write_ring(cache: Tensor, new: Tensor, start: Tensor) -> Tensor:
    """A ring cache after T more tokens; where more tokens come than there are slots, the last ones stay.

    Each slot looks up the newest token that belongs in it, so one graph serves every T.

    Args:
        cache: [B, S, G, d_h].
        new: [B, T, G, d_h].
        start: [B] int64, number of tokens seen before.

    Returns:
        [B, S, G, d_h].
    """
    length = new.shape[1]
    source = slot_positions(start + length, cache.shape[1]) - start[:, None]
    index = source.clamp(0, length - 1)[:, :, None, None].expand(-1, -1, *new.shape[2:])
    return torch.where((source >= 0)[:, :, None, None], new.gather(1, index).to(cache.dtype), cache)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), the two halves of a head forming the pairs.

    Args:
        x: [B, T, H, d_h].
        table: [2, B or 1, T, 1, d_h / 2], see `RotaryTable`.

    Returns:
        [B, T, H, d_h] in the dtype of x.
    """
    cos, sin = table.unbind(0)
    a, b = precise(x).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
