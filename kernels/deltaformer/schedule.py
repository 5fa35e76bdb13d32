"""How the Triton kernels of the write are laid out: rules of head sizes and dtype, never tuned, free of T.

Needs no Triton, so that shapes of what the kernels return are known without it.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.kernels.packing import num_blocks
from zoo.kernels.tiling import Tiles, block_size

__all__ = ["Configuration", "SolveBlocks", "configuration", "saved_shapes"]


class SolveBlocks(NamedTuple):
    """How a solve is compiled.

    Attributes:
        block_v: its slice of D_v.
        warps: of a program.
        stages: of its software pipeline.
        registers: a thread of it, at most; None for no limit.
    """

    block_v: int
    warps: int
    stages: int
    registers: int | None = None


class Configuration(NamedTuple):
    """How the kernels are compiled for heads of one size.

    Attributes:
        block: rows that are solved at once.
        block_k: D rounded up to a power of two.
        block_v: D_v rounded up to a power of two, or more.
        solve: of the write, and the transposed one.
        rows: the gradients of w and beta.
        keys: the gradients of k.
        ahead: blocks before its own for which a program does beforehand what needs no u.
        at_once: of the blocks before those, how many it waits for at once.
    """

    block: int
    block_k: int
    block_v: int
    solve: SolveBlocks
    rows: Tiles
    keys: Tiles
    ahead: int = 4
    at_once: int = 4


@cache
def configuration(key_dim: int, value_dim: int, dtype: torch.dtype) -> Configuration:
    """The configuration for head sizes D, D_v and the dtype of v."""
    block_k, block_v = block_size(key_dim), block_size(value_dim)
    widest = max(block_k, block_v)
    if dtype == torch.float32:  # tf32x3 products hold each operand in two parts, in registers
        block, warps = (32, 4) if widest <= 128 else (16, 8)
        solve, tiles = SolveBlocks(min(block_v, 64), warps, 1), Tiles(block, block, 8, 1)
        return Configuration(block, block_k, block_v, solve, tiles, tiles)
    # Loops over far blocks would share the place of narrower values with later products (see `tiles`).
    block_v = max(block_v, 64)
    if widest > 128:
        solve, tiles = SolveBlocks(min(block_v, 128), 4, 1), Tiles(64, 64, 8, 1)
        return Configuration(64, block_k, block_v, solve, tiles, tiles)
    if widest == 128:
        solve = SolveBlocks(block_v, 4, 2)
        return Configuration(64, block_k, block_v, solve, Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2))
    solve, tiles = SolveBlocks(block_v, 4, 3, 168), Tiles(64, 64, 4, 3)  # three programs share a multiprocessor
    return Configuration(64, block_k, block_v, solve, tiles, tiles)


def saved_shapes(
    w: Tensor, v: Tensor, cu_seqlens: Tensor | None, kappa1: str, *, save: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of what the forward leaves for the backward; of size 0 what that does not need, or unless `save`.

    For softmax the log-sum-exp of each row, [B, H, T] fp32; the inverses of the diagonal blocks, [B, H, M * C, C] in
    the dtype of v for M blocks of C rows; for softmax what rounding took from u, [B, T, H, D_v], or in float32 what the
    memory returned, alpha v - u.

    Args:
        w: [B, T, H, D].
        v: [B, T, G, D_v].
        cu_seqlens: [N + 1], or None.
        kappa1: one of `KAPPAS`.
        save: whether a backward follows.
    """
    batch, seq_len, heads, key_dim = w.shape
    block = configuration(int(key_dim), int(v.shape[3]), v.dtype).block
    normalized = save and kappa1 == "softmax"
    inverse = batch, heads, num_blocks(seq_len, cu_seqlens, block) * block, block
    rest = batch, seq_len, heads, v.shape[3]
    return [
        ((batch, heads, seq_len) if normalized else (0,), torch.float32),
        (inverse if save else (0,), v.dtype),
        (rest if normalized else (0,), v.dtype),
    ]
