"""Reading from caches row by row and head by head: the oracle.

Shapes: B rows, S slots of a cache, H query heads, G key heads, G_v value heads, D and D_v their sizes.
"""

import torch
from torch import Tensor

from zoo.kernels.kappa import weigh
from zoo.kernels.precision import precise, without_autocast

__all__ = ["read_cache_reference"]


def read_cache_reference(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, kappa: str, round_decimals: int, scale: float
) -> tuple[Tensor, Tensor | None]:
    """o_h = sum_{s < count} kappa(scale * q_h . k_s) v_s, and for softmax log sum_{s < count} exp(scale * q_h . k_s).

    Args:
        q: [B, H, D].
        k: [B, S, G, D]; query head h is compared with head h // (H // G).
        v: [B, S, G_v, D_v]; query head h reads head h // (H // G_v).
        counts: [B], whose values are read on the host.
        kappa: one of `KAPPAS`.
        round_decimals: that "round" keeps.
        scale: of the logits.

    Returns:
        o [B, H, D_v] and, for softmax, log_sum [B, H], in float32 (float64 for float64).
    """
    num_heads = q.shape[1]
    outputs, log_sums = [], []
    with without_autocast(q.device):
        for query, key, value, count in zip(precise(q), precise(k), precise(v), counts.tolist(), strict=True):
            there = slice(max(count, 0))
            for h in range(num_heads):
                keys = key[there, h // (num_heads // k.shape[2])]
                values = value[there, h // (num_heads // v.shape[2])]
                logits = scale * keys @ query[h]
                hidden = torch.zeros_like(logits, dtype=torch.bool)
                outputs.append(weigh(logits, hidden, kappa, round_decimals) @ values)
                log_sums.append(logits.logsumexp(0))
    o = torch.stack(outputs).unflatten(0, q.shape[:2])
    return o, torch.stack(log_sums).unflatten(0, q.shape[:2]) if kappa == "softmax" else None
