"""How the Triton kernel is laid out over rows, heads and slots: rules of sizes, dtype and device, never tuned.

Needs no Triton, so that shapes of what the kernel returns are known without it. No rule looks at the values of counts.

Shapes: B rows, S slots of a cache, H query heads, G key heads, G_v value heads, D and D_v their sizes.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.kernels.tiling import block_size
from zoo.kernels.triton_support import num_multiprocessors

__all__ = ["Configuration", "configuration", "num_splits", "partial_shapes"]

_STAGE = 32 * 1024  # bytes of keys and values in a block: of three stages, two programs have place on a multiprocessor
_STAGES = 3
_MOST_SLOT_BYTES = 256  # of a block, one number a slot: more slots would not stay in registers
_PROGRAMS = 4  # of a multiprocessor: rows of other lengths, which end sooner, leave it something to do
_FEWEST_BLOCKS = 2  # of slots in a split of a full cache


class Configuration(NamedTuple):
    """How the kernel is compiled for heads of one size.

    Attributes:
        rows: query heads of a program.
        slots: in a block.
        block_k: D rounded up to a power of two.
        block_v: D_v rounded up to a power of two.
        stages: of its software pipeline.
    """

    rows: int
    slots: int
    block_k: int
    block_v: int
    stages: int


@cache
def configuration(repeat: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> Configuration:
    """The configuration for `repeat` query heads of one value head, head sizes D and D_v, and the dtype of v.

    A block is as many slots as _STAGE bytes hold, rounded down to a power of two, and 128 at most, 64 in float32. At
    most 32 query heads, 16 in float32, share a program: their queries stay in registers.
    """
    block_k, block_v = block_size(key_dim), block_size(value_dim)
    rows = min(block_size(repeat), 16 if dtype == torch.float32 else 32)
    slots = min(_STAGE // (block_k + block_v), _MOST_SLOT_BYTES) // dtype.itemsize
    return Configuration(rows, 1 << (slots.bit_length() - 1), block_k, block_v, _STAGES)


def num_splits(programs: int, blocks: int, device: torch.device) -> int:
    """Into how many parts the slots of each row are cut.

    Args:
        programs: of a split.
        blocks: of slots in a cache.
        device: of the tensors.
    """
    return max(1, min(_PROGRAMS * num_multiprocessors(device) // programs, blocks // _FEWEST_BLOCKS))


def partial_shapes(q: Tensor, k: Tensor, v: Tensor, kappa: str) -> list[tuple[int, ...]]:
    """Shapes of what the kernel leaves for each of P splits, all float32.

    The sums of the weighted values [B, P, H, D_v]; for softmax and exp the highest logits, which the weights are
    relative to, [B, P, H]; for softmax the sums of the weights [B, P, H]. What there is not has size 0.

    Args:
        q: [B, H, D].
        k: [B, S, G, D].
        v: [B, S, G_v, D_v].
        kappa: one of `KAPPAS`.
    """
    batch, num_heads, key_dim = q.shape
    num_slots, value_heads, value_dim = v.shape[1:]
    repeat = num_heads // value_heads
    blocks = configuration(int(repeat), int(key_dim), int(value_dim), v.dtype)
    programs = batch * value_heads * -(-repeat // blocks.rows)
    splits = num_splits(programs, -(-num_slots // blocks.slots), v.device)
    heads = batch, splits, num_heads
    return [(*heads, value_dim), heads if kappa in ("softmax", "exp") else (0,), heads if kappa == "softmax" else (0,)]
