"""How attention's Triton kernels are laid out: rules of head sizes and dtype, never tuned, free of T and the window.

Shapes: B batch, T tokens, H query heads, G key/value heads, D and D_v their sizes, N documents.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.kernels.packing import num_blocks
from zoo.kernels.tiling import block_size

__all__ = ["WIDEST", "Configuration", "configuration", "num_places"]

WIDEST = 1 << 30  # window: all there is, and int32 holds it with a position added
_WIDE = 128  # numbers of a head


class Configuration(NamedTuple):
    """How the kernels are compiled for heads of one size.

    Attributes:
        block_k: D rounded up to a power of two.
        block_v: D_v rounded up to a power of two.
        tile: rows of a block, and keys of one.
        parts: blocks of rows that some kernels take at once; documents are cut so.
        warps: of a program.
        stages: of its software pipeline.
    """

    block_k: int
    block_v: int
    tile: int
    parts: int
    warps: int
    stages: int


@cache
def configuration(key_dim: int, value_dim: int, dtype: torch.dtype) -> Configuration:
    """The configuration for head sizes D, D_v and the dtype of v."""
    tile, parts = _tile(key_dim, value_dim, dtype)
    wide = max(key_dim, value_dim) > _WIDE
    stages = 1 if wide or dtype == torch.float32 else 2
    return Configuration(block_size(key_dim), block_size(value_dim), tile, parts, 8 if wide else 4, stages)


def num_places(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> int:
    """Places for the numbers of a head's rows, such as their log-sum-exp: as many for each block as a whole one needs.

    Args:
        q: [B, T, H, D], of any of these sizes a symbol, too.
        v: [B, T, G, D_v].
        cu_seqlens: [N + 1], or None.
    """
    tile, parts = _tile(q.shape[3], v.shape[3], v.dtype)
    return num_blocks(q.shape[1], cu_seqlens, tile * parts) * tile * parts


def _tile(key_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows of a block, and how many of these are taken at once."""
    wide = max(key_dim, value_dim) > _WIDE
    if dtype != torch.float32:
        return 64, 1 if wide else 2
    return 16 if wide else 32, 1  # tf32x3 products hold each operand in two parts, in registers
