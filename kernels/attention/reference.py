"""Softmax attention, written out: the oracle.

Shapes: B batch, T_q queries, T_k keys, H heads, G key/value heads, D head dim.
"""

import torch
from torch import Tensor

from zoo.kernels.precision import precise_dtype, without_autocast

__all__ = ["attention_reference"]


def attention_reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(scale * q k^T) v over the visible keys, in fp32 (fp64 for fp64 inputs).

    Args:
        q: [B, T_q, H, D].
        k: [B, T_k, G, D], G dividing H.
        v: [B, T_k, G, D_v].
        mask: bool, broadcastable to [B, 1, T_q, T_k], True where a key is visible.
        scale: factor of the logits.

    Returns:
        [B, T_q, H, D_v] in the dtype of v.
    """
    precise = precise_dtype(v.dtype)
    groups = q.shape[2] // k.shape[2]
    with without_autocast(q.device):
        keys, values = (x.to(precise).repeat_interleave(groups, 2) for x in (k, v))
        logits = torch.einsum("bqhd,bkhd->bhqk", q.to(precise), keys) * scale
        weights = logits.masked_fill(~mask, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, values).contiguous().to(v.dtype)
