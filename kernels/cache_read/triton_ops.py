"""The torch.library op of the Triton kernel that reads from caches: functional, with a fixed number of outputs.

Shapes: B rows, P splits, S slots of a cache, H query heads, G key heads, G_v value heads, D and D_v their sizes.
"""

import torch
from torch import Tensor

from zoo.kernels.cache_read.schedule import partial_shapes

# The kernel, and Triton with it, is imported at the first call: registering the op needs neither.


@torch.library.custom_op("zoo::read_cache_triton", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def read_cache(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, kappa: str, round_decimals: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`read_splits` as an op."""
    from zoo.kernels.cache_read.triton.launch import read_splits

    with torch.cuda.device_of(q):
        return read_splits(q, k, v, counts, kappa, round_decimals, scale)


@read_cache.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, kappa: str, round_decimals: int, scale: float
) -> tuple[Tensor, ...]:
    return tuple(v.new_empty(shape, dtype=torch.float32) for shape in partial_shapes(q, k, v, kappa))
