"""Reading from caches in plain PyTorch: the form for all devices against the reference, that against attention, errors.

Shapes: B rows, S slots of a cache, H query heads, G key heads, G_v value heads, D and D_v their sizes.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cache_read_cases import COUNTS, HEADS, KAPPAS, exact, inputs, spoil
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from zoo.kernels.cache_read import read_cache

each_kappa = pytest.mark.parametrize("kappa", KAPPAS, ids=str)


def as_dtype(x: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: y.to(dtype) if y.is_floating_point() else y for name, y in x.items()}


def check(x: dict[str, Any], dtype: torch.dtype, **options: Any) -> None:
    """The form for all devices against the reference in float64, to 1e-4 unless in float64."""
    o, log_sum = read_cache(**as_dtype(x, dtype), **options)
    expected_o, expected_log_sum = exact(x, **options)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bounds: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(o, expected_o.to(wide), **bounds)
    assert (log_sum is None) == (expected_log_sum is None) == (options.get("kappa", "softmax") != "softmax")
    if log_sum is not None and expected_log_sum is not None:
        torch.testing.assert_close(log_sum, expected_log_sum.to(wide), **bounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@each_kappa
def test_equals_the_reference(kappa: dict[str, Any], dtype: torch.dtype) -> None:
    """Half precision can hold the inputs, and is computed in float32."""
    check(inputs(50), dtype, **kappa)


@pytest.mark.parametrize("heads", HEADS)
@each_kappa
def test_heads(kappa: dict[str, Any], heads: tuple[int, int, int]) -> None:
    check(inputs(20, heads=heads), torch.float64, **kappa)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("counts", COUNTS)
@each_kappa
def test_counts(kappa: dict[str, Any], counts: tuple[int, ...], dtype: torch.dtype) -> None:
    x = inputs(20, counts=counts)
    check(x | {"counts": x["counts"].to(dtype)}, torch.float64, **kappa)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("impl", ["torch", "reference"])
@each_kappa
def test_slots_that_are_not_there_have_no_influence(kappa: dict[str, Any], impl: str, value: float) -> None:
    x = inputs(20, counts=(0, 1, 7, 19, 20))
    torch.testing.assert_close(*(read_cache(**y, impl=impl, **kappa) for y in (spoil(x, value), x)))


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_a_row_without_slots(impl: str) -> None:
    o, log_sum = read_cache(**inputs(20, counts=(0, 5)), impl=impl)
    assert log_sum is not None
    assert not o[0].any()
    assert o[1].all()
    assert (log_sum == float("-inf")).tolist() == [[True] * 8, [False] * 8]


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_is_attention(impl: str, scale: float | None) -> None:
    x = inputs(20, heads=(8, 2, 2), counts=(20, 20, 20))
    q, k, v = x["q"].unsqueeze(2), x["k"].transpose(1, 2), x["v"].transpose(1, 2)
    expected = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True).squeeze(2)
    torch.testing.assert_close(read_cache(**x, impl=impl, scale=scale)[0], expected)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_two_reads_join(impl: str) -> None:
    """By their log_sum, into what one read of all the slots gives."""
    x = inputs(20, counts=(20, 20, 20))
    o, log_sum = read_cache(**x, impl=impl)
    parts = [
        read_cache(x["q"], x["k"][:, slots], x["v"][:, slots], x["counts"], impl=impl)
        for slots in (slice(7), slice(7, None))
    ]
    log_sums = torch.stack([part[1] for part in parts if part[1] is not None])
    joined = (log_sums.softmax(0)[..., None] * torch.stack([part[0] for part in parts])).sum(0)
    torch.testing.assert_close((joined, log_sums.logsumexp(0)), (o, log_sum))


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_mixed_dtypes(impl: str) -> None:
    """As under autocast, whose own products have no place here: all go by v."""
    x = as_dtype(inputs(20), torch.bfloat16)
    given = x | {"q": x["q"].float(), "k": x["k"].half()}
    with torch.autocast("cpu", torch.bfloat16):
        actual = read_cache(**given, impl=impl)
    torch.testing.assert_close(actual, read_cache(**x, impl=impl), rtol=0, atol=0)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kappa", [{"kappa": "softmax"}, {"kappa": "round", "round_decimals": 2}], ids=str)
def test_one_graph_over_counts(kappa: dict[str, Any]) -> None:
    compiled = torch.compile(read_cache, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (0, 1, 7, 20):
            x = spoil(inputs(20, counts=(count, 20 - count)))
            torch.testing.assert_close(compiled(**x, **kappa), read_cache(**x, **kappa))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph_over_slots() -> None:
    compiled = torch.compile(read_cache, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_slots in (20, 21, 50):
            x = inputs(num_slots)
            torch.testing.assert_close(compiled(**x), read_cache(**x))


Q, K, V, COUNT = torch.zeros(3, 8, 6), torch.zeros(3, 5, 2, 6), torch.zeros(3, 5, 4, 10), torch.zeros(3).long()
X: dict[str, Any] = {"q": Q, "k": K, "v": V, "counts": COUNT}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"impl": "cuda"}, "impl: expected one of 'auto', 'reference', 'torch', 'triton', got 'cuda'"),
    ({"impl": "triton"}, "impl: 'triton' needs CUDA tensors, got cpu"),
    ({"kappa": "gelu"}, "kappa: expected one of 'softmax', 'linear', 'relu', 'exp', 'round', got 'gelu'"),
    ({"round_decimals": 1}, "round_decimals: expected 0, for 'softmax' does not round, got 1"),
    (
        {"kappa": "round", "round_decimals": 7},
        "round_decimals: expected a whole number from 0 to 6, got 7",
    ),
    ({"scale": "a"}, "scale: expected a number, got 'a'"),
    ({"q": Q[0]}, "q: expected [B, H, D], no size 0, got [8, 6]"),
    ({"q": Q[:, :0]}, "q: expected [B, H, D], no size 0, got [3, 0, 6]"),
    ({"k": K[0]}, "k: expected [B, S, G, D], no size 0, got [5, 2, 6]"),
    ({"k": K[:, :0]}, "k: expected [B, S, G, D], no size 0, got [3, 0, 2, 6]"),
    ({"k": K[:2]}, "k: expected [B, S, G, D] = [3, 5, 2, 6], got [2, 5, 2, 6]"),
    ({"k": K[..., :5]}, "k: expected [B, S, G, D] = [3, 5, 2, 6], got [3, 5, 2, 5]"),
    ({"v": V[0]}, "v: expected [B, S, G_v, D_v], no size 0, got [5, 4, 10]"),
    ({"v": V[..., :0]}, "v: expected [B, S, G_v, D_v], no size 0, got [3, 5, 4, 0]"),
    ({"v": V[:, :4]}, "v: expected [B, S, G_v, D_v] = [3, 5, 4, 10], got [3, 4, 4, 10]"),
    ({"v": V[:, :, :3]}, "k: expected a number of heads G that divides the G_v = 3 of v, got 2"),
    ({"v": V[:, :, :1]}, "k: expected a number of heads G that divides the G_v = 1 of v, got 2"),
    ({"q": Q[:, :6]}, "v: expected a number of heads G_v that divides the H = 6 of q, got 4"),
    ({"counts": COUNT[:2]}, "counts: expected [B] = [3], got [2]"),
    ({"counts": COUNT[:, None]}, "counts: expected [B] = [3], got [3, 1]"),
    ({"counts": 5}, "counts: expected a tensor [B] = [3], got 5"),
    ({"counts": COUNT.float()}, "counts: expected int32 or int64, got torch.float32"),
    *(({name: X[name].long()}, f"{name}: expected a floating-point dtype, got torch.int64") for name in "qkv"),
    *(
        ({name: X[name].to("meta")}, f"{name}: expected the device of q, cpu, got meta")
        for name in ("k", "v", "counts")
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read_cache(**X | change)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("dims", "dtype", "missing"),
    [
        ((6, 10), torch.float64, "v in bfloat16, float16 or float32, got torch.float64"),
        ((257, 10), torch.float32, "D and D_v of at most 256, got 257 and 10"),
        ((6, 300), torch.float32, "D and D_v of at most 256, got 6 and 300"),
    ],
)
def test_what_triton_cannot(dims: tuple[int, int], dtype: torch.dtype, missing: str) -> None:
    """Under `FakeTensorMode` tensors say that they are on a CUDA device, and none is needed."""
    with FakeTensorMode():
        shapes = {"q": (3, 8, dims[0]), "k": (3, 5, 2, dims[0]), "v": (3, 5, 4, dims[1])}
        given: dict[str, Any] = {name: torch.empty(y, dtype=dtype, device="cuda") for name, y in shapes.items()}
        given["counts"] = torch.empty(3, dtype=torch.int32, device="cuda")
        with pytest.raises(ValueError) as error:  # noqa: PT011
            read_cache(**given, impl="triton")
    assert str(error.value) == f"impl: 'triton' needs {missing}"
