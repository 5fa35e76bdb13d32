"""Reading from caches in Triton: the op reads splits of each row's slots, and plain PyTorch joins what they read.

Shapes: B rows, P splits, S slots of a cache, H query heads, G key heads, G_v value heads, D and D_v their sizes.
"""

import math

import torch
from torch import Tensor

from zoo.kernels.cache_read import triton_ops

__all__ = ["read_cache_in_splits"]


def read_cache_in_splits(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, kappa: str, round_decimals: int, scale: float
) -> tuple[Tensor, Tensor | None]:
    """`read_cache_reference`, its arguments and results, in Triton; compilers fuse the joining with what follows."""
    partial, highest, sums = triton_ops.read_cache(q, k, v, counts, kappa, round_decimals, scale)
    if kappa == "softmax":
        return _join(partial, highest, sums)
    if kappa == "exp":
        partial = partial * highest.exp2().unsqueeze(-1)
    return partial.sum(1), None


def _join(partial: Tensor, highest: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Of softmax; `highest` is to the base 2, and -inf where a split is empty."""
    top = highest.amax(1)  # [B, H]
    base = torch.where(top == float("-inf"), 0, top)
    factors = (highest - base.unsqueeze(1)).exp2()
    total = (sums * factors).sum(1)  # at least 1, for the highest logit weighs that, or 0 where no slot is there
    o = (partial * factors.unsqueeze(-1)).sum(1) / total.clamp_min(1).unsqueeze(-1)
    return o, (base + total.log2()) * math.log(2)
