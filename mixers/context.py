"""What the model builds once per call, so that no layer computes it again.

Shapes: B batch, T sequence length, N documents, S slots of a cache, d_h head dim.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from zoo.kernels.attention import Call, Mask, MaskKind, document_ids, make_mask, mask_kind, visible
from zoo.kernels.ring import slot_positions
from zoo.mixers.norms import StaticFloat

__all__ = ["AttentionMask", "Context", "RotaryTable", "Shared", "canonical"]

Description = TypeVar("Description")

_KNOWN: dict[Any, Any] = {}


class Shared(Protocol):
    """A hashable description of something that layers share; equal descriptions are built once."""

    def build(self, context: "Context") -> Any:
        """Compute it for one call of the model."""
        ...


def canonical(description: Description) -> Description:
    """The first of all equal descriptions: Dynamo tells blocks apart by the identity of a dictionary's keys, so that
    with others the blocks of one kind would not share a graph."""
    return _KNOWN.setdefault(description, description)


@dataclass(slots=True)
class Context:
    """One call's positions, documents and shared tables.

    Attributes:
        positions: [B or 1, T] int64; within its own document where sequences are packed.
        cu_seqlens: [N + 1] int32 of packed sequences, or None.
        start: [B] int64, how many tokens each row's state has seen, where there is a state.
        max_length: slots of a full cache, likewise.
        lengths: [B] int64, how many of the T tokens of each row are there, the first ones; None for all.
        fresh: whether the state has seen no token, so that these tokens are all there are.
        dtype: what the layers compute in, which may decide on a backend, and so on a mask.
        tables: what the layers asked for, by its description.
        masks: of attention that they need, by kind and window.
    """

    positions: Tensor
    cu_seqlens: Tensor | None = None
    start: Tensor | None = None
    max_length: int | None = None
    lengths: Tensor | None = None
    fresh: bool = False
    dtype: torch.dtype = torch.float32
    tables: dict[Shared, Any] = field(default_factory=dict)
    masks: dict[tuple[MaskKind | None, int | None], Mask | None] = field(default_factory=dict)

    @classmethod
    def from_tokens(
        cls, tokens: Tensor, cu_seqlens: Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> "Context":
        """The context of sequences that start here.

        Args:
            tokens: [B, T].
            cu_seqlens: [N + 1] if B = 1 row holds N packed documents.
            dtype: what the layers compute in.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if cu_seqlens is not None:
            documents = document_ids(cu_seqlens, tokens.shape[1])
            positions = positions - cu_seqlens.long()[documents]
        return cls(positions=positions[None], cu_seqlens=cu_seqlens, dtype=dtype)

    @classmethod
    def from_state(
        cls,
        tokens: Tensor,
        start: Tensor,
        max_length: int,
        *,
        lengths: Tensor | None = None,
        fresh: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> "Context":
        """The context of tokens that go on from a state.

        Args:
            tokens: [B, T].
            start: [B] int64, how many tokens each row's state has seen.
            max_length: slots of a full cache.
            lengths: [B] int64, how many of the T tokens are there; None for all.
            fresh: whether ``start`` is 0 for sure.
            dtype: what the layers compute in.
        """
        order = torch.arange(tokens.shape[1], device=tokens.device)[None]
        positions = order if fresh else start[:, None] + order
        return cls(positions=positions, start=start, max_length=max_length, lengths=lengths, fresh=fresh, dtype=dtype)

    @property
    def steps(self) -> bool:
        """Whether each row goes on from its state by one token."""
        return self.start is not None and not self.fresh and self.positions.shape[1] == 1

    def hide_padding(self, x: Tensor) -> Tensor:
        """x [B, T, ...] with zeros where there is no token."""
        if self.lengths is None:
            return x
        order = torch.arange(x.shape[1], device=x.device)
        there = order < self.lengths[:, None]
        return torch.where(there.view(*there.shape, *[1] * (x.ndim - 2)), x, 0)

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
    """Which keys each token sees, as far as the backend wants that made beforehand.

    Tokens that go on from a state see the slots of a ring cache, as they were, and then themselves: bool
    [B, 1, T, keys]. A single one needs no mask.

    Attributes:
        window: visible keys, the token itself included; None sees everything before.
        head_dim: d_h.
        backend: an implementation of `attention`.
    """

    window: int | None
    head_dim: int
    backend: str = "auto"

    def build(self, context: Context) -> Mask | None:
        """The mask for this call, or None where the backend needs none; layers that need the same one share it."""
        kind = self._kind(context)
        if (kind, self.window) not in context.masks:
            context.masks[kind, self.window] = self._make(kind, context)
        return context.masks[kind, self.window]

    def _kind(self, context: Context) -> MaskKind | None:
        if context.start is not None and not context.fresh:
            return None if context.steps else "pairs"
        packed = context.cu_seqlens is not None
        device, dims = context.positions.device, (self.head_dim, self.head_dim)
        return mask_kind(self.backend, Call(device, context.dtype, *dims, self.window is not None, packed))

    def _make(self, kind: MaskKind | None, context: Context) -> Mask | None:
        positions, window = context.positions, self.window
        if context.start is None or context.fresh or kind is None:
            return make_mask(kind, positions.shape[1], window, context.cu_seqlens, positions.device)
        assert context.max_length is not None
        cached = slot_positions(context.start, window or context.max_length)
        return visible(positions, torch.cat([cached, positions], 1), window=window)[:, None]

    def arguments(self, context: Context) -> dict[str, Any]:
        """What `attention` is told: the mask or what is visible, and the backend. A cache is read through a mask."""
        impl, mask = self.backend, context.tables[self]
        if context.start is not None and not context.fresh:
            impl = "reference" if impl == "reference" else "sdpa"
        if mask is not None:
            return {"mask": mask, "impl": impl}
        return {"window": self.window, "cu_seqlens": context.cu_seqlens, "impl": impl}
