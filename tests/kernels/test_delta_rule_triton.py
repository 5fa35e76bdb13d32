"""The delta rule's Triton kernels by chunks against the reference, on a CUDA device or in Triton's interpreter.

Without a device they run in a process of their own, for the interpreter is chosen when the kernels are imported:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_delta_rule_triton.py

Shapes: B batch, T tokens, H query heads, G key/value heads, N documents (N = B unless packed).
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import LAYOUTS, assert_near
from delta_rule_triton_cases import (
    DEVICE,
    FORMS,
    LEAVES,
    PER_TOKEN,
    Form,
    each_form,
    inputs,
    on_device,
    plainest_and_fullest,
    reference,
    upstream,
)
from torch import Tensor

from zoo.kernels.delta_rule.schedule import Layout

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 and a process of its own", allow_module_level=True)

from zoo.kernels.delta_rule.triton.launch import chunk_backward, chunk_forward

BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3}
PIECES = (0, 1, 2, 63, 0, 64, 65, 0)
GUARD = 4096  # numbers before and after each tensor


def kernels(
    x: dict[str, Any],
    grads: tuple[Tensor, Tensor | None] | None,
    *,
    dtype: torch.dtype = torch.float32,
    normalize: bool = False,
    scale: float = 0.3,
    segment_length: int | None = None,
    view: Callable[[Tensor], Tensor] = lambda y: y,
    view_grads: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """The same from the launchers; without `grads` nothing is saved, and there are no gradients."""
    q, k, v, beta, g, initial_state, cu_seqlens = on_device(x, dtype, view)
    layout = Layout(
        batch=q.shape[0],
        seq_len=q.shape[1],
        num_documents=None if cu_seqlens is None else len(cu_seqlens) - 1,
        heads=q.shape[2],
        groups=k.shape[2],
        key_dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=dtype,
        device=q.device,
        segment_length=segment_length,
        normalize=normalize,
        gated=g is not None,
    )
    save = grads is not None
    o, final_state, saved = chunk_forward(layout, q, k, v, beta, g, initial_state, cu_seqlens, scale, save=save)
    assert (o.dtype, final_state.dtype) == (dtype, torch.float32)
    found = {"o": o, "final_state": final_state}
    if grads is not None:
        view = view_grads or view
        grad_o = view(grads[0].to(DEVICE, dtype))
        grad_final_state = None if grads[1] is None else view(grads[1].to(DEVICE, torch.float32))
        leaves = chunk_backward(layout, grad_o, grad_final_state, q, k, beta, g, cu_seqlens, saved, scale)
        assert leaves[4].shape == (beta.shape if g is not None else (0,))
        found |= {name: y for name, y in zip(LEAVES, leaves, strict=True) if name in x}
    return {name: y.double().cpu() for name, y in found.items()}


def check(
    x: dict[str, Any],
    form: Form,
    *,
    dtype: torch.dtype = torch.float32,
    bound: float | None = None,
    scale: float = 0.3,
    **options: Any,
) -> None:
    """Forward and every gradient, through both results."""
    grads = upstream(x, dtype)
    expected = reference(x, grads, normalize=form.normalize, scale=scale)
    actual = kernels(x, grads, dtype=dtype, normalize=form.normalize, scale=scale, **options)
    assert_near(actual, expected, bound or BOUNDS[dtype])


@pytest.mark.parametrize("seq_len", [1, 2, 3, 15, 63, 64, 65, 127, 129, 200])
@plainest_and_fullest
def test_lengths(form: Form, seq_len: int) -> None:
    check(inputs(seq_len, form), form)


@pytest.mark.parametrize("dims", [(16, 16), (32, 48), (48, 32), (100, 20), (16, 80)])
@each_form
def test_head_dims(form: Form, dims: tuple[int, int]) -> None:
    check(inputs(70, form, dims=dims), form)


@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (4, 1)])
@each_form
def test_grouped_heads(form: Form, heads: tuple[int, int]) -> None:
    check(inputs(70, form, batch=2, heads=heads), form)


@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
@each_form
def test_half_precision(form: Form, heads: tuple[int, int]) -> None:
    x = inputs(129, form, heads=heads, dims=(32, 48), dtype=torch.float16)
    check(x, form, dtype=torch.float16)


@pytest.mark.parametrize("segment_length", [None, 64])
@plainest_and_fullest
def test_no_state_in_and_no_gradient_back(form: Form, segment_length: int | None) -> None:
    x = inputs(200, form, state=False)
    grads = upstream(x, torch.float32)[0], None
    expected = reference(x, grads, normalize=form.normalize)
    assert_near(kernels(x, grads, normalize=form.normalize, segment_length=segment_length), expected, 1e-5)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@plainest_and_fullest
def test_packed(form: Form, index: torch.dtype) -> None:
    x = inputs(sum(PIECES), form, heads=(4, 2), pieces=PIECES)
    check(x | {"cu_seqlens": x["cu_seqlens"].to(index)}, form)


def test_packed_half_precision_without_states() -> None:
    x = inputs(sum(PIECES), FORMS["both"], pieces=PIECES, dtype=torch.float16, state=False)
    check(x, FORMS["both"], dtype=torch.float16)


@pytest.mark.parametrize("dims", [(16, 32), (20, 24)])
def test_a_document_does_not_reach_the_others(dims: tuple[int, int]) -> None:
    x = inputs(sum(PIECES), FORMS["both"], dims=dims, pieces=PIECES)
    start, end = x["cu_seqlens"][5:7].tolist()
    other = x | {name: x[name].detach().clone() for name in LEAVES}
    for name in PER_TOKEN:
        other[name][:, start:end] = torch.nan
    other["initial_state"][5] = torch.nan
    grads = upstream(x, torch.float32)
    before, after = (kernels(y, grads, normalize=True) for y in (x, other))
    for name, y in before.items():
        y, z = (y, after[name]) if name in ("final_state", "initial_state") else (y[0], after[name][0])
        first, last = (5, 6) if len(y) == len(PIECES) else (start, end)
        assert torch.equal(y[:first], z[:first]), name
        assert torch.equal(y[last:], z[last:]), name


@pytest.mark.parametrize(("seq_len", "segment_length"), [(65, 64), (330, 64), (500, 128), (500, 1000)])
@plainest_and_fullest
def test_segments(form: Form, seq_len: int, segment_length: int) -> None:
    check(inputs(seq_len, form, batch=2), form, segment_length=segment_length)


@pytest.mark.parametrize("dims", [(48, 80), (100, 20)])
def test_segments_of_other_head_dims(dims: tuple[int, int]) -> None:
    check(inputs(250, FORMS["both"], dims=dims), FORMS["both"], segment_length=64)


@pytest.mark.parametrize(
    ("pieces", "segment_length"), [((64, 0, 180, 1, 320), 64), ((0, 60, 300, 520, 0), 128)], ids=["64", "128"]
)
@plainest_and_fullest
def test_packed_segments(form: Form, pieces: tuple[int, ...], segment_length: int) -> None:
    check(inputs(sum(pieces), form, pieces=pieces), form, segment_length=segment_length)


def test_wide_heads_have_shorter_chunks() -> None:
    pieces = (31, 32, 33, 0, 150)
    x = inputs(sum(pieces), FORMS["both"], heads=(1, 1), dims=(130, 16), pieces=pieces)
    for segment_length in (None, 32):
        check(x, FORMS["both"], segment_length=segment_length)


def test_segments_in_half_precision() -> None:
    x = inputs(300, FORMS["both"], dims=(32, 16), dtype=torch.float16)
    check(x, FORMS["both"], dtype=torch.float16, segment_length=64)


@pytest.mark.parametrize(("low", "high", "bound"), [(0.0, 1.6, 1e-5), (2.0, 8.0, 1e-5), (20.0, 30.0, 1e-4)])
def test_strong_decay(low: float, high: float, bound: float) -> None:
    """g is bounded in value, its gradient relative to its own norm, however little the decay leaves of it."""
    x = inputs(150, FORMS["both"], dims=(16, 32))
    x["g"] = (-low - (high - low) * torch.rand(1, 150, 1, dtype=torch.float64)).float().double().requires_grad_()
    check(x, FORMS["both"], bound=bound)


@pytest.mark.parametrize("reset", [-500.0, -1e4])
def test_resets(reset: float) -> None:
    """What lies between two resets is exact, though their sum is large."""
    x = inputs(150, FORMS["gated"], dims=(16, 32))
    x["g"] = torch.where(torch.arange(150) % 16 == 0, reset, x["g"].detach()[0, :, 0])[None, :, None].requires_grad_()
    check(x, FORMS["gated"])


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_correlated_keys(dtype: torch.dtype, beta: float) -> None:
    """Where beta is 2 the inverses' entries alternate between -2 and 2, and their rounding to float16 counts."""
    bound = 5e-5 if dtype == torch.float32 else 3e-3 if beta < 2 else 2e-2
    x = inputs(129, heads=(1, 1), dims=(32, 32), dtype=dtype, cos=0.99, beta=beta)
    check(x, FORMS["plain"], dtype=dtype, bound=bound)


