"""How the delta rule's Triton kernels run on a CUDA device: bit-identical, compiled, in linear memory, at any size."""

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_equal, assert_near, compiled_kernels
from delta_rule_cases import (
    BF16,
    BOTH,
    DEVICE,
    FP32,
    LEAVES,
    PER_TOKEN,
    PIECES,
    PLAIN,
    ROUNDING,
    Form,
    changed,
    exact,
    inputs,
    present,
    results,
)
from torch import Tensor
from torch._dynamo.utils import counters

from zoo.kernels.delta_rule import chunk_delta_rule, recurrent_delta_rule, step_delta_rule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.usefixtures("give_memory_back")
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("heads_first", [False, True])
def test_offsets_beyond_32_bits(heads_first: bool, segments: int) -> None:
    if torch.cuda.mem_get_info()[0] < 100 * 2**30:
        pytest.skip("needs 100 GiB of free device memory")
    seq_len, num_heads, dim = 131_200, 128, 128
    assert seq_len * num_heads * dim > 2**31
    shape = (1, num_heads, seq_len, dim) if heads_first else (1, seq_len, num_heads, dim)
    q, k, v, grad_o = (torch.randn(shape, dtype=BF16, device=DEVICE) for _ in range(4))
    k /= k.norm(dim=-1, keepdim=True)
    if heads_first:
        q, k, v, grad_o = (y.transpose(1, 2) for y in (q, k, v, grad_o))
    beta = torch.rand(1, seq_len, num_heads, device=DEVICE)

    def run(select: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        leaves = [select(y).requires_grad_() for y in (q, k, v, beta)]
        o, _ = chunk_delta_rule(*leaves, segment_length=seq_len // segments, impl="triton")
        grads = torch.autograd.grad(o, leaves, select(grad_o))
        return {"o": o.detach(), **dict(zip("qkvb", grads, strict=True))}

    few = torch.tensor([0, 77, 127], device=DEVICE)
    whole = {name: y[:, :, few] for name, y in run(torch.detach).items()}
    alone = run(lambda y: y[:, :, few])
    assert_near(whole, alone, ROUNDING)
    last, last_alone = ({name: y[:, -1000:] for name, y in each.items()} for each in (whole, alone))
    assert_near(last, last_alone, ROUNDING)


@pytest.mark.usefixtures("give_memory_back")
def test_more_heads_than_a_grid_dimension() -> None:
    x = inputs(8, batch=7000, heads=(10, 10), dims=(16, 16))
    expected = exact(x)
    assert_near(results(x), expected, 1e-2)
    assert_near(results(x, recurrent_delta_rule), expected, 1e-2)


@pytest.mark.parametrize("pieces", [None, PIECES], ids=["dense", "packed"])
@pytest.mark.parametrize("segment_length", [None, 128, 5000])
def test_two_runs_are_bit_identical(segment_length: int | None, pieces: tuple[int, ...] | None) -> None:
    x = inputs(sum(PIECES), BOTH, heads=(4, 2), dims=(128, 128), pieces=pieces)
    first, second = (results(x, qk_l2norm=True, segment_length=segment_length) for _ in range(2))
    assert_equal(second, first)


@pytest.mark.parametrize("segment_length", [None, 256])
def test_rows_do_not_depend_on_the_batch(segment_length: int | None) -> None:
    x = inputs(1000, BOTH, batch=5, heads=(2, 1), dims=(128, 128))
    options: dict[str, Any] = {"qk_l2norm": True, "segment_length": segment_length}
    outputs = chunk_delta_rule(**x, **options, impl="triton")
    grads = torch.autograd.grad(outputs, list(x.values()), [torch.ones_like(y) for y in outputs])
    whole = dict(zip(("o", "final_state", *x), (*outputs, *grads), strict=True))
    for i in range(5):
        row = changed(x, lambda y, i=i: y[i : i + 1])
        outputs = chunk_delta_rule(**row, **options, impl="triton")
        grads = torch.autograd.grad(outputs, list(row.values()), [torch.ones_like(y) for y in outputs])
        alone = dict(zip(whole, (*outputs, *grads), strict=True))
        expected = {name: y[i : i + 1] for name, y in whole.items()}
        if segment_length is None:
            assert_near(alone, expected, 1e-2)
        else:
            assert_equal(alone, expected)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("segment_length", [None, 64, sys.maxsize])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_one_graph_and_no_new_kernels_over_lengths(packed: bool, segment_length: int | None) -> None:
    def arguments(seq_len: int) -> dict[str, Any]:
        pieces = (2, 0, 7, seq_len - 20, 11) if packed else None
        return inputs(seq_len, BOTH, batch=3, heads=(4, 2), dims=(32, 48), pieces=pieces)

    def loss(x: dict[str, Any]) -> Tensor:
        o, final_state = chunk_delta_rule(**x, qk_l2norm=True, segment_length=segment_length)
        return o.float().square().mean() + final_state.square().mean()

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
            leaves = present(x)
            actual, expected = compiled(x), loss(x)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0)
            grads = (torch.autograd.grad(y, list(leaves.values())) for y in (actual, expected))
            compiled_grads, eager_grads = (dict(zip(leaves, y, strict=True)) for y in grads)
            assert_near(compiled_grads, eager_grads, ROUNDING)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert compiled_kernels() == known


@pytest.mark.parametrize("function", [chunk_delta_rule, recurrent_delta_rule])
def test_no_new_kernels_for_one_token_of_another_length(function: Callable[..., Any]) -> None:
    counts = []
    for seq_len in (70, 71, 90):
        x = changed(inputs(seq_len, batch=3), lambda y: y[:, -1:], PER_TOKEN)
        results(x, function)
        counts.append(compiled_kernels())
    assert counts == counts[:1] * 3


@pytest.mark.usefixtures("fresh_compiler")
def test_decoding_is_one_graph() -> None:
    x: dict[str, Any] = {name: y.detach() for name, y in inputs(70, BOTH, batch=3, heads=(4, 2)).items()}
    compiled = torch.compile(recurrent_delta_rule, fullgraph=True)
    state, outputs = x.pop("initial_state"), []
    expected, last = chunk_delta_rule(**x, initial_state=state, qk_l2norm=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for t in range(70):
            token = {name: y[:, t : t + 1] for name, y in x.items()}
            o, state = compiled(**token, initial_state=state, qk_l2norm=True)
            outputs.append(o)
    assert_near({"o": torch.cat(outputs, 1), "s": state}, {"o": expected, "s": last}, 1e-2)


@pytest.mark.parametrize(
    ("form", "pieces", "state"), [(PLAIN, None, False), (BOTH, None, True), (BOTH, (5, 0, 65), True)]
)
@pytest.mark.parametrize("segment_length", [None, 64])
def test_ops_are_sound(
    form: Form,
    pieces: tuple[int, ...] | None,
    state: bool,
    segment_length: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What no backward reads stays unwritten, and opcheck would compare it.
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    x = inputs(70, form, batch=3, heads=(4, 2), dims=(16, 32), dtype=FP32, pieces=pieces)
    q, k, v, beta, g, initial_state, cu_seqlens = (x.get(name) for name in (*LEAVES, "cu_seqlens"))
    args = q, k, v, beta, g, initial_state if state else None, cu_seqlens
    plain = [None if y is None else y.detach() for y in args]
    op, options = torch.ops.zoo.chunk_delta_rule_triton.default, (0.3, form.normalize, segment_length)
    torch.library.opcheck(op, (*args, *options, True))
    torch.library.opcheck(op, (*plain, *options, False))
    o, final_state, *saved = op(*plain, *options, True)
    q, k, _, beta, g, _, cu_seqlens = plain
    upstream = torch.randn_like(o), torch.randn_like(final_state) if state else None
    backward = torch.ops.zoo.chunk_delta_rule_triton_backward.default
    torch.library.opcheck(backward, (*upstream, q, k, beta, g, cu_seqlens, *saved, *options))


@pytest.mark.parametrize(
    ("form", "pieces", "state"), [(PLAIN, None, False), (BOTH, None, True), (BOTH, (5, 0, 65), True)]
)
def test_the_recurrent_op_is_sound(form: Form, pieces: tuple[int, ...] | None, state: bool) -> None:
    x = inputs(70, form, batch=3, heads=(4, 2), dims=(16, 32), dtype=FP32, pieces=pieces)
    q, k, v, beta, g, initial_state, cu_seqlens = (x.get(name) for name in (*LEAVES, "cu_seqlens"))
    args = q, k, v, beta, g, initial_state if state else None, cu_seqlens, 0.3, form.normalize
    torch.library.opcheck(torch.ops.zoo.recurrent_delta_rule_triton.default, args)


@pytest.mark.parametrize("form", [PLAIN, BOTH])
def test_the_step_op_is_sound(form: Form) -> None:
    x = inputs(1, form, batch=3, heads=(4, 2), dims=(16, 32), dtype=FP32)
    q, k, v, beta, g, state = (None if y is None else y.detach() for y in (x.get(name) for name in LEAVES))
    args = q, k, v, beta, g, state, 0.3, form.normalize
    torch.library.opcheck(torch.ops.zoo.step_delta_rule_triton.default, args)


@torch.no_grad()
@pytest.mark.parametrize("form", [PLAIN, BOTH])
def test_steps_in_one_graph_update_the_state_in_place(form: Form) -> None:
    x = {name: y.detach() for name, y in inputs(20, form, batch=3, heads=(4, 2), dims=(16, 32), dtype=BF16).items()}
    state = x.pop("initial_state")
    options = {"scale": 0.3, "qk_l2norm": form.normalize}
    expected = recurrent_delta_rule(**x, initial_state=state.clone(), **options)
    place, call = state.data_ptr(), torch.compile(step_delta_rule, fullgraph=True)
    o = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(20):
            o.append(call(**{name: y[:, t : t + 1] for name, y in x.items()}, state=state, **options))
    torch.testing.assert_close((torch.cat(o, 1), state), expected, rtol=1e-2, atol=1e-2)
    assert state.data_ptr() == place


@torch.no_grad()
def test_a_copy_of_a_state_in_a_graph_is_one() -> None:
    """Made before a step updates the state, or after; also of rows in another order, and of two steps in a graph."""
    x = {name: y.detach() for name, y in inputs(1, PLAIN, batch=3, heads=(4, 2), dims=(16, 32), dtype=BF16).items()}
    state, order = x.pop("initial_state"), torch.tensor([2, 0, 1], device=DEVICE)

    def steps(state: Tensor, **x: Any) -> dict[str, Tensor]:
        found = {"before": state.clone(), "reordered": state[order]}
        found["first"] = step_delta_rule(**x, state=state)
        found["between"] = state.clone()
        found["second"] = step_delta_rule(**x, state=state)
        return found | {"third": step_delta_rule(**x, state=found["reordered"])}

    call, held, again = torch.compile(steps, fullgraph=True), state.clone(), state.clone()
    assert_equal(call(state=held, **x), steps(state=again, **x))
    assert torch.equal(held, again)


@pytest.mark.parametrize("function", [chunk_delta_rule, recurrent_delta_rule])
def test_autocast_with_mixed_dtypes(function: Callable[..., Any]) -> None:
    x = inputs(70, BOTH)
    mixed = changed(x, torch.Tensor.float, ("q", "k"))

    def under_autocast(**x: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast(DEVICE, dtype=BF16):
            return function(**x)

    actual = results(mixed, under_autocast, qk_l2norm=True)
    assert [actual[name].dtype for name in ("o", "q", "k", "v")] == [BF16, FP32, FP32, BF16]
    assert_near(actual, results(x, function, qk_l2norm=True), 0.0)


def peak_memory(seq_len: int) -> int:
    """Bytes that a forward and backward add to their inputs."""
    x = inputs(seq_len, batch=1, heads=(16, 16), dims=(128, 128))
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, final_state = chunk_delta_rule(**x, impl="triton")
    torch.autograd.grad(o.sum() + final_state.sum(), list(x.values()))
    return torch.cuda.max_memory_allocated() - before


def test_memory_is_linear_in_the_length() -> None:
    short, long = (peak_memory(seq_len) for seq_len in (8192, 16384))
    assert long < 2.3 * short
