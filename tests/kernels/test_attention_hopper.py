"""Attention's kernels for Hopper without a GPU: which calls they get, and that they compile for one.

What they compute is compared on a device. Shapes: B batch, T tokens, H query heads, G key/value heads, D and D_v their
sizes.
"""

import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import LAYOUTS
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Gluon has no interpreter", allow_module_level=True)

from compiling import compile_only
from triton import knobs

from zoo.kernels.attention import launch
from zoo.kernels.attention.hopper import launch as hopper
from zoo.kernels.attention.launch import Batch, attention_backward, attention_forward
from zoo.kernels.attention.triton import launch as portable
from zoo.kernels.rows import rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHARED_MEMORY = 228 * 1024  # of a multiprocessor of Hopper
REGISTERS = 1 << 16  # of the same
RESERVED = 1024  # bytes of shared memory beside those of a program
PROGRAMS = {"attention_kernel": 1, "row_gradients_kernel": 2, "key_gradients_kernel": 1}  # at once on a multiprocessor
READERS = {"attention_kernel": 2, "row_gradients_kernel": 1, "key_gradients_kernel": 2}  # groups of warps of a program


def inputs(
    dtype: torch.dtype = BF16,
    dims: tuple[int, int] = (64, 64),
    *,
    shape: tuple[int, int] = (2, 70),
    heads: tuple[int, int] = (2, 2),
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v."""
    (num_heads, groups), (key_dim, value_dim) = heads, dims
    sizes = (num_heads, key_dim), (groups, key_dim), (groups, value_dim)
    q, k, v = (torch.zeros(*shape, *size, dtype=dtype) for size in sizes)
    return q, k, v


def batch_of(q: Tensor, k: Tensor, v: Tensor) -> Batch:
    return Batch(q, k, v, None, None, 0.3)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are said to be on such a GPU."""
    monkeypatch.setattr(launch, "_on_hopper", lambda _: True)


@pytest.fixture
def compiled(on_hopper: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    return compile_only(monkeypatch, tmp_path)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 80), (16, 128), (128, 16), (8, 8)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_kernels_for_hopper_in_half_precision(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    assert launch._kernels(batch_of(*inputs(dtype, dims))) is hopper


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dims", [(136, 64), (64, 136), (256, 256), (20, 16), (16, 20), (1, 64)])
def test_portable_kernels_for_heads_too_wide_or_unaligned(dims: tuple[int, int]) -> None:
    assert launch._kernels(batch_of(*inputs(BF16, dims))) is portable


@pytest.mark.usefixtures("on_hopper")
def test_portable_kernels_in_float32() -> None:
    assert launch._kernels(batch_of(*inputs(FP32))) is portable


def test_portable_kernels_elsewhere() -> None:
    assert launch._kernels(batch_of(*inputs())) is portable


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("shape", [(1, 0), (0, 5)])
def test_portable_kernels_for_an_empty_batch(shape: tuple[int, int]) -> None:
    assert launch._kernels(batch_of(*inputs(shape=shape))) is portable


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 70), (2, 70)])
@pytest.mark.parametrize("changed", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_kernels_for_hopper_read_aligned_rows(layout: str, changed: int, shape: tuple[int, int]) -> None:
    x = list(inputs(shape=shape))
    x[changed] = LAYOUTS[layout](x[changed])
    assert launch._kernels(batch_of(*x)) is hopper


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("changed", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("layout", ["expanded", "sliced", "misaligned"])
def test_kernels_for_hopper_read_no_others(layout: str, changed: int) -> None:
    x = list(inputs())
    x[changed] = LAYOUTS[layout](x[changed])
    assert launch._kernels(batch_of(*x)) is portable


@pytest.mark.usefixtures("on_hopper")
def test_upstream_gradients_are_to_be_aligned() -> None:
    batch, grad_o = batch_of(*inputs()), torch.zeros(2, 70, 2, 64, dtype=BF16)
    assert launch._kernels(batch, rows(grad_o)) is hopper
    assert launch._kernels(batch, rows(LAYOUTS["misaligned"](grad_o))) is portable


def check_epilogue(name: str, ttgir: str) -> None:
    """Between their last products and what they put into shared memory then, warps wait for each other."""
    groups = [part for part in re.split(r"\bdefault \{|\bpartition\d+\(", ttgir) if "warp_group_dot_wait" in part]
    assert len(groups) == READERS[name]
    for group in groups:
        *_, after_products = group.split("warp_group_dot_wait")
        before_store, *stores = after_products.split("tt.store")
        assert stores, name
        assert re.search(r"\b(?:gpu|ttg)\.barrier\b.*convert_layout", before_store, re.DOTALL), name


def check_arrivals(name: str, ptx: str) -> None:
    """Before one of several warps says that all are done with something, they wait for each other."""
    barriers = re.findall(r"bar\.(?:warp\.)?sync|mbarrier\.arrive\.shared|mbarrier\.\w+\.parity|wgmma\.\w+", ptx)
    before = [previous for previous, barrier in pairwise(barriers) if barrier == "mbarrier.arrive.shared"]
    alone = [each for each in before if each != "bar.sync"]
    assert alone == ["bar.warp.sync"] * len(alone), f"{name}: {alone}"
    assert len(alone) == (2 if before else 0), name  # the warp that loads, of another turn and of the end


def check_loops(name: str, code: str) -> None:
    """The innermost loops over products keep at most one number in memory of their own."""
    lines = [(int(at, 16), line) for at, line in re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?);", code)]
    jumps = [(int(line.split("0x")[1], 16), at) for at, line in lines if re.search(r"\bBRA\b.* 0x", line)]
    products = [at for at, line in lines if "HGMMA" in line]
    loops = [(to, at) for to, at in jumps if any(to <= product <= at for product in products)]
    innermost = [
        (to, at)
        for to, at in loops
        # Neither one around another, nor a place further down that waits and goes back into one.
        if not any((to <= begin and end < at) or (begin < to <= end < at) for begin, end in loops)
    ]
    assert innermost, name
    for begin, end in innermost:
        inside = [line for at, line in lines if begin <= at <= end]
        for access in ("LDL", "STL"):
            assert sum(access in line for line in inside) <= 1, f"{name}: {access}"


def check_resources(kernels: dict[str, Any], folder: Path) -> None:
    """The products are Hopper's, their loops spill no register, and as many programs fit a multiprocessor as should."""
    for name, kernel in kernels.items():
        programs, cubin, ptx = PROGRAMS[name], folder / name, kernel.asm["ptx"]
        assert "warp_group_dot" in kernel.asm["ttgir"], name
        check_epilogue(name, kernel.asm["ttgir"])
        check_arrivals(name, ptx)
        assert kernel.metadata.shared + RESERVED <= SHARED_MEMORY // programs, name
        cubin.write_bytes(kernel.asm["cubin"])
        usage, code = (
            subprocess.run(
                [knobs.nvidia.cuobjdump.path, f"--dump-{what}", cubin], check=True, capture_output=True, text=True
            ).stdout
            for what in ("resource-usage", "sass")
        )
        assert code.count("WARPGROUP.DEPBAR") == ptx.count("wgmma.wait_group"), f"{name}: no overlap"
        check_loops(name, code)
        registers, threads = int(re.search(r" REG:(\d+)", usage)[1]), int(re.search(r"\.reqntid (\d+)", ptx)[1])  # pyright: ignore[reportOptionalSubscript]
        assert -(-registers // 8) * 8 * threads <= REGISTERS // programs, f"{name}: {registers}"


@pytest.mark.parametrize("save", [True, False])
def test_the_forward_compiles_with_and_without_saving(save: bool, compiled: dict[str, Any], tmp_path: Path) -> None:
    attention_forward(*inputs(), None, None, 0.3, save=save)
    assert compiled.keys() == {"attention_kernel"}
    check_resources(compiled, tmp_path)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("dtype", "dims", "repeat", "window"),
    [
        (BF16, (64, 64), 1, None),
        (BF16, (64, 64), 2, 40),
        (BF16, (80, 80), 2, 40),
        (BF16, (128, 128), 1, None),
        (BF16, (128, 128), 2, 40),
        (BF16, (16, 128), 1, 40),
        (BF16, (32, 24), 1, None),
        (FP16, (128, 128), 2, None),
    ],
    ids=str,
)
def test_all_kernels_compile(
    dtype: torch.dtype,
    dims: tuple[int, int],
    repeat: int,
    window: int | None,
    packed: bool,
    compiled: dict[str, Any],
    tmp_path: Path,
) -> None:
    x = inputs(dtype, dims, shape=(1, 150), heads=(2, 2 // repeat))
    cu_seqlens = torch.tensor([0, 70, 150]) if packed else None
    o, lse = attention_forward(*x, cu_seqlens, window, 0.3, save=True)
    attention_backward(torch.zeros_like(o), *x, cu_seqlens, o, lse, window, 0.3)
    assert (compiled.pop("cut_kernel", None) is not None) == packed
    assert compiled.keys() == PROGRAMS.keys()
    check_resources(compiled, tmp_path)
