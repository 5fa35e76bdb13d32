"""The rules by which the Deltaformer's Triton kernels are laid out: no Triton and no device needed."""

import math

import pytest
import torch

from zoo.kernels.deltaformer.schedule import Configuration, configuration
from zoo.kernels.triton_support import MAX_HEAD_DIM

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DIMS = range(1, MAX_HEAD_DIM + 1)


def next_power_of_two(size: int) -> int:
    """At least 16, as a product of tiles needs."""
    return max(16, 2 ** math.ceil(math.log2(size)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_configurations(dtype: torch.dtype) -> None:
    """Tiles are powers of two of at least 16; those of a head cover it, those of a solve a slice of it."""
    distinct: set[Configuration] = set()
    for key_dim in DIMS:
        for value_dim in DIMS:
            chosen = configuration(key_dim, value_dim, dtype)
            distinct.add(chosen)
            assert chosen.block_k == next_power_of_two(key_dim)
            least = 16 if dtype == torch.float32 else 64
            assert chosen.block_v == max(least, next_power_of_two(value_dim))
            assert min(chosen.ahead, chosen.at_once) >= 1
            tiles = chosen.rows, chosen.keys
            assert chosen.solve.block_v <= chosen.block_v
            sizes = [chosen.block, *(y for each in tiles for y in each[:2]), chosen.solve.block_v]
            assert all(size == next_power_of_two(size) for size in sizes)
            assert all(each.warps in (4, 8) and each.stages >= 1 for each in (*tiles, chosen.solve))
    powers = (16, 32, 64, 128, 256)  # which the tests on a device go through
    assert distinct == {configuration(key_dim, value_dim, dtype) for key_dim in powers for value_dim in powers}


def test_half_precisions_are_alike() -> None:
    """So that one of them stands for both."""
    for key_dim in (20, 64, 128, 256):
        for value_dim in (20, 64, 128, 256):
            of_dtypes = [configuration(key_dim, value_dim, dtype) for dtype in DTYPES[:2]]
            assert of_dtypes[0] == of_dtypes[1]
