"""PyTorch's FlashAttention 2 (arXiv 2307.08691), in its form for packed sequences; a batch is a row of equal documents.

Shapes: B batch, T tokens, H query heads, G key/value heads, D head dim, N documents.
"""

import torch
from torch import Tensor

from zoo.kernels.attention.layout import aligned, with_contiguous_gradient

__all__ = ["flash_attention"]


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
    q, k, v = (aligned(x).flatten(0, 1) for x in (q, k, v))
    o: Tensor = varlen_attn(q, k, v, ends, ends, seq_len, seq_len, scale=scale, window_size=(before, 0))  # pyright: ignore[reportAssignmentType]
    return with_contiguous_gradient(o.unflatten(0, (batch, seq_len)))
