"""What the model builds once per call, so that no layer computes it again.

Shapes: B batch, T sequence length, N documents, S slots of a cache, d_h head dim.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from zoo.kernels.attention import document_ids, visible
from zoo.mixers.cache import slot_positions
from zoo.mixers.norms import StaticFloat

__all__ = ["AttentionMask", "Context", "RotaryTable", "Shared"]


class Shared(Protocol):
    """A hashable description of something that layers share; equal descriptions are built once."""

    def build(self, context: "Context") -> Tensor | None:
        """Compute it for one call of the model."""
        ...


@dataclass(slots=True)
class Context:
    """One call's positions, documents and shared tables.

    Attributes:
        positions: [B or 1, T] int64; within its own document where sequences are packed.
        cu_seqlens: [N + 1] int32 of packed sequences, or None.
        max_length: slots of a full cache when decoding from a state, else None.
        tables: what the layers asked for, by its description.
    """

    positions: Tensor
    cu_seqlens: Tensor | None = None
    max_length: int | None = None
    tables: dict[Shared, Tensor | None] = field(default_factory=dict)

    @classmethod
    def from_tokens(cls, tokens: Tensor, cu_seqlens: Tensor | None = None) -> "Context":
        """The context of sequences that start here.

        Args:
            tokens: [B, T].
            cu_seqlens: [N + 1] if B = 1 row holds N packed documents.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if cu_seqlens is not None:
            documents = document_ids(cu_seqlens, tokens.shape[1])
            positions = positions - cu_seqlens.long()[documents]
        return cls(positions=positions[None], cu_seqlens=cu_seqlens)

    @classmethod
    def from_state(cls, tokens: Tensor, start: Tensor, max_length: int) -> "Context":
        """The context of tokens that go on from a state.

        Args:
            tokens: [B, T].
            start: [B] int64, how many tokens each row's state has seen.
            max_length: slots of a full cache.
        """
        positions = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return cls(positions=positions, max_length=max_length)

    def share(self, wanted: tuple[Shared, ...]) -> "Context":
        """Build each wanted table once."""
        for shared in wanted:
            self.tables[shared] = shared.build(self)
        return self


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines of rotary position embedding (arXiv 2104.09864): [2, B or 1, T, 1, d_h / 2] fp32."""

    head_dim: int
    theta: StaticFloat

    def build(self, context: Context) -> Tensor:
        """Angles position * theta^(-2i / d_h)."""
        # In fp64, once a call: at position 100,000 an fp32 angle is wrong in the third decimal.
        pairs = torch.arange(0, self.head_dim, 2, device=context.positions.device, dtype=torch.float64)
        angles = context.positions[..., None] * self.theta[0] ** (-pairs / self.head_dim)
        return torch.stack([angles.cos(), angles.sin()])[:, :, :, None].float()


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Which keys each token sees: bool [B or 1, 1, T, keys], or None where plain causal attention needs no mask.

    ``window`` counts the visible keys, the token itself included; None sees everything before.
    When decoding, the keys are a ring cache's slots followed by the new tokens.
    """

    window: int | None

    def build(self, context: Context) -> Tensor | None:
        """The mask for this call."""
        if context.max_length is not None:
            cached = slot_positions(context.positions[:, 0], self.window or context.max_length)
            keys = torch.cat([cached, context.positions], 1)
            return visible(context.positions, keys, window=self.window)[:, None]
        if self.window is None and context.cu_seqlens is None:
            return None
        length = context.positions.shape[1]
        order = torch.arange(length, device=context.positions.device)
        documents = None if context.cu_seqlens is None else document_ids(context.cu_seqlens, length)
        return visible(order, order, window=self.window, documents=documents)[None, None]