@pytest.mark.parametrize("name", ["q", "k", "beta"])
@plainest_and_fullest
def test_zeros_have_finite_gradients(form: Form, name: str) -> None:
    x = inputs(70, form)
    x[name] = torch.zeros_like(x[name]).requires_grad_()
    check(x, form)


@pytest.mark.parametrize("segment_length", [None, 64])
@pytest.mark.parametrize("scale", [0.0, -2.0])
def test_scale(scale: float, segment_length: int | None) -> None:
    check(inputs(200, FORMS["both"]), FORMS["both"], scale=scale, segment_length=segment_length)


@pytest.mark.parametrize("layout", ["transposed", "strided", "sliced", "misaligned"])
@pytest.mark.parametrize("pieces", [None, (3, 67)])
def test_any_strides(layout: str, pieces: tuple[int, ...] | None) -> None:
    x = inputs(70, FORMS["both"], batch=2 if pieces is None else 1, heads=(4, 2), pieces=pieces)
    check(x, FORMS["both"], view=LAYOUTS[layout])


def test_expanded_inputs() -> None:
    x = inputs(130, FORMS["both"], heads=(4, 2))
    x = {name: y.detach()[:, :1].expand_as(y).requires_grad_() for name, y in x.items()}
    check(x, FORMS["both"], view=lambda y: y[:, :1].expand_as(y), view_grads=torch.Tensor.contiguous)


