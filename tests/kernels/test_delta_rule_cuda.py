"""The delta rule's Triton kernels on a CUDA device, against the chunked PyTorch form in float64.

Shapes: B batch, T tokens, H query heads, G key/value heads, N documents (N = B unless packed).
"""

import gc
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from comparing import LAYOUTS, assert_equal, assert_near, compiled_kernels
from torch import Tensor
from torch._dynamo.utils import counters

from zoo.kernels.delta_rule import chunk_delta_rule, recurrent_delta_rule
from zoo.kernels.delta_rule.schedule import Blocks, Configuration, configuration

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LEAVES = ("q", "k", "v", "beta", "g", "initial_state")
PER_TOKEN = LEAVES[:5]
BOUNDS = {BF16: 1e-2, FP16: 2e-3, FP32: 1e-4}
ROUNDING = 4e-3  # of bfloat16: two computations that differ by the order of sums
PIECES = (1, 2, 63, 64, 65, 1000)
SIZES = (16, 32, 64, 128, 256)
MODULES = ("chain", "cuts", "decays", "gradients", "prepare", "recurrent", "scan")  # with kernels


class Form(NamedTuple):
    decay: float | None
    normalize: bool


PLAIN, BOTH = Form(None, False), Form(0.05, True)
each_form = pytest.mark.parametrize("form", [PLAIN, BOTH], ids=["plain", "both"])


def inputs(
    seq_len: int,
    form: Form = PLAIN,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = BF16,
    pieces: tuple[int, ...] | None = None,
    cos: float = 0.0,
    beta: float | None = None,
) -> dict[str, Any]:
    """Arguments with keys of mean cosine `cos`, unit unless the kernel normalises; beta, g and the state in float32;
    `pieces` are the lengths of packed documents."""
    generator = torch.Generator(DEVICE).manual_seed(seq_len)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=DEVICE, generator=generator)

    (num_heads, groups), (key_dim, value_dim) = heads, dims
    batch, num_states = (batch, batch) if pieces is None else (1, len(pieces))
    common, own = (F.normalize(randn(batch, n, groups, key_dim), dim=-1) for n in (1, seq_len))
    betas, decays = torch.rand(2, batch, seq_len, groups, device=DEVICE, generator=generator)
    x: dict[str, Any] = {
        "q": randn(batch, seq_len, num_heads, key_dim).to(dtype),
        "k": ((1 + 2 * form.normalize) * F.normalize(cos**0.5 * common + (1 - cos) ** 0.5 * own, dim=-1)).to(dtype),
        "v": randn(batch, seq_len, groups, value_dim).to(dtype),
        "beta": betas if beta is None else torch.full_like(betas, beta),
        "initial_state": randn(num_states, groups, key_dim, value_dim).float(),
    }
    if form.decay is not None:
        x["g"] = -form.decay * decays
    x = {name: y.clone().requires_grad_() for name, y in x.items()}
    if pieces is not None:
        x["cu_seqlens"] = torch.tensor([0, *pieces], device=DEVICE).cumsum(0).int()
    return x


def present(x: dict[str, Any], names: tuple[str, ...] = LEAVES) -> dict[str, Tensor]:
    return {name: x[name] for name in names if x.get(name) is not None}


def changed(x: dict[str, Any], change: Callable[[Tensor], Tensor], names: tuple[str, ...] = LEAVES) -> dict[str, Any]:
    """With new leaves in place of those named."""
    return x | {name: change(y.detach()).requires_grad_() for name, y in present(x, names).items()}


def results(
    x: dict[str, Any], function: Callable[..., tuple[Tensor, Tensor]] = chunk_delta_rule, **options: Any
) -> dict[str, Tensor]:
    """o, the final state, and the gradients of every leaf through both."""
    o, final_state = function(**x, **{"impl": "triton"} | options)
    generator = torch.Generator(DEVICE).manual_seed(0)
    weights = [torch.randn(y.shape, device=DEVICE, generator=generator).bfloat16().to(y) for y in (o, final_state)]
    leaves = present(x)
    grads = torch.autograd.grad((o, final_state), list(leaves.values()), weights)
    return {"o": o.detach(), "final_state": final_state.detach(), **dict(zip(leaves, grads, strict=True))}


def exact(
    x: dict[str, Any], function: Callable[..., tuple[Tensor, Tensor]] = chunk_delta_rule, **options: Any
) -> dict[str, Tensor]:
    """The same in float64, from the values that x has in its own precision."""
    return results(changed(x, torch.Tensor.double), function, impl="torch", **options)


def check(x: dict[str, Any], form: Form, bound: float | None = None, **options: Any) -> None:
    """Forward and every gradient."""
    expected = exact(x, qk_l2norm=form.normalize)
    assert_near(results(x, qk_l2norm=form.normalize, **options), expected, bound or BOUNDS[x["v"].dtype])


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
    known = compiled_kernels("zoo.kernels.delta_rule.triton", MODULES)
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
    assert compiled_kernels("zoo.kernels.delta_rule.triton", MODULES) == known


@pytest.mark.parametrize("function", [chunk_delta_rule, recurrent_delta_rule])
def test_no_new_kernels_for_one_token_of_another_length(function: Callable[..., Any]) -> None:
    counts = []
    for seq_len in (70, 71, 90):
        x = changed(inputs(seq_len, batch=3), lambda y: y[:, -1:], PER_TOKEN)
        results(x, function)
        counts.append(compiled_kernels("zoo.kernels.delta_rule.triton", MODULES))
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
