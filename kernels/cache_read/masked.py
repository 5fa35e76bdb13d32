"""Reading from caches in plain PyTorch, over all slots at once, those that are not there masked.

Shapes: B rows, S slots of a cache, H query heads, G key heads, G_v value heads, D and D_v their sizes.
"""

import torch
from torch import Tensor

from zoo.kernels.kappa import weigh
from zoo.kernels.precision import precise, without_autocast

__all__ = ["read_cache_masked"]


def read_cache_masked(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, kappa: str, round_decimals: int, scale: float
) -> tuple[Tensor, Tensor | None]:
    """`read_cache_reference`, its arguments and results, without a look at the values of counts: one graph for all."""
    hidden = torch.arange(k.shape[1], device=q.device) >= counts[:, None]  # [B, S]
    with without_autocast(q.device):
        query = precise(q).unflatten(1, (k.shape[2], -1))  # [B, G, H / G, D]
        logits = (scale * query @ precise(k).permute(0, 2, 3, 1)).flatten(1, 2)  # [B, H, S]
        # A weight of 0 does not stop what values hold that are not there: it may be inf or NaN.
        value = precise(v).masked_fill(hidden[:, :, None, None], 0).transpose(1, 2)  # [B, G_v, S, D_v]
        weights = weigh(logits, hidden[:, None], kappa, round_decimals).unflatten(1, (v.shape[2], -1))
        o = (weights @ value).flatten(1, 2)
        if kappa != "softmax":
            return o, None
        return o, logits.masked_fill(hidden[:, None], float("-inf")).logsumexp(-1)
