"""How the Deltaformer's Triton kernels run on a CUDA device: bit-identical, compiled, replayed, in little memory."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_equal, assert_near, bytes_kept, compiled_kernels
from deltaformer_cases import (
    BF16,
    DEVICE,
    FP32,
    LEAVES,
    PIECES,
    changed,
    check,
    inputs,
    upstream,
    with_gradients,
)
from torch import Tensor
from torch._dynamo.utils import counters

from zoo.kernels.deltaformer import deltaformer_write
from zoo.kernels.deltaformer.schedule import configuration

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.usefixtures("give_memory_back")
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_more_numbers_than_int32_counts(packed: bool) -> None:
    """The last of 132 sequences is bit for bit what it is alone."""
    count, seq_len, heads, dim = 132, 1024, 128, 128
    assert count * seq_len * heads * dim > 2**31
    shape = (1, count * seq_len, heads) if packed else (count, seq_len, heads)
    generator = torch.Generator(DEVICE).manual_seed(0)
    sizes = {"w": (dim,), "k": (dim,), "v": (dim,), "alpha": (), "beta": (), "u": ()}

    def rand(*shape: int, half: bool) -> Tensor:
        return torch.rand(*shape, device=DEVICE, dtype=BF16 if half else FP32, generator=generator)

    x: dict[str, Any] = {name: rand(*shape, *sizes[name], half=sizes[name] != ()).requires_grad_() for name in LEAVES}
    grad_u = rand(*shape, dim, half=True)
    if packed:
        x["cu_seqlens"] = torch.arange(0, count * seq_len + 1, seq_len, device=DEVICE)
    whole = with_gradients(x, grad_u)

    def last(y: Tensor) -> Tensor:
        return (y[:, -seq_len:] if packed else y[-1:]).detach().clone()

    alone = changed(x, last)
    if packed:
        alone["cu_seqlens"] = x["cu_seqlens"][:2]
    assert_equal({name: last(y) for name, y in whole.items()}, with_gradients(alone, last(grad_u)))


def test_more_blocks_than_the_device_has_room_for() -> None:
    x = inputs(2048, batch=8, heads=(16, 16))
    programs = 8 * 16 * 2048 // configuration(64, 64, BF16).block
    assert programs > 16 * torch.cuda.get_device_properties(DEVICE).multi_processor_count
    check(x)


@pytest.mark.parametrize("pieces", [None, PIECES], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_two_runs_of_the_kernels_are_bit_identical(dtype: torch.dtype, pieces: tuple[int, ...] | None) -> None:
    x = inputs(sum(PIECES), batch=4 if pieces is None else 1, heads=(8, 4), dims=(128, 128), dtype=dtype, pieces=pieces)
    first = with_gradients(x)
    for _ in range(3):
        assert_equal(with_gradients(x), first)


@pytest.mark.parametrize(
    ("seq_len", "heads", "value_dim"), [(100, (3, 3), 64), (1000, (6, 3), 64), (1000, (19, 19), 64), (300, (8, 1), 256)]
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_rows_do_not_depend_on_the_batch(
    dtype: torch.dtype, seq_len: int, heads: tuple[int, int], value_dim: int
) -> None:
    x = inputs(seq_len, batch=8, heads=heads, dims=(64, value_dim), dtype=dtype)
    grad_u = torch.randn(8, seq_len, heads[0], value_dim, device=DEVICE).to(dtype)
    whole = with_gradients(x, grad_u)
    for i in range(8):
        alone = with_gradients(changed(x, lambda y, i=i: y[i : i + 1].clone()), grad_u[i : i + 1].clone())
        assert_equal(alone, {name: y[i : i + 1] for name, y in whole.items()})


def test_beside_a_busy_stream() -> None:
    """Programs that wait are never those that hold the device while others of their launch find no room."""
    x = inputs(2048, batch=4, heads=(8, 8))
    expected = with_gradients(x)
    matrix = torch.randn(8192, 8192, dtype=BF16, device=DEVICE)
    product = torch.empty_like(matrix)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(other):
            for _ in range(20):
                torch.mm(matrix, matrix, out=product)
        actual = with_gradients(x)
        with torch.cuda.stream(other):
            for _ in range(20):
                torch.mm(matrix, matrix, out=product)
        assert_equal(actual, expected)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    x = inputs(300, heads=(4, 2), dtype=dtype)
    expected = with_gradients(x)
    with torch.autocast(DEVICE, BF16):
        assert_equal(with_gradients(x), expected)


@pytest.mark.parametrize("pieces", [None, PIECES], ids=["dense", "packed"])
def test_replays_of_a_cuda_graph(pieces: tuple[int, ...] | None) -> None:
    """Each replay counts its blocks anew, also where documents end elsewhere."""
    x = inputs(sum(PIECES), batch=1, heads=(4, 2), pieces=pieces)
    grad_u = upstream(with_gradients(x)["u"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = with_gradients(x, grad_u, bounded=True)
    for _ in range(3):
        with torch.no_grad():
            for name in LEAVES:
                x[name].copy_(x[name].flip(1))
        if pieces is not None:
            x["cu_seqlens"].copy_(torch.tensor([0, *pieces[::-1]], device=DEVICE).cumsum(0))
        graph.replay()
        assert_equal(actual, with_gradients(x, grad_u))


def test_without_gradients() -> None:
    x = inputs(300)
    with torch.no_grad():
        u = deltaformer_write(**x, bounded=True, impl="triton")
    assert torch.equal(u, with_gradients(x)["u"])


@pytest.mark.parametrize("pieces", [None, (5, 0, 65)], ids=["dense", "packed"])
@pytest.mark.parametrize("kappa1", ["softmax", "linear"])
def test_ops_are_sound(kappa1: str, pieces: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # What no backward reads stays unwritten, and opcheck would compare it.
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    x = inputs(70, kappa1, batch=3 if pieces is None else 1, heads=(4, 2), dims=(16, 32), dtype=FP32, pieces=pieces)
    leaves, cu_seqlens = [x[name] for name in LEAVES], x.get("cu_seqlens")
    plain = [y.detach() for y in leaves]
    op, options = torch.ops.zoo.deltaformer_write_triton.default, (kappa1, 0, 0.3)
    torch.library.opcheck(op, (*leaves, cu_seqlens, *options, True, True))
    torch.library.opcheck(op, (*plain, cu_seqlens, *options, True, False))
    u, *saved = op(*leaves, cu_seqlens, *options, True, True)
    assert not any(y.requires_grad for y in saved)  # no gradient flows through what only the backward reads
    backward = torch.ops.zoo.deltaformer_write_triton_backward.default
    given = torch.randn_like(u), *plain, cu_seqlens, u.detach(), *saved
    torch.library.opcheck(backward, (*given, *options))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_one_graph_and_no_new_kernels_over_lengths(packed: bool) -> None:
    def arguments(seq_len: int) -> dict[str, Any]:
        pieces = (2, 0, 7, seq_len - 20, 11) if packed else None
        return inputs(seq_len, batch=1 if packed else 3, heads=(4, 2), dims=(32, 48), pieces=pieces)

    def loss(x: dict[str, Any]) -> Tensor:
        return deltaformer_write(**x).float().square().mean()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    lengths = range(61, 1000, 49)
    assert len(lengths) == 20
    for seq_len in (lengths[0], lengths[-1]):
        loss(arguments(seq_len)).backward()
    known = compiled_kernels()
    assert known
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seq_len in lengths:
            x = arguments(seq_len)
            leaves = [x[name] for name in LEAVES]
            actual, expected = compiled(x), loss(x)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0)
            grads = (torch.autograd.grad(y, leaves) for y in (actual, expected))
            compiled_grads, eager_grads = (dict(zip(LEAVES, y, strict=True)) for y in grads)
            assert_near(compiled_grads, eager_grads, 1e-2)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert compiled_kernels() == known


def test_what_is_kept_for_the_backward() -> None:
    """Beside inputs and u, for each token and head: a float32, a row of a block of 64 by 64, what u's rounding took."""
    seq_len, heads = 512, 4
    x = inputs(seq_len, heads=(heads, 2), dims=(128, 128))
    kept = bytes_kept(lambda: deltaformer_write(**x, impl="triton"), x.values())
    assert kept == (4 + 2 * 64 + 2 * 128) * 2 * seq_len * heads


def test_a_wait_without_end_is_an_error(tmp_path: Path) -> None:
    """In a process of its own, which the error leaves without a device."""
    script = tmp_path / "wait_for_nobody.py"
    script.write_text(WAIT_FOR_NOBODY)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout == "served\n", run.stderr
    assert run.returncode != 0
    assert "CUDA error" in run.stderr


WAIT_FOR_NOBODY = """
import torch
import triton
import triton.language as tl

from zoo.kernels.deltaformer.triton import dataflow
from zoo.kernels.deltaformer.triton.dataflow import wait

dataflow._LONGEST_WAIT = tl.constexpr(1000)


@triton.jit(do_not_specialize=["count", "done"])
def wait_kernel(published, count, done):
    wait(published, count, done)


published = torch.full((1,), 3, dtype=torch.int32, device="cuda")
wait_kernel[(1,)](published, 3, 0)
torch.cuda.synchronize()
print("served", flush=True)
wait_kernel[(1,)](published, 4, 0)
torch.cuda.synchronize()
"""
