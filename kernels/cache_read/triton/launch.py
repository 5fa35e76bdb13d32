"""Reading from caches on CUDA: allocates, and launches the kernel.

Shapes: B rows, P splits, S slots of a cache, H query heads, G key heads, G_v value heads, D and D_v their sizes.
"""

import torch
import triton
from torch import Tensor

from zoo.kernels.cache_read.schedule import configuration, partial_shapes
from zoo.kernels.cache_read.triton.kernels import cache_read_kernel

_WARPS = 4


def read_splits(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, kappa: str, round_decimals: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What each split of a row's slots adds, of the arguments of `read_cache_reference`.

    Returns:
        As `partial_shapes` says: the sums of the weighted values, the highest logits to the base 2, and the sums of
        the weights.
    """
    partial, highest, sums = (q.new_empty(shape, dtype=torch.float32) for shape in partial_shapes(q, k, v, kappa))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (batch, num_heads, key_dim), (value_heads, value_dim) = q.shape, v.shape[2:]
    repeat, splits = num_heads // value_heads, partial.shape[1]
    blocks = configuration(repeat, key_dim, value_dim, v.dtype)
    cache_read_kernel[(batch * splits * value_heads * triton.cdiv(repeat, blocks.rows),)](
        q,
        k,
        v,
        counts.contiguous(),
        partial,
        highest,
        sums,
        v.shape[1],
        splits,
        scale,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        HEADS=num_heads,
        KEY_HEADS=k.shape[2],
        VALUE_HEADS=value_heads,
        Q_ROW=q.stride(1),
        K_ROW=k.stride(1),
        V_ROW=v.stride(1),
        K_HEAD=k.stride(2),
        V_HEAD=v.stride(2),
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=blocks.block_k,
        BLOCK_V=blocks.block_v,
        ROWS=blocks.rows,
        SLOTS=blocks.slots,
        STAGES=blocks.stages,
        KAPPA=kappa,
        UNIT=float(10**round_decimals),
        num_warps=_WARPS,
    )
    return partial, highest, sums
