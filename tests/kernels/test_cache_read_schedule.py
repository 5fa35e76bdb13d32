"""How the Triton kernel that reads from caches is laid out, and that it compiles for Hopper: no device needed.

Shapes: B rows, S slots of a cache, H query heads, G key heads, G_v value heads, D and D_v their sizes.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.kernels.cache_read import schedule
from zoo.kernels.cache_read.schedule import configuration, num_splits, partial_shapes
from zoo.kernels.kappa import KAPPAS
from zoo.kernels.triton_support import MAX_HEAD_DIM

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
DIMS = [(64, 64), (40, 40), (128, 128), (16, 256), (256, 256)]
HEADS = [(8, 2, 4), (64, 1, 2)]
CPU = torch.device("cpu")
SHARED_MEMORY = 228 * 1024  # of a multiprocessor of Hopper
RESERVED = 1024  # bytes of it beside those of a program


def inputs(
    dtype: torch.dtype,
    dims: tuple[int, int],
    heads: tuple[int, int, int] = (8, 2, 4),
    shape: tuple[int, int] = (2, 300),
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v; of no memory."""
    (num_heads, key_heads, value_heads), (key_dim, value_dim), (batch, num_slots) = heads, dims, shape
    one = torch.zeros(1, dtype=dtype)
    q, k = one.expand(batch, num_heads, key_dim), one.expand(batch, num_slots, key_heads, key_dim)
    return q, k, one.expand(batch, num_slots, value_heads, value_dim)


@pytest.mark.parametrize("repeat", [1, 2, 16, 17, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_configurations(dtype: torch.dtype, repeat: int) -> None:
    """Tiles are powers of two of at least 16, those of a head cover it, and stages leave place for two programs."""
    for key_dim in range(1, MAX_HEAD_DIM + 1):
        for value_dim in (1, 16, 40, 64, 128, 200, 256):
            chosen = configuration(repeat, key_dim, value_dim, dtype)
            tiles = chosen.rows, chosen.slots, chosen.block_k, chosen.block_v
            assert all(size >= 16 and size & (size - 1) == 0 for size in tiles)
            assert key_dim <= chosen.block_k <= max(16, 2 * key_dim - 1)
            assert value_dim <= chosen.block_v <= max(16, 2 * value_dim - 1)
            assert chosen.rows <= 32
            loads = chosen.slots * (chosen.block_k + chosen.block_v) * dtype.itemsize
            assert 2 * chosen.stages * loads <= SHARED_MEMORY


def test_splits_fill_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four programs a multiprocessor, but at least two blocks of slots in a split of a full cache."""
    monkeypatch.setattr(schedule, "num_multiprocessors", lambda _: 132)
    programs, blocks = (8, 500, 5000), (1, 99, 999)
    found = [[num_splits(few, many, CPU) for many in blocks] for few in programs]
    assert found == [[1, 49, 66], [1, 1, 1], [1, 1, 1]]


def test_splits_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "num_multiprocessors", lambda _: 132)
    shapes = partial_shapes(*inputs(BF16, (128, 128), heads=(32, 8, 8), shape=(4, 4096)), "softmax")
    assert shapes == [(4, 16, 32, 128), (4, 16, 32), (4, 16, 32)]
    shapes = partial_shapes(*inputs(BF16, (64, 64), heads=(80, 1, 2), shape=(1, 512)), "exp")
    assert shapes == [(1, 2, 80, 64), (1, 2, 80), (0,)]
    assert partial_shapes(*inputs(FP32, (64, 64), shape=(1, 10)), "relu") == [(1, 1, 8, 64), (0,), (0,)]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("interpreted, not compiled")
    from compiling import compile_only

    return compile_only(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("dtype", "dims", "heads", "kappa"),
    [
        *((dtype, dims, heads, "softmax") for dtype in (BF16, FP32) for dims in DIMS for heads in HEADS),
        *((dtype, (128, 128), HEADS[0], kappa) for dtype in (BF16, FP32) for kappa in KAPPAS[1:]),
        (FP16, (128, 128), HEADS[0], "softmax"),
    ],
    ids=str,
)
def test_compiles_for_hopper(
    dtype: torch.dtype, dims: tuple[int, int], heads: tuple[int, int, int], kappa: str, compiled: dict[str, Any]
) -> None:
    """Loads are asynchronous and wide, two programs have place on a multiprocessor, and no product is Hopper's own."""
    from zoo.kernels.cache_read.triton.launch import read_splits

    q, k, v = (x.contiguous() for x in inputs(dtype, dims, heads))
    read_splits(q, k, v, torch.zeros(2, dtype=torch.int64), kappa, 0, 0.3)
    kernel = compiled["cache_read_kernel"]
    assert 2 * (kernel.metadata.shared + RESERVED) <= SHARED_MEMORY
    assert "wgmma" not in kernel.asm["ptx"]
    assert "cp.async.cg.shared.global" in kernel.asm["ptx"]  # 16 bytes, which no other is
