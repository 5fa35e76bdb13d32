"""How attention's Triton kernels are laid out: rules of head sizes and dtype, never tuned, free of T and the window."""

from functools import cache
from typing import NamedTuple

import torch

from zoo.kernels.tiling import Tiles, block_size

__all__ = ["Configuration", "configuration"]


class Configuration(NamedTuple):
    """How the kernels are compiled for heads of one size.

    Attributes:
        block_k: D rounded up to a power of two.
        block_v: D_v rounded up to a power of two.
        forward: the outputs.
        rows: the gradients of q.
        keys: the gradients of k and v.
    """

    block_k: int
    block_v: int
    forward: Tiles
    rows: Tiles
    keys: Tiles


@cache
def configuration(key_dim: int, value_dim: int, dtype: torch.dtype) -> Configuration:
    """The configuration for head sizes D, D_v and the dtype of v."""
    block_k, block_v = block_size(key_dim), block_size(value_dim)
    widest = max(block_k, block_v)
    if dtype == torch.float32:  # tf32x3 products hold each operand in two parts, in registers
        tiles = Tiles(32, 32, 4, 1) if widest <= 128 else Tiles(16, 16, 8, 1)
        return Configuration(block_k, block_v, tiles, tiles, tiles)
    if widest > 128:
        tiles = Tiles(64, 64, 8, 1)
        return Configuration(block_k, block_v, tiles, tiles, tiles)
    deep, flat = Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2)
    return Configuration(block_k, block_v, *((flat, deep) if widest <= 64 else (deep, flat)), flat)
