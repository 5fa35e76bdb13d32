"""PyTorch's FlashAttention 2 (arXiv 2307.08691), in its form for packed sequences; a batch is a row of equal documents.

Shapes: B batch, T tokens, H query heads, G key/value heads, D head dim, N documents.
"""

import torch
from torch import Tensor

__all__ = ["flash_attention", "flash_inputs"]

_ALIGNED = 8  # numbers of 16 bits, which FlashAttention loads at a time


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None, scale: float
) -> Tensor:
    """Causal attention.

    Args:
        q: [B, T, H, D].
        k: [B, T, H, D].
        v: [B, T, H, D].
        cu_seqlens: [N + 1], or None.
        window: keys that a token sees, itself included; None for all.
        scale: of the logits.

    Returns:
        [B, T, H, D].
    """
    from torch.nn.attention.varlen import varlen_attn  # loads half of the compiler

    batch, seq_len = q.shape[:2]
    if cu_seqlens is None:
        ends = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * seq_len
    else:
        ends = cu_seqlens.int()
    before = -1 if window is None else window - 1  # beside the token itself
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    o: Tensor = varlen_attn(q, k, v, ends, ends, seq_len, seq_len, scale=scale, window_size=(before, 0))  # pyright: ignore[reportAssignmentType]
    return o.unflatten(0, (batch, seq_len))


def flash_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What FlashAttention 2 can read: key/value heads for each query head, and rows that are aligned.

    Args:
        q: [B, T, H, D], D a multiple of 8.
        k: [B, T, G, D].
        v: [B, T, G, D].
    """
    if q.shape[2] != k.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    return _aligned(q), _aligned(k), _aligned(v)


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy where it does not lie in rows of so many numbers."""
    places = x.storage_offset(), *x.stride()[:-1]
    if x.stride(-1) == 1 and all(place % _ALIGNED == 0 for place in places):
        return x
    return x.clone(memory_format=torch.contiguous_format)
