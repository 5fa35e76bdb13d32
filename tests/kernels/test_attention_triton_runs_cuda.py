"""How attention's Triton kernels run on a CUDA device: bit-identical, compiled, replayed, in linear memory."""

import gc
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_cases import (
    BF16,
    DEVICE,
    EXACT,
    FP32,
    LEAVES,
    PIECES,
    changed,
    exact,
    inputs,
    upstream,
    with_gradients,
)
from comparing import assert_equal, assert_near, assert_rounded, bytes_kept, compiled_kernels
from torch import Tensor
from torch._dynamo.utils import counters

from zoo.kernels.attention import attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def memory_or_skip(gibibytes: int) -> None:
    """Skips a test that the device has too little free memory for."""
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of free device memory")


@pytest.mark.usefixtures("give_memory_back")
@pytest.mark.parametrize("impl", ["triton", "auto"])
@pytest.mark.parametrize(("packed", "window"), [(False, None), (False, 300), (True, 300)], ids=str)
def test_more_numbers_than_int32_counts(packed: bool, window: int | None, impl: str) -> None:
    """The last of 132 sequences is what it is alone: by our kernels bit for bit."""
    memory_or_skip(60)
    count, seq_len, heads, dim = 132, 1024, 128, 128
    assert count * seq_len * heads * dim > 2**31
    shape = (1, count * seq_len, heads, dim) if packed else (count, seq_len, heads, dim)
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v, grad_o = (torch.randn(shape, device=DEVICE, dtype=BF16, generator=generator) for _ in range(4))
    x: dict[str, Any] = {name: y.requires_grad_() for name, y in zip(LEAVES, (q, k, v), strict=True)}
    if packed:
        x["cu_seqlens"] = torch.arange(0, count * seq_len + 1, seq_len, device=DEVICE)
    whole = with_gradients(x, grad_o, window=window, impl=impl)

    def last(y: Tensor) -> Tensor:
        return (y[:, -seq_len:] if packed else y[-1:]).detach().clone()

    alone = changed(x, last)
    if packed:
        alone["cu_seqlens"] = x["cu_seqlens"][:2]
    expected = with_gradients(alone, last(grad_o), window=window, impl=impl)
    compare = assert_equal if impl == "triton" else partial(assert_near, bound=1e-2)
    compare({name: last(y) for name, y in whole.items()}, expected)


@pytest.mark.usefixtures("give_memory_back")
@pytest.mark.parametrize("window", [None, 1024])
def test_a_long_sequence(window: int | None) -> None:
    """The last tokens, which a window lets see few of the others, and without one see all."""
    seq_len, count = (131_072, 2000) if window else (8192, 8192)
    x = inputs(seq_len, batch=1, heads=(2, 1), dims=(128, 128))
    grad_o = upstream(x["q"])
    cut = seq_len - count - (window - 1 if window else 0)
    expected = exact(changed(x, lambda y: y[:, cut:].clone()), grad_o[:, cut:], window=window)
    actual = with_gradients(x, grad_o, window=window)
    last, last_expected = ({name: y[:, -count:] for name, y in each.items()} for each in (actual, expected))
    assert_rounded(last, last_expected, BF16, least=EXACT)


def peak_memory(seq_len: int, window: int | None, impl: str) -> int:
    """Bytes that a forward and backward add to their inputs."""
    x = inputs(seq_len, batch=1, heads=(4, 2), dims=(128, 128))
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = attention(**x, window=window, impl=impl)
    torch.autograd.grad(o.sum(), [x[name] for name in LEAVES])
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.usefixtures("give_memory_back")
@pytest.mark.parametrize("impl", ["triton", "auto"])
@pytest.mark.parametrize(("seq_len", "window"), [(131_072, 1024), (16_384, None)])
def test_memory_is_linear_in_the_length(seq_len: int, window: int | None, impl: str) -> None:
    short, long = (peak_memory(length, window, impl) for length in (seq_len, 2 * seq_len))
    assert long <= 2.1 * short


def test_more_blocks_than_the_device_has_room_for() -> None:
    x = inputs(2048, batch=8, heads=(16, 16))
    first = with_gradients(x, window=300)
    few = changed(x, lambda y: y[3:4, :, 5:6].clone())
    grad_o = upstream(first["o"])[3:4, :, 5:6]
    assert_equal({name: y[3:4, :, 5:6] for name, y in first.items()}, with_gradients(few, grad_o, window=300))