@pytest.mark.parametrize("segment_length", [None, 64])
def test_upstream_gradients_of_a_sum(segment_length: int | None) -> None:
    """They are one number each."""
    x = inputs(130, FORMS["both"], heads=(4, 2))
    grad_o, grad_final_state = (torch.ones_like(y) for y in upstream(x, torch.float32))

    def one_number(y: Tensor) -> Tensor:
        return torch.cat([y.flatten()[:1], torch.full_like(y, torch.nan).flatten()])[0].expand_as(y)

    actual = kernels(
        x,
        (grad_o, grad_final_state),
        normalize=True,
        segment_length=segment_length,
        view_grads=one_number,
    )
    assert_near(actual, reference(x, (grad_o, grad_final_state), normalize=True), 1e-5)


@pytest.mark.parametrize("segment_length", [None, 64])
def test_saving_changes_no_number(segment_length: int | None) -> None:
    x = inputs(200, FORMS["both"])
    saving = kernels(x, upstream(x, torch.float32), normalize=True, segment_length=segment_length)
    alone = kernels(x, None, normalize=True, segment_length=segment_length)
    assert all(torch.equal(y, saving[name]) for name, y in alone.items())


@pytest.mark.parametrize("split", [1, 64, 100])
@plainest_and_fullest
def test_split_with_carried_state(form: Form, split: int) -> None:
    x = inputs(150, form)
    grad_o, grad_final_state = upstream(x, torch.float32)
    first, second = (
        x | {name: x[name][:, tokens] for name in PER_TOKEN if name in x}
        for tokens in (slice(0, split), slice(split, 150))
    )
    second["initial_state"] = kernels(first, None, normalize=form.normalize)["final_state"]
    last = kernels(second, (grad_o[:, split:], grad_final_state), normalize=form.normalize)
    start = kernels(first, (grad_o[:, :split], last["initial_state"]), normalize=form.normalize)
    joined = {name: torch.cat([y, last[name]], 1) for name, y in start.items() if name in ("o", *PER_TOKEN)}
    states = {"final_state": last["final_state"], "initial_state": start["initial_state"]}
    assert_near(joined | states, reference(x, (grad_o, grad_final_state), normalize=form.normalize), 1e-5)


