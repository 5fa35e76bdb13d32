"""The results of the delta rule's Triton kernels on a CUDA device: equal to float64."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from comparing import LAYOUTS, assert_equal, assert_near
from delta_rule_cases import (
    BF16,
    BOTH,
    BOUNDS,
    DEVICE,
    FP16,
    FP32,
    PER_TOKEN,
    PIECES,
    PLAIN,
    ROUNDING,
    SIZES,
    Form,
    changed,
    check,
    each_form,
    exact,
    inputs,
    present,
    results,
)
from torch import Tensor

from zoo.kernels.delta_rule import chunk_delta_rule, recurrent_delta_rule
from zoo.kernels.delta_rule.schedule import Blocks, Configuration, configuration

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("seq_len", [1, 2, 3, 15, 63, 64, 65, 127, 129, 1000, 1537])
@each_form
def test_lengths(form: Form, seq_len: int) -> None:
    check(inputs(seq_len, form), form)


@pytest.mark.parametrize(
    "dims",
    [(16, 48), (32, 16), (48, 32), (64, 80), (80, 96), (96, 64), (100, 100), (128, 192), (192, 128), (256, 256)],
)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_head_dims(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    check(inputs(150, dims=dims, dtype=dtype), PLAIN)


@pytest.mark.parametrize("heads", [(4, 2), (4, 1)])
@each_form
def test_grouped_heads(form: Form, heads: tuple[int, int]) -> None:
    check(inputs(300, form, heads=heads), form)


@pytest.mark.parametrize(
    ("cos", "beta", "bound"),
    [
        (0.0, None, 1e-2),
        (0.0, 0.0, 1e-2),
        (0.0, 1.0, 1e-2),
        (0.0, 2.0, 1.5e-2),
        # The inverses' rounding to bfloat16 counts here: their entries alternate between -2 and 2 where beta is 2.
        (0.99, None, 1.5e-2),
        (0.99, 0.0, 1e-2),
        (0.99, 1.0, 2.5e-2),
        (0.99, 2.0, 3e-1),
    ],
)
def test_errors_of_bfloat16(cos: float, beta: float | None, bound: float) -> None:
    check(inputs(500, dims=(128, 128), cos=cos, beta=beta), PLAIN, bound=bound)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_correlated_keys_in_float32(beta: float) -> None:
    check(inputs(500, dtype=FP32, cos=0.99, beta=beta), PLAIN)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_auto_is_triton(dtype: torch.dtype) -> None:
    x = inputs(70, dtype=dtype)
    assert_equal(results(x, impl="auto"), results(x))


def test_head_dims_beyond_the_kernels() -> None:
    x = inputs(70, dims=(260, 64))
    check(x, PLAIN, impl="auto")
    with pytest.raises(ValueError, match=r"^impl: 'triton' needs d_k and d_v of at most 256, got 260 and 64$"):
        chunk_delta_rule(**x, impl="triton")


@pytest.mark.parametrize("name", ["q", "k", "beta"])
@each_form
def test_zeros_have_finite_gradients(form: Form, name: str) -> None:
    x = changed(inputs(150, form), torch.zeros_like, (name,))
    assert all(y.isfinite().all() for y in results(x, qk_l2norm=form.normalize).values())
    check(x, form)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pieces", [None, (3, 147)])
def test_any_strides(layout: str, pieces: tuple[int, ...] | None) -> None:
    views = changed(inputs(150, BOTH, heads=(4, 2), pieces=pieces), LAYOUTS[layout])
    assert layout == "misaligned" or not any(y.is_contiguous() for y in present(views).values())
    copies = changed(views, torch.Tensor.contiguous)
    assert_near(results(views, qk_l2norm=True), results(copies, qk_l2norm=True), ROUNDING)
    check(views, BOTH)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_of_upstream_gradients(layout: str) -> None:
    x = inputs(150, heads=(4, 2))
    outputs = chunk_delta_rule(**x, impl="triton")
    views = [LAYOUTS[layout](torch.randn_like(y)) for y in outputs]
    copies = [y.clone(memory_format=torch.contiguous_format) for y in views]
    actual, expected = (
        torch.autograd.grad(outputs, list(x.values()), each, retain_graph=True) for each in (views, copies)
    )
    assert_equal(dict(zip(x, actual, strict=True)), dict(zip(x, expected, strict=True)))


@pytest.mark.parametrize("output", [0, 1], ids=["o", "final_state"])
@pytest.mark.parametrize("segment_length", [None, 64])
def test_upstream_gradient_of_a_sum(segment_length: int | None, output: int) -> None:
    x = inputs(150)
    double = changed(x, torch.Tensor.double)
    total = chunk_delta_rule(**x, segment_length=segment_length, impl="triton")[output].sum()
    expected = chunk_delta_rule(**double, impl="torch")[output].sum()
    actual = torch.autograd.grad(total, list(x.values()), materialize_grads=True)
    wanted = torch.autograd.grad(expected, list(double.values()), materialize_grads=True)
    assert_near(dict(zip(x, actual, strict=True)), dict(zip(x, wanted, strict=True)), 1e-2)


@each_form
def test_without_states_or_gradients(form: Form) -> None:
    x: dict[str, Any] = inputs(300, form) | {"initial_state": None}
    check(x, form)
    o, final_state = chunk_delta_rule(**x, qk_l2norm=form.normalize, impl="triton")
    with torch.no_grad():
        same = chunk_delta_rule(**x, qk_l2norm=form.normalize, impl="triton")
    assert torch.equal(o, same[0])
    assert torch.equal(final_state, same[1])


@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (128, 128), (100, 48), (256, 128)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_segments(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    x = inputs(700, BOTH, dims=dims, dtype=dtype)
    for segment_length in (64, 128):
        check(x, BOTH, segment_length=segment_length)


@each_form
def test_segments_by_the_rule(form: Form) -> None:
    check(inputs(4000, form, heads=(2, 1), batch=1, dtype=FP32), form)


@pytest.mark.parametrize("segment_length", [None, 64, 192])
@each_form
def test_packed_equals_each_alone(form: Form, segment_length: int | None) -> None:
    x = inputs(sum(PIECES), form, pieces=PIECES)
    options: dict[str, Any] = {"qk_l2norm": form.normalize, "segment_length": segment_length}
    o, final_state = chunk_delta_rule(**x, **options, impl="triton")
    bounds = x["cu_seqlens"].tolist()
    assert_near(results(x, **options), exact(x, qk_l2norm=form.normalize), 1e-2)
    for n, (start, end) in enumerate(pairwise(bounds)):
        alone: dict[str, Any] = changed(present(x), lambda y, a=start, b=end: y[:, a:b], PER_TOKEN)
        alone = changed(alone, lambda y, n=n: y[n : n + 1], ("initial_state",))
        outputs = chunk_delta_rule(**alone, **options, impl="triton")
        expected = {"o": outputs[0], "final_state": outputs[1]}
        weights = [torch.ones_like(y) for y in outputs]
        grads = torch.autograd.grad(outputs, list(alone.values()), weights)
        expected |= dict(zip(alone, grads, strict=True))
        parts = o[:, start:end], final_state[n : n + 1]
        packed = torch.autograd.grad(parts, list(present(x).values()), weights, retain_graph=True)
        actual = {"o": parts[0], "final_state": parts[1]}
        for name, grad in zip(alone, packed, strict=True):
            actual[name] = grad[n : n + 1] if name == "initial_state" else grad[:, start:end]
        assert_near(actual, expected, ROUNDING)


def test_packed_with_many_short_documents() -> None:
    pieces = (*[1] * 150, 0, 3000, 0)
    x = inputs(sum(pieces), BOTH, heads=(2, 1), pieces=pieces)
    for segment_length in (None, 128):
        check(x, BOTH, segment_length=segment_length)


@pytest.mark.parametrize("segment_length", [None, 64])
@pytest.mark.parametrize("value", [2.0, torch.nan])
def test_a_document_does_not_reach_the_others(value: float, segment_length: int | None) -> None:
    x = inputs(sum(PIECES), BOTH, pieces=PIECES)
    start, end = x["cu_seqlens"][3:5].tolist()
    other = changed(x, torch.clone)
    with torch.no_grad():
        for y in present(other, PER_TOKEN).values():
            y[:, start:end] = value
        other["initial_state"][3] = value
    before, after = (results(y, qk_l2norm=True, segment_length=segment_length) for y in (x, other))
    for name, y in before.items():
        y, z = (y, after[name]) if name in ("final_state", "initial_state") else (y[0], after[name][0])
        first, last = (3, 4) if len(y) == len(PIECES) else (start, end)
        assert torch.equal(y[:first], z[:first]), name
        assert torch.equal(y[last:], z[last:]), name
        assert not torch.equal(y[first:last], z[first:last]), name


def distinct_configurations() -> list[tuple[torch.dtype, tuple[int, int]]]:
    """The dtypes and head dims that between them need every configuration there is."""
    found = []
    for dtype in (BF16, FP16, FP32):
        dims = {
            configuration(key_dim, value_dim, dtype): (key_dim, value_dim) for key_dim in SIZES for value_dim in SIZES
        }
        found += [(dtype, each) for each in dims.values()]
    return found


@pytest.mark.parametrize("segment_length", [None, 64])
@pytest.mark.parametrize(("dtype", "dims"), distinct_configurations(), ids=str)
def test_every_configuration(dtype: torch.dtype, dims: tuple[int, int], segment_length: int | None) -> None:
    check(inputs(350, BOTH, dims=dims, dtype=dtype), BOTH, segment_length=segment_length)


@pytest.mark.parametrize("heads", [(2, 1), (8, 1), (8, 2)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (100, 48)])
@each_form
def test_grouped_heads_of_any_size(form: Form, dims: tuple[int, int], heads: tuple[int, int]) -> None:
    check(inputs(350, form, heads=heads, dims=dims), form)


@pytest.mark.parametrize("reset", [-500.0, -1e4])
def test_resets(reset: float) -> None:
    x = inputs(350, BOTH)
    tokens = torch.arange(350, device=DEVICE)[:, None]
    check(changed(x, lambda g: torch.where(tokens % 16 == 0, reset, g), ("g",)), BOTH)


def test_a_zero_key_in_float16() -> None:
    """Over its norm, which is 1e-3, what it would write is beyond float16, and so is its own gradient."""
    x = inputs(70, BOTH, dtype=FP16)
    x = changed(x, lambda k: torch.where(torch.arange(70, device=DEVICE)[:, None, None] == 5, 0, k), ("k",))
    x = changed(x, lambda v: 200 * v, ("v",))
    actual, expected = (
        {name: y for name, y in each.items() if name != "k"}
        for each in (results(x, qk_l2norm=True), exact(x, qk_l2norm=True))
    )
    assert_near(actual, expected, BOUNDS[FP16])


@pytest.mark.parametrize("segment_length", [None, 64])
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (48, 100), (256, 256)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@each_form
def test_either_number_of_warps(
    form: Form,
    dtype: torch.dtype,
    dims: tuple[int, int],
    warps: int,
    segment_length: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_warps(*arguments: Any) -> Configuration:
        chosen = configuration(*arguments)
        blocks = {name: y._replace(warps=warps) for name, y in chosen._asdict().items() if isinstance(y, Blocks)}
        return chosen._replace(prepare_warps=warps, **blocks)

    monkeypatch.setattr("zoo.kernels.delta_rule.triton.launch.configuration", with_warps)
    check(inputs(150, form, dims=dims, dtype=dtype), form, segment_length=segment_length)


@pytest.mark.parametrize("function", [chunk_delta_rule, recurrent_delta_rule])
@pytest.mark.parametrize("split", [1, 63, 64, 100, 149])
@each_form
def test_split_with_carried_state(form: Form, split: int, function: Callable[..., Any]) -> None:
    x = inputs(150, form)

    def in_two(initial_state: Tensor, impl: str, qk_l2norm: bool, **per_token: Tensor) -> tuple[Tensor, Tensor]:
        options = {"impl": impl, "qk_l2norm": qk_l2norm}
        o, state = function(
            **{name: y[:, :split] for name, y in per_token.items()}, initial_state=initial_state, **options
        )
        rest, state = function(**{name: y[:, split:] for name, y in per_token.items()}, initial_state=state, **options)
        return torch.cat([o, rest], 1), state

    assert_near(results(x, in_two, qk_l2norm=form.normalize), exact(x, qk_l2norm=form.normalize), 1e-2)


@pytest.mark.parametrize("pieces", [None, (1, 0, 69)], ids=["dense", "packed"])
@pytest.mark.parametrize("dims", [(64, 64), (100, 48), (256, 256)])
@each_form
def test_recurrent_head_dims(form: Form, dims: tuple[int, int], pieces: tuple[int, ...] | None) -> None:
    x = inputs(70, form, heads=(4, 2), dims=dims, pieces=pieces)
    assert_near(results(x, recurrent_delta_rule, qk_l2norm=form.normalize), exact(x, qk_l2norm=form.normalize), 1e-2)


@pytest.mark.parametrize("seq_len", [1, 5, 70])
@each_form
def test_recurrent_equals_chunks(form: Form, seq_len: int) -> None:
    x = inputs(seq_len, form, dtype=FP32)
    expected = results(x, qk_l2norm=form.normalize)
    assert_near(results(x, recurrent_delta_rule, qk_l2norm=form.normalize), expected, 1e-5)
