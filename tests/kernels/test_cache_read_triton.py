"""The Triton kernel that reads from caches against the reference, on a CUDA device or in Triton's interpreter.

Without a device it runs in a process of its own, for the interpreter is chosen when the kernel is imported:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_cache_read_triton.py

Shapes: B rows, S slots of a cache, H query heads, G key heads, G_v value heads, D and D_v their sizes.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_read_cases import COUNTS, HEADS, KAPPAS, exact, inputs, spoil
from comparing import LAYOUTS, assert_near
from torch import Tensor

from zoo.kernels import cache_read
from zoo.kernels.cache_read import read_cache, schedule, triton_ops

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 and a process of its own", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3}
SPLITS = (1, 2, 7)


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes tensors on the CPU."""
    if DEVICE == "cpu":
        monkeypatch.setattr(cache_read, "missing_for_heads", lambda *_, **__: None)


def cut(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    """Into so many splits."""
    monkeypatch.setattr(schedule, "num_splits", lambda *_: splits)


def check(
    x: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    view: Callable[[Tensor], Tensor] = lambda y: y,
    **options: Any,
) -> None:
    """Against the reference in float64, with NaN in the slots that are not there; log_sum as well."""
    given = {name: y.to(DEVICE, dtype) if y.is_floating_point() else y.to(DEVICE) for name, y in spoil(x).items()}
    given |= {name: view(given[name]) for name in ("k", "v")}
    o, log_sum = read_cache(**given, impl="triton", **options)
    expected_o, expected_log_sum = exact(x, **options)
    assert o.dtype == torch.float32
    assert o.isfinite().all()
    assert_near({"o": o.cpu()}, {"o": expected_o}, BOUNDS[dtype])
    assert (log_sum is None) == (expected_log_sum is None)
    if log_sum is not None:
        torch.testing.assert_close(log_sum.double().cpu(), expected_log_sum, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("kappa", KAPPAS, ids=str)
def test_kappas(kappa: dict[str, Any], splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, splits)
    check(inputs(300, counts=(300, 0, 1, 130, 299)), **kappa)


@pytest.mark.parametrize("kappa", KAPPAS, ids=str)
def test_half_precision(kappa: dict[str, Any]) -> None:
    check(inputs(300, counts=(300, 77)), dtype=torch.float16, **kappa)


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("heads", [*HEADS, (40, 1, 1), (70, 1, 2)])
def test_heads(heads: tuple[int, int, int], splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, splits)
    check(inputs(100, heads=heads, dims=(16, 24)))


@pytest.mark.parametrize("value_dim", [16, 40, 128, 256])
@pytest.mark.parametrize("key_dim", [1, 16, 40, 64, 128, 256])
def test_sizes(key_dim: int, value_dim: int) -> None:
    check(inputs(70, dims=(key_dim, value_dim), counts=(70, 33), heads=(4, 2, 2)))


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("kappa", [{"kappa": "softmax"}, {"kappa": "linear"}], ids=str)
def test_counts_about_blocks(kappa: dict[str, Any], splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, splits)
    slots = schedule.configuration(2, 64, 64, torch.float32).slots
    counts = [i * slots + j for i in (1, 2, 7) for j in (-1, 0, 1)]
    check(inputs(7 * slots + 1, counts=(1, *counts), heads=(2, 1, 1), dims=(64, 64)), **kappa)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("counts", COUNTS)
def test_counts(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    x = inputs(20, counts=counts)
    check(x | {"counts": x["counts"].to(dtype)})


@pytest.mark.parametrize("layout", ["transposed", "strided", "sliced", "misaligned"])
def test_any_strides(layout: str) -> None:
    check(inputs(50), view=LAYOUTS[layout])


def test_slices_of_larger_tensors() -> None:
    x = inputs(50)
    wide = {name: torch.cat([torch.full_like(y, torch.nan), y], -1) for name, y in x.items() if name != "counts"}
    given: dict[str, Any] = {name: y.float().to(DEVICE)[..., y.shape[-1] // 2 :] for name, y in wide.items()}
    o, _ = read_cache(**given, counts=x["counts"].to(DEVICE), impl="triton")
    assert_near({"o": o.cpu()}, {"o": exact(x)[0]}, 1e-5)


def test_a_large_logit_overflows_nothing() -> None:
    x = inputs(50)
    check(x | {"q": 100 * x["q"]})


@pytest.mark.parametrize("scale", [0.3, -0.5, 0.0, 2])
def test_scale(scale: float) -> None:
    check(inputs(50), scale=scale)


def test_a_row_does_not_reach_the_others() -> None:
    x = {name: y.to(DEVICE) for name, y in inputs(50, counts=(50, 20, 33)).items()}
    x = {name: y.float() if y.is_floating_point() else y for name, y in x.items()}
    spoilt = x | {name: x[name].clone() for name in ("q", "k", "v")}
    for name in ("q", "k", "v"):
        spoilt[name][1] = torch.nan
    before, after = (read_cache(**y, impl="triton")[0] for y in (x, spoilt))
    assert torch.equal(before[::2], after[::2])


@pytest.mark.parametrize("kappa", ["softmax", "exp", "relu"])
def test_the_op_is_sound(kappa: str) -> None:
    x = {name: y.to(DEVICE) for name, y in inputs(50).items()}
    args = [y.float() if y.is_floating_point() else y for y in x.values()]
    torch.library.opcheck(triton_ops.read_cache, (*args, kappa, 0, 0.3))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kappa", ["softmax", "exp", "linear"])
def test_one_graph_over_counts(kappa: str) -> None:
    compiled = torch.compile(read_cache, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (0, 1, 30, 50):
            x = {name: y.to(DEVICE) for name, y in inputs(50, counts=(count, 50 - count)).items()}
            x = {name: y.float() if y.is_floating_point() else y for name, y in x.items()}
            actual, expected = (f(**x, kappa=kappa, impl="triton") for f in (compiled, read_cache))
            torch.testing.assert_close(actual, expected)