def test_rows_do_not_depend_on_the_batch() -> None:
    x = inputs(200, FORMS["both"], batch=3)
    grads = upstream(x, torch.float32)
    whole = kernels(x, grads, normalize=True, segment_length=64)
    alone = kernels(
        {name: y[1:2] for name, y in x.items()}, (grads[0][1:2], grads[1][1:2]), normalize=True, segment_length=64
    )
    assert all(torch.equal(y[1:2], alone[name]) for name, y in whole.items())


@pytest.mark.parametrize(
    ("pieces", "segment_length"),
    [(None, None), (None, 64), (None, 128), (PIECES, None), ((*[1] * 20, 0, 330), 128), ((*[1] * 20, 0, 1100), None)],
    ids=["dense", "dense-64", "dense-128", "packed", "many-128", "many"],
)
def test_stays_inside_its_memory(
    pieces: tuple[int, ...] | None, segment_length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written beside the tensors that the launchers allocate, nor read from where nothing was written."""
    monkeypatch.setattr("zoo.kernels.delta_rule.schedule.num_multiprocessors", lambda _: 16)
    x = inputs(sum(pieces) if pieces else 320, FORMS["both"], batch=1 if pieces else 4, pieces=pieces)
    allocated = []

    def guarded(shape: Any, dtype: torch.dtype) -> Tensor:
        shape = torch.Size(shape if isinstance(shape, tuple | list) else (shape,))
        poison = torch.nan if dtype.is_floating_point else -(2**20)
        memory = torch.full((shape.numel() + 2 * GUARD,), poison, dtype=dtype, device=DEVICE)
        allocated.append((memory, memory.clone(), shape.numel()))
        return memory[GUARD : GUARD + shape.numel()].view(shape)

    def new_empty(like: Tensor, *shape: Any, dtype: torch.dtype | None = None, **others: Any) -> Tensor:
        if others:  # not the launchers' but the interpreter's own
            return torch.zeros(shape, dtype=dtype or like.dtype, **others)
        return guarded(shape[0] if isinstance(shape[0], tuple | list) else shape, dtype or like.dtype)

    expected = reference(x, upstream(x, torch.float32), normalize=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", new_empty)
        patch.setattr(torch, "empty_like", lambda like: guarded(like.shape, like.dtype))
        patch.setattr(torch, "empty", lambda size, *, dtype, device: guarded(size, dtype))
        actual = kernels(x, upstream(x, torch.float32), normalize=True, segment_length=segment_length)
    for memory, before, size in allocated:
        for guard in (slice(0, GUARD), slice(GUARD + size, None)):
            torch.testing.assert_close(memory[guard], before[guard], rtol=0, atol=0, equal_nan=True)
    assert len(allocated) >= 12
    assert_near(actual, expected, 1e-5)