@pytest.mark.parametrize("pieces", [None, PIECES], ids=["dense", "packed"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_two_runs_are_bit_identical(dtype: torch.dtype, window: int | None, pieces: tuple[int, ...] | None) -> None:
    x = inputs(sum(PIECES), batch=4 if pieces is None else 1, heads=(8, 4), dims=(128, 128), dtype=dtype, pieces=pieces)
    assert_equal(with_gradients(x, window=window), with_gradients(x, window=window))


@pytest.mark.parametrize(
    ("seq_len", "heads", "value_dim"), [(100, (3, 3), 64), (1000, (6, 3), 64), (1000, (19, 19), 64), (300, (8, 1), 256)]
)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_rows_do_not_depend_on_the_batch(
    dtype: torch.dtype, window: int | None, seq_len: int, heads: tuple[int, int], value_dim: int
) -> None:
    x = inputs(seq_len, batch=8, heads=heads, dims=(64, value_dim), dtype=dtype)
    grad_o = torch.randn(8, seq_len, heads[0], value_dim, device=DEVICE).to(dtype)
    whole = with_gradients(x, grad_o, window=window)
    for i in range(8):
        row = changed(x, lambda y, i=i: y[i : i + 1].clone())
        alone = with_gradients(row, grad_o[i : i + 1].clone(), window=window)
        assert_equal(alone, {name: y[i : i + 1] for name, y in whole.items()})


@pytest.mark.parametrize("window", [None, 100, 2000])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_packed_equals_each_alone(dtype: torch.dtype, window: int | None) -> None:
    """Bit for bit, in a packed row of its own."""
    x = inputs(sum(PIECES), batch=1, heads=(4, 2), pieces=PIECES, dtype=dtype)
    grad_o = torch.randn(1, sum(PIECES), 4, 64, device=DEVICE).to(dtype)
    whole = with_gradients(x, grad_o, window=window)
    for start, end in pairwise(x["cu_seqlens"].tolist()):
        alone = changed(x, lambda y, a=start, b=end: y[:, a:b].clone())
        alone["cu_seqlens"] = torch.tensor([0, end - start], device=DEVICE)
        expected = with_gradients(alone, grad_o[:, start:end].clone(), window=window)
        assert_equal({name: y[:, start:end] for name, y in whole.items()}, expected)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    x = inputs(300, heads=(4, 2), dtype=dtype)
    expected = with_gradients(x, window=100)
    with torch.autocast(DEVICE, BF16):
        assert_equal(with_gradients(x, window=100), expected)


@pytest.mark.parametrize("pieces", [None, PIECES], ids=["dense", "packed"])
@pytest.mark.parametrize("window", [None, 100])
def test_replays_of_a_cuda_graph(window: int | None, pieces: tuple[int, ...] | None) -> None:
    """Each replay cuts its row anew, also where documents end elsewhere."""
    x = inputs(sum(PIECES), batch=1, heads=(4, 2), pieces=pieces)
    grad_o = upstream(with_gradients(x, window=window)["o"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = with_gradients(x, grad_o, window=window)
    for ends in ((1000, 65, 64, 63, 1), (0, 500, 0, 693, 0), PIECES):
        with torch.no_grad():
            for name in LEAVES:
                x[name].copy_(x[name].flip(1))
        if pieces is not None:
            x["cu_seqlens"].copy_(torch.tensor([0, *ends], device=DEVICE).cumsum(0))
        graph.replay()
        assert_equal(actual, with_gradients(x, grad_o, window=window))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_ends_that_nobody_has_checked(dtype: torch.dtype, window: int | None) -> None:
    """Outside the row they count as its ends; others, and a row without documents, do no harm to the next call."""
    x = inputs(300, batch=1, heads=(4, 2), dims=(128, 128), dtype=dtype, pieces=(40, 260))
    expected = with_gradients(x, window=window)
    for ends in ((0, 40, 1 << 20), (-5, 40, 300)):
        x["cu_seqlens"] = torch.tensor(ends, device=DEVICE)
        assert_equal(with_gradients(x, window=window), expected)
    for ends in ((0, 0), (300, 0), (0, 300, 60, 300), (0, 1 << 20, 0, 1 << 20)):
        with_gradients(x | {"cu_seqlens": torch.tensor(ends, device=DEVICE)}, window=window)
        torch.cuda.synchronize()
    assert_equal(with_gradients(x, window=window), expected)


@pytest.mark.parametrize("window", [None, 100])
def test_without_gradients(window: int | None) -> None:
    x = inputs(300)
    with torch.no_grad():
        o = attention(**x, window=window, impl="triton")
    assert not o.requires_grad
    assert torch.equal(o, with_gradients(x, window=window)["o"])
    assert not attention(**{name: y.detach() for name, y in x.items()}, window=window, impl="triton").requires_grad


@pytest.mark.parametrize(("batch", "seq_len"), [(2, 0), (0, 5)])
def test_no_tokens(batch: int, seq_len: int) -> None:
    assert all(not y.numel() for y in with_gradients(inputs(seq_len, batch=batch)).values())


@pytest.mark.parametrize("name", LEAVES)
def test_gradients_of_one_leaf_alone(name: str) -> None:
    x = inputs(300)
    alone = {other: y if other == name else y.detach() for other, y in x.items()}
    o = attention(**alone, window=100, impl="triton")
    o.backward(upstream(o))
    assert [other for other in LEAVES if x[other].grad is not None] == [name]
    assert torch.equal(x[name].grad, with_gradients(x, window=100)[name])


def test_what_is_kept_for_the_backward() -> None:
    """Beside inputs and o, a float32 for each token and head."""
    seq_len, heads = 512, 4
    x = inputs(seq_len, heads=(heads, 2), dims=(128, 128))
    kept = bytes_kept(lambda: attention(**x, window=100, impl="triton"), x.values())
    assert kept == 4 * 2 * seq_len * heads


@pytest.mark.parametrize(
    ("window", "pieces"), [(None, None), (20, None), (20, (5, 0, 65))], ids=["full", "window", "packed"]
)
def test_ops_are_sound(window: int | None, pieces: tuple[int, ...] | None) -> None:
    x = inputs(70, batch=3 if pieces is None else 1, heads=(4, 2), dims=(16, 32), dtype=FP32, pieces=pieces)
    leaves, cu_seqlens = [x[name] for name in LEAVES], x.get("cu_seqlens")
    plain = [y.detach() for y in leaves]
    op = torch.ops.zoo.attention_triton.default
    torch.library.opcheck(op, (*leaves, cu_seqlens, window, 0.3, True))
    torch.library.opcheck(op, (*plain, cu_seqlens, window, 0.3, False))
    o, lse = op(*leaves, cu_seqlens, window, 0.3, True)
    assert o.requires_grad
    assert not lse.requires_grad  # no gradient flows through what only the backward reads
    backward = torch.ops.zoo.attention_triton_backward.default
    given = torch.randn_like(o), *plain, cu_seqlens, o.detach(), lse
    torch.library.opcheck(backward, (*given, window, 0.3))


def assert_compiled_as_eager(calls: list[dict[str, Any]], warm: list[dict[str, Any]], window: int | None) -> None:
    """One graph and no new kernels over all calls, once those of `warm` have made the kernels."""

    def loss(x: dict[str, Any]) -> Tensor:
        return attention(**x, window=window, impl="triton").float().square().mean()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for x in warm:
        torch.autograd.grad(loss(x), [x[name] for name in LEAVES])
    known = compiled_kernels()
    assert known
    with torch._dynamo.config.patch(error_on_recompile=True):
        for x in calls:
            leaves = [x[name] for name in LEAVES]
            actual, expected = compiled(x), loss(x)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0)
            grads = (torch.autograd.grad(y, leaves) for y in (actual, expected))
            compiled_grads, eager_grads = (dict(zip(LEAVES, y, strict=True)) for y in grads)
            assert_near(compiled_grads, eager_grads, 1e-2)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert compiled_kernels() == known


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("window", [None, 100])
def test_one_graph_and_no_new_kernels_over_lengths(window: int | None, packed: bool) -> None:
    def arguments(seq_len: int) -> dict[str, Any]:
        pieces = (2, 0, 7, seq_len - 20, 11) if packed else None
        return inputs(seq_len, batch=1 if packed else 3, heads=(4, 2), dims=(32, 48), pieces=pieces)

    lengths = range(61, 1000, 49)
    assert len(lengths) == 20
    calls = [arguments(seq_len) for seq_len in lengths]
    assert_compiled_as_eager(calls, [calls[0], calls[-1]], window)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("window", [None, 100])
def test_one_graph_and_no_new_kernels_over_packings(window: int | None) -> None:
    """Of one total length, in other numbers of documents too."""
    packings = [(60,) * 10, (100, 200, 300), (300, 300), (1, 598, 1), (0, 600)]
    calls = [inputs(600, batch=1, heads=(4, 2), dims=(32, 48), pieces=pieces) for pieces in packings]
    assert_compiled_as_eager(calls, calls[:1], window)
