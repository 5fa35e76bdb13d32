"""Which keys a query sees: causal, within a window, within its own document.

Shapes: T_q queries, T_k keys, N documents.
"""

import torch
from torch import Tensor

__all__ = ["document_ids", "visible"]


def document_ids(cu_seqlens: Tensor, length: int) -> Tensor:
    """The document of each of ``length`` packed tokens: [T] int64, from cu_seqlens [N + 1]."""
    tokens = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, tokens, right=True) - 1


def visible(queries: Tensor, keys: Tensor, *, window: int | None = None, documents: Tensor | None = None) -> Tensor:
    """True where a query may attend to a key.

    Args:
        queries: [..., T_q] int64 positions.
        keys: [..., T_k] int64 positions; a negative one is an empty slot that nobody sees.
        window: number of visible keys, the query's own included; None for all before.
        documents: [T] ids when queries and keys are the same packed tokens.

    Returns:
        bool [..., T_q, T_k].
    """
    lag = queries[..., :, None] - keys[..., None, :]
    mask = (lag >= 0) & (keys[..., None, :] >= 0)
    if window is not None:
        mask = mask & (lag < window)
    if documents is not None:
        mask = mask & (documents[:, None] == documents[None, :])
    return mask
