"""Softmax attention: every implementation against the oracle, forward and gradients, and every error.

Shapes: B batch, T sequence length, H heads, G key/value heads, D head dim.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from zoo.kernels.attention import attention, document_ids, visible
from zoo.kernels.attention.flex import find_blocks
from zoo.kernels.attention.reference import attention_reference

W = 8


def inputs(length: int, groups: int = 2, dtype: torch.dtype = torch.float32, batch: int = 3) -> dict[str, Any]:
    shapes = {"q": (batch, length, 8, 10), "k": (batch, length, groups, 10), "v": (batch, length, groups, 6)}
    return {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in shapes.items()}


def check(x: dict[str, Any], bound: float = 1e-5, **options: Any) -> None:
    """sdpa equals the reference, whose mask of all pairs is made here."""
    results = []
    weights = torch.randn(*x["q"].shape[:3], x["v"].shape[3])
    for impl in ("sdpa", "reference"):
        o = attention(**x, **options, impl=impl)
        assert o.dtype == x["v"].dtype
        results.append([o, *torch.autograd.grad((o.float() * weights).sum(), list(x.values()))])
    for name, actual, expected in zip(("o", *x), *results, strict=True):
        error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-6)
        assert error <= bound, f"{name}: {error:.1e}"


@pytest.mark.parametrize("length", [1, 2, *range(W - 1, 2 * W + 2), 130])
@pytest.mark.parametrize("window", [None, 1, W])
def test_sdpa_equals_reference(length: int, window: int | None) -> None:
    check(inputs(length), window=window)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("window", [None, W])
def test_grouped_heads(groups: int, window: int | None) -> None:
    x = inputs(21, groups)
    check(x, window=window)
    repeated = {name: y if name == "q" else y.repeat_interleave(8 // groups, 2) for name, y in x.items()}
    torch.testing.assert_close(attention(**x, window=window), attention(**repeated, window=window))


@pytest.mark.parametrize("window", [None, W])
def test_bfloat16(window: int | None) -> None:
    check(inputs(37, dtype=torch.bfloat16), 2e-2, window=window)


@pytest.mark.parametrize("window", [None, W, 600])
def test_many_blocks_without_a_visible_key(window: int | None) -> None:
    """Fused kernels walk the keys in blocks (512 on the CPU); far from the diagonal all of a block is masked."""
    x = inputs(1100, batch=1)
    check(x, window=window)
    check(x, window=window, cu_seqlens=torch.tensor([0, 3, 700, 701, 1100]))


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
@pytest.mark.parametrize("window", [None, 5])
def test_packed_equals_separate(impl: str, window: int | None) -> None:
    x, bounds = inputs(40, batch=1), [0, 1, 1, 9, 12, 40]
    packed = attention(**x, window=window, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), impl=impl)
    pieces = [{name: y[:, a:b] for name, y in x.items()} for a, b in pairwise(bounds) if b > a]
    separate = torch.cat([attention(**piece, window=window, impl=impl) for piece in pieces], 1)
    torch.testing.assert_close(packed, separate)
    for a, b in zip(
        *(torch.autograd.grad(o.square().sum(), list(x.values())) for o in (packed, separate)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_written_out(impl: str) -> None:
    x = inputs(13, 2, torch.float64)
    o = attention(**x, window=4, scale=0.7, impl=impl)
    for t, h in ((0, 0), (3, 2), (4, 5), (12, 7)):
        keys = slice(max(0, t - 3), t + 1)
        logits = 0.7 * x["k"][1, keys, h // 4] @ x["q"][1, t, h]
        torch.testing.assert_close(o[1, t, h], logits.softmax(0) @ x["v"][1, keys, h // 4])


def test_default_scale() -> None:
    x = inputs(9)
    torch.testing.assert_close(attention(**x), attention(**x, scale=10**-0.5))


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_non_contiguous_inputs_and_gradients(impl: str) -> None:
    x = inputs(17)
    strided = {
        name: y.detach().permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0).requires_grad_() for name, y in x.items()
    }
    assert not any(y.is_contiguous() for y in strided.values())
    results = []
    for y in (x, strided):
        o = attention(**y, window=W, impl=impl)
        results.append([o, *torch.autograd.grad(o.sum(), list(y.values()))])  # an upstream gradient of stride 0
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_reference_passes_gradcheck() -> None:
    x = {name: y[:1, :5] for name, y in inputs(5, dtype=torch.float64).items()}
    order = torch.arange(5)
    mask = visible(order, order, window=3)
    assert torch.autograd.gradcheck(lambda q, k, v: attention_reference(q, k, v, mask, 0.3), tuple(x.values()))


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_given_mask_with_more_keys_than_queries(impl: str) -> None:
    x = inputs(12)
    full = attention(**x, window=W)
    order = torch.arange(12)
    mask = visible(order[9:], order, window=W)[None, None]
    torch.testing.assert_close(attention(x["q"][:, 9:], x["k"], x["v"], mask=mask, impl=impl), full[:, 9:])


def test_mixed_dtypes_take_that_of_the_values() -> None:
    x = inputs(9)
    o = attention(x["q"], x["k"].double(), x["v"].bfloat16())
    assert o.dtype == torch.bfloat16


def test_reference_stays_precise_under_autocast() -> None:
    x = inputs(9)
    with torch.autocast("cpu", torch.bfloat16):
        o = attention(**x, impl="reference")
    assert torch.equal(o, attention(**x, impl="reference"))


def test_visible_and_documents() -> None:
    assert document_ids(torch.tensor([0, 2, 2, 3]), 3).tolist() == [0, 0, 2]
    mask = visible(torch.tensor([0, 5]), torch.tensor([-1, 0, 3, 5, 6]), window=3)
    assert mask.tolist() == [[False, True, False, False, False], [False, False, True, True, False]]


@pytest.mark.parametrize(("dtype", "places"), [(torch.float32, 64), (torch.bfloat16, 128)])
def test_shapes_of_triton_without_values(dtype: torch.dtype, places: int) -> None:
    """What the kernels return on a device is compared with it there."""
    with FakeTensorMode():
        x: dict[str, Any] = {name: torch.empty(y.shape, dtype=dtype, device="cuda") for name, y in inputs(37).items()}
        o = attention(**x, window=W, impl="triton")
        assert (o.shape, o.dtype, o.device.type) == ((3, 37, 8, 6), dtype, "cuda")
        given = *x.values(), None, W, 0.3
        assert torch.ops.zoo.attention_triton(*given, False)[1].numel() == 0
        o, lse = torch.ops.zoo.attention_triton(*given, True)
        assert (lse.shape, lse.dtype) == ((3, 8, places), torch.float32)  # for whole blocks
        grads = torch.ops.zoo.attention_triton_backward(o, *x.values(), None, o, lse, W, 0.3)
        assert [(y.shape, y.dtype) for y in grads] == [(y.shape, y.dtype) for y in x.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_of_triton_without_sizes(dtype: torch.dtype) -> None:
    """A graph may know none of them."""
    any_size = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 4)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    q, k, v = (mode.from_tensor(x.to(dtype), symbolic_context=any_size) for x in inputs(37).values())
    with mode:
        _, lse = torch.ops.zoo.attention_triton(q, k, v, None, W, 0.3, True)
    assert [type(size) for size in lse.shape] == [torch.SymInt] * 3


Q, K, V = (torch.zeros(1, 5, heads, 4) for heads in (4, 2, 2))
ALL = torch.ones(1, 1, 5, 5, dtype=torch.bool)
BLOCKS = find_blocks(5, None, None, Q.device)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"impl": "fast"},
            r"impl: expected one of auto, sdpa, flash, flex, xformers, triton, reference, got 'fast'",
        ),
        *(({"impl": name}, f"impl: '{name}' needs CUDA tensors, got cpu") for name in ("flash", "flex", "triton")),
        *(
            ({"impl": name, "mask": ALL}, f"mask: '{name}' cannot read a tensor, expected impl auto, sdpa or reference")
            for name in ("flash", "flex", "xformers", "triton")
        ),
        *(
            ({"impl": name, "mask": BLOCKS}, f"mask: '{name}' cannot read blocks, expected impl auto, flex$")
            for name in ("sdpa", "reference", "triton")
        ),
        ({"mask": BLOCKS}, r"impl: 'flex' needs CUDA tensors, got cpu"),
        ({"mask": find_blocks(6, None, None, Q.device)}, r"mask: expected blocks of T = 5 on cpu, got 6 on cpu"),
        (
            {"mask": find_blocks(5, None, None, torch.device("meta"))},
            r"mask: expected blocks of .* on cpu, got 5 on meta",
        ),
        *(
            ({"scale": scale}, f"scale: expected a positive number, got {scale}")
            for scale in (0.0, -0.5, float("nan"), float("inf"), True)
        ),
        ({"q": Q[..., :0], "k": K[..., :0]}, r"q: expected \[B, T, H, D\], H and D not 0, got \[1, 5, 4, 0\]"),
        ({"v": V[..., :0]}, r"v: expected \[1, 5, 2, 'D_v'\], D_v not 0, got \[1, 5, 2, 0\]"),
        ({"q": 3}, r"q: expected a tensor \[B, T, H, D\], got 3"),
        ({"k": None}, r"k: expected a tensor \[B, T, G, D\], got None"),
        ({"k": K.to("meta")}, r"k: expected the device of q, cpu, got meta"),
        ({"scale": "x"}, r"scale: expected a positive number, got 'x'"),
        ({"window": 2.5}, r"window: expected a whole number of at least 1, got 2.5"),
        ({"window": True}, r"window: expected a whole number of at least 1, got True"),
        ({"q": Q[0]}, r"q: expected \[B, T, H, D\].*got \[5, 4, 4\]"),
        ({"q": Q.long()}, r"q: expected .*floating.*int64"),
        ({"k": K[0]}, r"k: expected \[1, 5, G, 4\] with G dividing 4, got \[5, 2, 4\]"),
        ({"k": K[:, :4]}, r"k: expected .* got \[1, 4, 2, 4\]"),
        ({"k": K[..., :3]}, r"k: expected .* got \[1, 5, 2, 3\]"),
        ({"k": torch.zeros(1, 5, 3, 4)}, r"k: expected .* G dividing 4, got \[1, 5, 3, 4\]"),
        ({"k": K[:, :, :0]}, r"k: expected .* got \[1, 5, 0, 4\]"),
        ({"k": K.expand(2, -1, -1, -1)}, r"k: expected .* got \[2, 5, 2, 4\]"),
        ({"v": V[:, :4]}, r"v: expected \[1, 5, 2, 'D_v'\], .*got \[1, 4, 2, 4\]"),
        ({"v": V[..., 0]}, r"v: expected .*got \[1, 5, 2\]"),
        ({"v": V.int()}, r"v: expected .*floating.*int32"),
        ({"window": 0}, r"window: expected a whole number of at least 1, got 0"),
        ({"mask": 1}, r"mask: expected a bool tensor, or what attention_mask returns, got 1"),
        ({"mask": ALL, "window": 3}, r"mask: .*neither window nor cu_seqlens"),
        ({"mask": ALL, "cu_seqlens": torch.tensor([0, 5])}, r"mask: .*neither window nor cu_seqlens"),
        ({"mask": ALL.float()}, r"mask: expected bool .*float32"),
        ({"mask": ALL[0, 0]}, r"mask: expected bool \[1, 1, 5, T_k\], got \[5, 5\]"),
        ({"mask": ALL[:, :, :3]}, r"mask: expected .* got \[1, 1, 3, 5\]"),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"cu_seqlens: expected to rise from 0 to T = 5, got \[0, 4\]"),
        ({"cu_seqlens": torch.tensor([1, 5])}, r"cu_seqlens: expected to rise"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 5])}, r"cu_seqlens: expected to rise"),
        ({"cu_seqlens": torch.tensor([0])}, r"cu_seqlens: expected \[N \+ 1\] int32 or int64"),
        ({"cu_seqlens": torch.tensor([[0, 5]])}, r"cu_seqlens: expected \[N \+ 1\]"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, r"cu_seqlens: expected .* got \[2\] torch.float32"),
        (
            {name: x.expand(2, -1, -1, -1) for name, x in (("q", Q), ("k", K), ("v", V))}
            | {"cu_seqlens": torch.tensor([0, 5])},
            r"cu_seqlens: .*expected B = 1, got B = 2",
        ),
    ],
)
def test_errors_name_the_argument(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        attention(**{"q": Q, "k": K, "v": V, **changes})
