"""Backends of attention that others have made, on a CUDA device: equal to float64, in one graph."""

from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from attention_cases import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    IN_FLEX_ATTENTION,
    IN_PYTORCH,
    LEAVES,
    PIECES,
    changed,
    check_hard,
    inputs,
    with_gradients,
)
from comparing import LAYOUTS, assert_near
from torch import Tensor
from torch._dynamo.utils import counters

from zoo.kernels.attention import BACKENDS, attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

W = 64
NEEDS_XFORMERS = pytest.mark.skipif(find_spec("xformers") is None, reason="needs xformers")
OTHERS = [name for name in BACKENDS if name != "triton"]  # which has files of its own
impls = pytest.mark.parametrize(
    "impl", [pytest.param(name, marks=NEEDS_XFORMERS if name == "xformers" else ()) for name in ("auto", *OTHERS)]
)


@impls
@pytest.mark.parametrize("window", [None, 1, W])
@pytest.mark.parametrize("seq_len", [1, 2, W - 1, W, W + 1, 100, 2 * W - 1, 2 * W, 2 * W + 1, 700])
def test_lengths(seq_len: int, window: int | None, impl: str) -> None:
    factor = IN_FLEX_ATTENTION if (impl, seq_len) == ("flex", 2) else IN_PYTORCH
    check_hard(inputs(seq_len, batch=max(2, 64 // seq_len)), window=window, impl=impl, factor=factor)


@impls
def test_every_length_around_a_window(impl: str) -> None:
    for seq_len in range(W - 1, 2 * W + 2):
        check_hard(inputs(seq_len), window=W, impl=impl)


@impls
@pytest.mark.parametrize("window", [None, W])
@pytest.mark.parametrize("heads", [(8, 1), (8, 2), (8, 8)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_grouped_heads(dtype: torch.dtype, heads: tuple[int, int], window: int | None, impl: str) -> None:
    check_hard(inputs(300, heads=heads, dtype=dtype), window=window, impl=impl)


@impls
@pytest.mark.parametrize("window", [None, W])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_dims(dim: int, window: int | None, impl: str) -> None:
    check_hard(inputs(300, heads=(4, 2), dims=(dim, dim)), window=window, impl=impl)


@pytest.mark.parametrize("impl", ["auto", "sdpa", "flex"])
@pytest.mark.parametrize("window", [None, W])
@pytest.mark.parametrize("dims", [(64, 64), (64, 32)])
def test_float32(dims: tuple[int, int], window: int | None, impl: str) -> None:
    check_hard(inputs(300, heads=(4, 2), dims=dims, dtype=FP32), window=window, impl=impl)


@impls
@pytest.mark.parametrize("pieces", [PIECES, (0, 1500, 1)], ids=["several", "one"])
@pytest.mark.parametrize("window", [None, W, 2000])
@pytest.mark.parametrize("dim", [64, 128])
def test_packed(dim: int, window: int | None, pieces: tuple[int, ...], impl: str) -> None:
    x = inputs(sum(pieces), batch=1, heads=(4, 2), dims=(dim, dim), pieces=pieces)
    check_hard(x, window=window, impl=impl)


@impls
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("batch", "pieces"), [(1, None), (2, None), (1, (3, 147))], ids=["one", "two", "packed"])
def test_any_strides(batch: int, pieces: tuple[int, ...] | None, layout: str, impl: str) -> None:
    check_hard(changed(inputs(150, batch=batch, heads=(4, 2), pieces=pieces), LAYOUTS[layout]), window=100, impl=impl)


@impls
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 100])
def test_any_strides_of_upstream_gradients(window: int | None, layout: str, impl: str) -> None:
    x = inputs(150, heads=(4, 2))
    view = LAYOUTS[layout](torch.randn(2, 150, 4, 64, device=DEVICE).to(BF16))
    contiguous = view.clone(memory_format=torch.contiguous_format)
    actual, expected = (with_gradients(x, y, window=window, impl=impl) for y in (view, contiguous))
    assert_near(actual, expected, 1e-2)


@impls
def test_upstream_gradient_of_a_sum(impl: str) -> None:
    x = inputs(150, heads=(4, 2))
    grads = torch.autograd.grad(attention(**x, impl=impl).sum(), [x[name] for name in LEAVES])
    expected = with_gradients(x, torch.ones(2, 150, 4, 64, dtype=BF16, device=DEVICE), impl=impl)
    expected.pop("o")
    assert_near(dict(zip(LEAVES, grads, strict=True)), expected, 1e-2)


@pytest.mark.usefixtures("fresh_compiler")
@impls
@pytest.mark.parametrize("window", [None, W])
def test_one_graph_over_packings(window: int | None, impl: str) -> None:
    """Of one total length, in other numbers of documents too."""

    def loss(x: dict[str, Any]) -> Tensor:
        return attention(**x, window=window, impl=impl).float().square().mean()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    packings = [(60,) * 10, (100, 200, 300), (300, 300), (1, 598, 1), (0, 600)]
    for index, pieces in enumerate(packings):
        x = inputs(600, batch=1, heads=(4, 2), pieces=pieces)
        leaves = [x[name] for name in LEAVES]
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            actual = torch.autograd.grad(compiled(x), leaves)
        expected = torch.autograd.grad(loss(x), leaves)
        actual, expected = (dict(zip(LEAVES, y, strict=True)) for y in (actual, expected))
        assert_near(actual, expected, 1e-2)
    assert not counters["graph_break"]


@impls
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_under_autocast(dtype: torch.dtype, impl: str) -> None:
    x = inputs(300, heads=(4, 2), dtype=dtype)
    if dtype == FP32 and impl in ("flash", "xformers"):
        pytest.skip("takes no float32")
    with torch.autocast(DEVICE, BF16):
        actual = with_gradients(x, window=W, impl=impl)
    assert actual["o"].dtype == dtype
    assert_near(actual, with_gradients(x, window=W, impl=impl), 2e-2)


def test_more_kinds_of_flexible_calls_than_dynamo_compiles_by_itself() -> None:
    for dtype, dim, groups, window in product((BF16, FP16), (16, 32), (1, 2), (None, W)):
        check_hard(inputs(200, heads=(2, groups), dims=(dim, dim), dtype=dtype), window=window, impl="flex")


@NEEDS_XFORMERS
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("pieces", [None, (5, 0, 65)], ids=["dense", "packed"])
@pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
def test_xformers_ops_are_sound(layout: str, pieces: tuple[int, ...] | None, window: int | None) -> None:
    x = inputs(70, batch=3 if pieces is None else 1, heads=(4, 4), dims=(32, 32), pieces=pieces)
    x = x if layout == "contiguous" else changed(x, LAYOUTS[layout])
    leaves, cu_seqlens = [x[name] for name in LEAVES], x.get("cu_seqlens")
    plain = [y.detach() for y in leaves]
    op = torch.ops.zoo.attention_xformers.default
    torch.library.opcheck(op, (*leaves, cu_seqlens, window, 0.3))
    o, lse = op(*plain, cu_seqlens, window, 0.3)
    backward = torch.ops.zoo.attention_xformers_backward.default
    torch.library.opcheck(backward, (torch.randn_like(o), *plain, cu_seqlens, o, lse, window, 0.3))
