"""The chunked delta rule against its token-by-token reference, forward and all gradients.

Shapes: B batch, T tokens, H query heads, G key/value heads, N documents (N = B unless packed).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_near
from torch import Tensor

from zoo.kernels.delta_rule import chunk_delta_rule, recurrent_delta_rule, step_delta_rule
from zoo.kernels.delta_rule.reference import delta_rule_reference

LEAVES = ("q", "k", "v", "beta", "g", "initial_state")
PER_TOKEN = LEAVES[:5]
PIECES = (1, 2, 63, 64, 65, 0, 130)
LENGTHS = [1, 2, 3, 63, 64, 65, 127, 129, 200, 513, 700, 1000]
each_decay = pytest.mark.parametrize("decay", [None, 0.05], ids=["plain", "gated"])


def inputs(
    seq_len: int,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 12),
    dtype: torch.dtype = torch.float64,
    pieces: tuple[int, ...] | None = None,
    cos: float = 0.0,
    beta: float | None = None,
    decay: float | None = None,
) -> dict[str, Any]:
    """Arguments with unit keys of mean cosine `cos`; `pieces` are the lengths of packed documents; g within -decay."""
    generator = torch.Generator().manual_seed(seq_len)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    (num_heads, groups), (key_dim, value_dim) = heads, dims
    batch, num_states = (batch, batch) if pieces is None else (1, len(pieces))
    common, own = (F.normalize(randn(batch, n, groups, key_dim), dim=-1) for n in (1, seq_len))
    betas = torch.rand(batch, seq_len, groups, dtype=torch.float64, generator=generator)
    x = {
        "q": randn(batch, seq_len, num_heads, key_dim),
        "k": F.normalize(cos**0.5 * common + (1 - cos) ** 0.5 * own, dim=-1),
        "v": randn(batch, seq_len, groups, value_dim),
        "beta": betas if beta is None else torch.full_like(betas, beta),
        "initial_state": randn(num_states, groups, key_dim, value_dim),
    }
    if decay is not None:
        x["g"] = -decay * torch.rand(batch, seq_len, groups, dtype=torch.float64, generator=generator)
    x = {name: value.to(dtype).requires_grad_() for name, value in x.items()}
    if pieces is not None:
        x["cu_seqlens"] = torch.tensor([0, *pieces]).cumsum(0).int()
    return x


def results(function: Callable[..., tuple[Tensor, Tensor]], x: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """o, the final state, and the gradients of a weighted sum of both for every leaf."""
    o, final_state = function(**x, **options)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in (o, final_state)]
    names = [name for name in LEAVES if x.get(name) is not None]
    loss = (o * weights[0]).sum() + (final_state * weights[1]).sum()
    grads = torch.autograd.grad(loss, [x[name] for name in names])
    return {"o": o, "final_state": final_state, **dict(zip(names, grads, strict=True))}


def without_state(x: dict[str, Any]) -> dict[str, Any]:
    return x | {"initial_state": None}


def present(x: dict[str, Any], names: tuple[str, ...] = LEAVES) -> dict[str, Tensor]:
    return {name: x[name] for name in names if name in x}


def as_dtype(x: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: y if name == "cu_seqlens" else y.detach().to(dtype).requires_grad_() for name, y in x.items()}


@pytest.mark.parametrize("function", [delta_rule_reference, chunk_delta_rule])
@pytest.mark.parametrize(("pieces", "with_state"), [(None, False), (None, True), ((1, 0, 65), True)])
@each_decay
def test_gradcheck(
    function: Callable[..., Any], pieces: tuple[int, ...] | None, with_state: bool, decay: float | None
) -> None:
    x = inputs(sum(pieces) if pieces else 5, heads=(2, 1), dims=(2, 3), pieces=pieces, decay=decay)
    leaves = present(x, LEAVES if with_state else PER_TOKEN)

    def call(*values: Tensor) -> tuple[Tensor, Tensor]:
        return function(**dict(zip(leaves, values, strict=True)), cu_seqlens=x.get("cu_seqlens"), scale=0.7)

    assert torch.autograd.gradcheck(call, tuple(leaves.values()), fast_mode=pieces is not None)


@pytest.mark.parametrize(("groups", "dims"), [(1, (48, 80)), (2, (100, 48)), (4, (80, 100))])
@pytest.mark.parametrize(
    ("seq_len", "decay"), [*((n, None) for n in LENGTHS), *((n, 0.05) for n in LENGTHS if n <= 200)]
)
def test_chunk_equals_reference(seq_len: int, decay: float | None, groups: int, dims: tuple[int, int]) -> None:
    x = inputs(seq_len, batch=1 + groups % 2, heads=(4, groups), dims=dims, decay=decay)
    expected = results(chunk_delta_rule, x, impl="reference")
    assert_near(results(chunk_delta_rule, x), expected, 1e-12)
    assert_near(results(chunk_delta_rule, as_dtype(x, torch.float32)), expected, 1e-5)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("cos", [0.99, 1.0])
def test_correlated_keys(cos: float, beta: float) -> None:
    x = inputs(200, heads=(2, 2), dims=(32, 32), cos=cos, beta=beta)
    expected = results(chunk_delta_rule, x, impl="reference")
    assert_near(results(chunk_delta_rule, x), expected, 1e-10)
    assert_near(results(chunk_delta_rule, as_dtype(x, torch.float32)), expected, 5e-5)  # 1e-4 without block recursion


@pytest.mark.parametrize("decay", [50.0, 1e4])
@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("pieces", [None, PIECES])
def test_strong_decay(decay: float, share: float, pieces: tuple[int, ...] | None) -> None:
    """Of all tokens or of a few: then what little the others forget must not drown in the sums of the strong."""
    x = inputs(sum(PIECES), pieces=pieces, decay=0.05)
    strong = torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(0)) < share
    x["g"] = x["g"].detach().masked_fill(strong, -decay).requires_grad_()
    expected = results(chunk_delta_rule, x, impl="reference")
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        actual = results(chunk_delta_rule, as_dtype(x, dtype))
        assert all(y.isfinite().all() for y in actual.values())
        assert_near(actual, expected, bound)


@torch.no_grad()
@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@each_decay
def test_steps_update_the_state_in_place(impl: str, dtype: torch.dtype, decay: float | None) -> None:
    x = as_dtype(inputs(9, decay=decay), dtype)
    state = x.pop("initial_state").to(torch.promote_types(dtype, torch.float32))
    expected = recurrent_delta_rule(**x, initial_state=state.clone(), scale=0.3, qk_l2norm=True)
    o = []
    for tensors in zip(*(y.split((1, 1, 7), 1) for y in x.values()), strict=True):
        piece: Any = dict(zip(x, tensors, strict=True))
        o.append(step_delta_rule(**piece, state=state, scale=0.3, qk_l2norm=True, impl=impl))
    torch.testing.assert_close((torch.cat(o, 1), state), expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_a_step_of_nothing_leaves_the_state_as_it_is() -> None:
    x = inputs(1, decay=0.05)
    state = x.pop("initial_state")
    before = state.clone()
    nothing: Any = x | {name: torch.zeros_like(x[name]) for name in ("beta", "g")}
    step_delta_rule(**nothing, state=state)
    assert torch.equal(state, before)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda state: state.float(), r"^state: expected contiguous torch.float64, got torch.float32 with strides"),
        (lambda state: state.mT.contiguous().mT, r"^state: expected contiguous torch.float64, got torch.float64 with"),
        (lambda state: state[:1], r"^state: expected \[N, G, d_k, d_v\]"),
    ],
    ids=["dtype", "strides", "shape"],
)
def test_states_that_a_step_cannot_update(change: Callable[[Tensor], Tensor], match: str) -> None:
    x = inputs(1)
    state = change(x.pop("initial_state"))
    with pytest.raises(ValueError, match=match):
        step_delta_rule(**x, state=state)


@pytest.mark.parametrize("function", [chunk_delta_rule, recurrent_delta_rule])
@pytest.mark.parametrize("pieces", [None, PIECES])
def test_zero_g_is_none(function: Callable[..., Any], pieces: tuple[int, ...] | None) -> None:
    x = inputs(sum(PIECES), pieces=pieces)
    g = torch.zeros_like(x["beta"]).requires_grad_()
    actual = results(function, x | {"g": g})
    assert actual.pop("g").any()
    assert_near(actual, results(function, x), 1e-12)


@pytest.mark.parametrize("function", [chunk_delta_rule, recurrent_delta_rule])
def test_decay_and_nothing_written(function: Callable[..., Any]) -> None:
    x = inputs(130, beta=0.0, decay=0.05)
    o, final_state = function(**x, scale=1.0)
    left = x["g"].cumsum(1).exp()[..., None, None] * x["initial_state"][:, None]
    torch.testing.assert_close(final_state, left[:, -1], rtol=1e-12, atol=1e-12)
    expected = (x["q"].unsqueeze(-2) @ left.repeat_interleave(2, 2)).squeeze(-2)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("function", [chunk_delta_rule, recurrent_delta_rule])
@each_decay
def test_l2_norm_inside_is_that_outside(function: Callable[..., Any], impl: str, decay: float | None) -> None:
    x = inputs(70, decay=decay)
    with torch.no_grad():
        for name in ("q", "k"):
            x[name] *= torch.arange(70, dtype=torch.float64)[:, None, None] * 1e-4  # from 0, about the epsilon

    def outside(q: Tensor, k: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        return function(q, k, **others, impl=impl)

    actual = results(function, x, qk_l2norm=True, impl=impl)
    assert all(y.isfinite().all() for y in actual.values())
    assert_near(actual, results(outside, x), 1e-12)


@each_decay
def test_zero_keys_have_finite_gradients(decay: float | None) -> None:
    x = inputs(70, decay=decay)
    x["k"] = torch.zeros_like(x["k"]).requires_grad_()
    actual = results(chunk_delta_rule, x)
    assert all(y.isfinite().all() for y in actual.values())
    assert_near(actual, results(chunk_delta_rule, x, impl="reference"), 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_decay
def test_half_precision_rounds_only_inputs_and_outputs(dtype: torch.dtype, decay: float | None) -> None:
    x = as_dtype(inputs(300, heads=(4, 2), dims=(64, 64), decay=decay), dtype)
    actual = results(chunk_delta_rule, x)
    assert [y.dtype for y in actual.values()] == [dtype, torch.float32, *[dtype] * len(x)]
    bound = torch.finfo(dtype).eps / 2  # one rounding of each result
    weights_rounded = results(chunk_delta_rule, as_dtype(x, torch.float64), impl="reference")
    assert_near({"o": actual["o"]}, {"o": weights_rounded["o"]}, bound)
    assert_near({"s": actual["final_state"]}, {"s": weights_rounded["final_state"]}, 1e-6)
    assert_near(actual, weights_rounded, 2 * bound)  # the upstream gradient is rounded too


@pytest.mark.parametrize("function", [chunk_delta_rule, recurrent_delta_rule])
@each_decay
def test_autocast_changes_no_number(function: Callable[..., Any], decay: float | None) -> None:
    x = as_dtype(inputs(70, decay=decay), torch.float32)
    mixed = {**x, "v": x["v"].detach().bfloat16().requires_grad_()}

    def under_autocast(**x: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(**x)

    expected = results(function, x)
    assert_near(results(under_autocast, x), expected, 0.0)
    if function is chunk_delta_rule:  # its backward is an op as well; that of plain PyTorch belongs outside autocast
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_near(results(function, x), expected, 0.0)
    assert under_autocast(**mixed)[0].dtype == torch.bfloat16


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: y.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda y: torch.stack([y, torch.full_like(y, torch.nan)], -1)[..., 0],
    "expanded": lambda y: y[:, :1].expand_as(y),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pieces", [None, (3, 67)])
@each_decay
def test_any_strides(layout: str, pieces: tuple[int, ...] | None, decay: float | None) -> None:
    x = inputs(70, pieces=pieces, decay=decay)
    views = {name: LAYOUTS[layout](y.detach()).requires_grad_() for name, y in present(x).items()}
    assert not any(y.is_contiguous() for y in views.values())
    copies = {name: y.detach().contiguous().requires_grad_() for name, y in views.items()}
    cu_seqlens = {"cu_seqlens": x["cu_seqlens"]} if pieces else {}
    assert_near(results(chunk_delta_rule, views | cu_seqlens), results(chunk_delta_rule, copies | cu_seqlens), 0.0)


@pytest.mark.parametrize("output", [0, 1], ids=["o", "final_state"])
@each_decay
def test_one_output_alone_and_an_expanded_upstream_gradient(output: int, decay: float | None) -> None:
    x = inputs(70, decay=decay)
    leaves = list(x.values())
    actual, expected = (
        torch.autograd.grad(chunk_delta_rule(**x, impl=impl)[output].sum(), leaves, materialize_grads=True)
        for impl in ("torch", "reference")
    )
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("function", [chunk_delta_rule, recurrent_delta_rule])
@each_decay
def test_packed_equals_separate(function: Callable[..., Any], decay: float | None) -> None:
    packed = inputs(sum(PIECES), pieces=PIECES, decay=decay)
    bounds = packed.pop("cu_seqlens")
    copies = {name: y.detach().requires_grad_() for name, y in packed.items()}

    def separate(initial_state: Tensor, **per_token: Tensor) -> tuple[Tensor, Tensor]:
        outputs, states = [], []
        for n, length in enumerate(PIECES):
            tokens, state = slice(int(bounds[n]), int(bounds[n + 1])), initial_state[n : n + 1]
            if length:
                o, state = function(**{name: y[:, tokens] for name, y in per_token.items()}, initial_state=state)
                outputs.append(o)
            states.append(state)
        return torch.cat(outputs, 1), torch.cat(states)

    expected = results(separate, copies)
    assert_near(results(function, packed | {"cu_seqlens": bounds}), expected, 1e-12)
    assert_near(results(function, packed | {"cu_seqlens": bounds.long()}), expected, 1e-12)
    _, final_state = function(**without_state(packed), cu_seqlens=bounds)
    assert not final_state[PIECES.index(0)].any()  # an empty document without a state ends with zero


@pytest.mark.parametrize("value", [2.0, torch.nan])
@each_decay
def test_a_document_does_not_reach_the_others(value: float, decay: float | None) -> None:
    x = as_dtype(inputs(sum(PIECES), pieces=PIECES, decay=decay), torch.float32)
    start, end = (int(i) for i in x["cu_seqlens"][3:5])
    changed = {name: y.detach().clone() if name in LEAVES else y for name, y in x.items()}
    for y in present(changed, PER_TOKEN).values():
        y[:, start:end] = value
    changed["initial_state"][3] = value
    changed = {name: y.requires_grad_() if name in LEAVES else y for name, y in changed.items()}
    before, after = results(chunk_delta_rule, x), results(chunk_delta_rule, changed)
    for name, y in before.items():
        y, z = (y, after[name]) if name in ("final_state", "initial_state") else (y[0], after[name][0])
        first, last = (3, 4) if len(y) == len(PIECES) else (start, end)
        assert torch.equal(y[:first], z[:first]), name
        assert torch.equal(y[last:], z[last:]), name
        assert not torch.equal(y[first:last], z[first:last]), name


@pytest.mark.parametrize("function", [chunk_delta_rule, recurrent_delta_rule])
@pytest.mark.parametrize("split", [1, 63, 64, 100, 149])
@each_decay
def test_split_with_carried_state(function: Callable[..., Any], split: int, decay: float | None) -> None:
    x = inputs(150, decay=decay)

    def in_two(initial_state: Tensor, **per_token: Tensor) -> tuple[Tensor, Tensor]:
        o, state = function(**{name: y[:, :split] for name, y in per_token.items()}, initial_state=initial_state)
        rest, state = function(**{name: y[:, split:] for name, y in per_token.items()}, initial_state=state)
        return torch.cat([o, rest], 1), state

    assert_near(results(in_two, x), results(function, x), 1e-12)


@pytest.mark.parametrize("token", [0, 63, 64, 100])
@each_decay
def test_causal(token: int, decay: float | None) -> None:
    x = inputs(130, dtype=torch.float32, decay=decay)
    changed = {name: y.detach().clone() for name, y in x.items()}
    for y in present(changed, PER_TOKEN).values():
        y[:, token] += 1
    before, after = chunk_delta_rule(**x)[0], chunk_delta_rule(**changed)[0]
    assert torch.equal(before[:, :token], after[:, :token])
    assert not torch.isclose(before[:, token:], after[:, token:]).all(-1).any()


@each_decay
def test_rows_do_not_depend_on_the_batch(decay: float | None) -> None:
    x = inputs(130, batch=5, dims=(32, 32), dtype=torch.float32, decay=decay)
    whole, again = chunk_delta_rule(**x), chunk_delta_rule(**x)
    for i in range(5):
        alone = chunk_delta_rule(**{name: y[i : i + 1] for name, y in x.items()})
        for y, y_again, y_alone in zip(whole, again, alone, strict=True):
            assert torch.equal(y, y_again)
            assert torch.equal(y[i : i + 1], y_alone)


def test_beta_zero_writes_nothing() -> None:
    x = inputs(130, beta=0.0)
    _, final_state = chunk_delta_rule(**x)
    assert torch.equal(final_state, x["initial_state"])
    o, final_state = chunk_delta_rule(**without_state(x))
    assert not o.any()
    assert not final_state.any()


def test_equal_keys_with_beta_one_overwrite() -> None:
    x = inputs(130, heads=(2, 2), cos=1.0, beta=1.0)
    o, _ = chunk_delta_rule(**x | {"q": x["k"]}, scale=1.0)  # each token reads what it has just written
    torch.testing.assert_close(o, x["v"], rtol=1e-10, atol=1e-10)
