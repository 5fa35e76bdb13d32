"""The Deltaformer's write and read against dense linear algebra and a token-by-token reference, with all gradients.

Shapes: B batch, T tokens, S tokens of a prefix, H heads of w or q, G key/value heads, H_u heads of u, D head dim,
D_v value dim, N documents.
"""

import gc
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from zoo.kernels.attention import attention
from zoo.kernels.delta_rule import chunk_delta_rule
from zoo.kernels.deltaformer import deltaformer_read, deltaformer_write

LEAVES: tuple[str, ...] = ("w", "k", "v", "alpha", "beta", "prefix_k", "prefix_u")
IMPLS = ("torch", "reference")
PIECES = (1, 2, 63, 64, 65, 0, 130)
SMOOTH = ("softmax", "linear", "relu", "exp")
KERNELS = (*((name, 0) for name in SMOOTH), ("round", 0), ("round", 2))
each_impl = pytest.mark.parametrize("impl", IMPLS)
each_kernel = pytest.mark.parametrize(("kappa", "decimals"), KERNELS)


def inputs(
    seq_len: int,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 12),
    prefix: int | None = None,
    lengths: tuple[int, ...] | None = None,
    pieces: tuple[int, ...] | None = None,
    cos: float = 0.0,
    beta: float | None = None,
    grid: int | None = 64,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Arguments of the write; w and k are unit vectors of mean cosine `cos`, `pieces` the lengths of packed documents.

    The entries of w and k are multiples of 1 / grid. Their products are then exact in float32 too, so that "round"
    falls on the same side of each boundary in every dtype and implementation.
    """
    generator = torch.Generator().manual_seed(seq_len)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def unit(length: int, num_heads: int) -> Tensor:
        own = F.normalize(randn(batch, length, num_heads, key_dim), dim=-1)
        y = F.normalize(cos**0.5 * common + (1 - cos) ** 0.5 * own, dim=-1)
        return y if grid is None else (y * grid).round() / grid

    (num_heads, groups), (key_dim, value_dim) = heads, dims
    batch = batch if pieces is None else 1
    common = F.normalize(randn(batch, 1, 1, key_dim), dim=-1)
    alphas, betas = torch.rand(2, batch, seq_len, num_heads, dtype=torch.float64, generator=generator)
    x = {
        "w": unit(seq_len, num_heads),
        "k": unit(seq_len, groups),
        "v": randn(batch, seq_len, groups, value_dim),
        "alpha": alphas + 0.5,
        "beta": betas if beta is None else torch.full_like(betas, beta),
    }
    if prefix is not None:
        x |= {"prefix_k": unit(prefix, groups), "prefix_u": randn(batch, prefix, num_heads, value_dim)}
    x = as_dtype(x, dtype)
    if lengths is not None:
        x["prefix_lengths"] = torch.tensor(lengths)
    if pieces is not None:
        x["cu_seqlens"] = torch.tensor([0, *pieces]).cumsum(0).int()
    return x


def as_dtype(x: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: y.detach().to(dtype).requires_grad_() if name in LEAVES else y for name, y in x.items()}


def leaves(x: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x[name] for name in LEAVES if name in x}


def results(function: Callable[..., Tensor], x: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """The function's result, and the gradients of a weighted sum of it for all that requires one."""
    y = function(**x, **options)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(y.dtype)
    differentiable = {name: z for name, z in x.items() if z is not None and z.requires_grad}
    grads = torch.autograd.grad((y * weights).sum(), list(differentiable.values()), materialize_grads=True)
    return {"result": y.detach(), **dict(zip(differentiable, grads, strict=True))}


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Every result within `bound` of the expected one, relative to its norm or a hundredth of the largest one."""
    assert actual.keys() == expected.keys()
    norms = {name: float(y.double().norm()) for name, y in expected.items()}
    for name, y in expected.items():
        error = float((actual[name].double() - y.double()).norm()) / max(norms[name], max(norms.values()) / 100, 1e-30)
        assert error <= bound, f"{name}: relative error {error:.1e} > {bound}"


def weigh(logits: Tensor, visible: Tensor, kappa: str, decimals: int) -> Tensor:
    """kappa of the visible logits and 0 elsewhere, in one formula each."""
    logits = torch.where(visible, logits, 0)
    powers, rounded = logits.exp() * visible, (logits * 10**decimals).round() / 10**decimals
    values = {
        "softmax": powers / powers.sum(-1, keepdim=True).clamp_min(1e-300),
        "linear": logits,
        "relu": torch.where(logits > 0, logits, 0),
        "exp": powers,
        "round": logits + (rounded - logits).detach(),
    }
    return values[kappa] * visible


def by_head(x: Tensor, num_heads: int) -> Tensor:
    """[B, T, any heads, d] to [B, H, T, d]."""
    return x[:, :, [h * x.shape[2] // num_heads for h in range(num_heads)]].transpose(1, 2)


def matrix(x: dict[str, Any], kappa: str, decimals: int = 0, scale: float | None = None) -> Tensor:
    """A [B, H, T, S + T]: kappa of each token and those before it, all at once."""
    w, k = x["w"], torch.cat([x["prefix_k"], x["k"]], 1) if "prefix_k" in x else x["k"]
    _, seq_len, num_heads, key_dim = w.shape
    key, token = torch.arange(k.shape[1]) - (k.shape[1] - seq_len), torch.arange(seq_len)[:, None]
    visible = (key < token)[None]
    if "prefix_lengths" in x:
        visible = visible & ((key >= 0) | (key < x["prefix_lengths"][:, None] + key[0])[:, None])
    if "cu_seqlens" in x:
        document = torch.arange(len(x["cu_seqlens"]) - 1).repeat_interleave(x["cu_seqlens"].diff())
        visible = visible & (document == document[:, None])
    factor: float = (key_dim**-0.5 if kappa == "softmax" else 1.0) if scale is None else scale
    return weigh(factor * by_head(w, num_heads) @ by_head(k, num_heads).mT, visible[:, None], kappa, decimals)


def dense(*, kappa1: str, round_decimals: int = 0, scale: float | None = None, **x: Any) -> Tensor:
    """U = (I + diag(beta) A)^-1 (diag(alpha) V - diag(beta) A_prefix U_prefix) as one solve."""
    num_heads, a = x["w"].shape[2], matrix(x, kappa1, round_decimals, scale)
    size = a.shape[-1] - a.shape[-2]
    alpha, beta = (x[name].transpose(1, 2)[..., None] for name in ("alpha", "beta"))
    written = alpha * by_head(x["v"], num_heads)
    if size:
        written = written - beta * (a[..., :size] @ by_head(x["prefix_u"], num_heads))
    return torch.linalg.solve(torch.eye(a.shape[-2]) + beta * a[..., size:], written).transpose(1, 2)


def assert_rounds_to_more_than_zero(x: dict[str, Any], kappa: str, decimals: int) -> None:
    """Else "round" would be right whatever it does."""
    if kappa == "round":
        assert matrix(x, kappa, decimals).count_nonzero() > 0.005 * x["w"].shape[1] ** 2


@each_kernel
@pytest.mark.parametrize("seq_len", [1, 2, 3, 16, 17, 63, 64, 65, 127, 129, 513, 700, 1000])
def test_chunk_equals_reference(seq_len: int, kappa: str, decimals: int) -> None:
    beta = 0.2 if kappa == "exp" else None  # more would make u grow
    x = inputs(seq_len, batch=1, heads=(2, 1), beta=beta, grid=64 if kappa == "round" else None)
    if seq_len > 60:
        assert_rounds_to_more_than_zero(x, kappa, decimals)
    expected = results(deltaformer_write, x, kappa1=kappa, round_decimals=decimals, impl="reference")
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        actual = results(deltaformer_write, as_dtype(x, dtype), kappa1=kappa, round_decimals=decimals, impl="torch")
        assert {y.dtype for y in actual.values()} == {dtype}
        assert_near(actual, expected, bound)


@each_kernel
@pytest.mark.parametrize(("groups", "dims"), [(1, (48, 80)), (2, (100, 48)), (4, (80, 100)), (2, (1, 1))])
def test_head_dims_and_groups(groups: int, dims: tuple[int, int], kappa: str, decimals: int) -> None:
    beta = 0.2 if kappa == "exp" else None  # more would make u grow
    x = inputs(129, batch=1 + groups % 2, heads=(4, groups), dims=dims, prefix=7, cos=0.3, beta=beta)
    assert_rounds_to_more_than_zero(x, kappa, decimals)
    expected = results(dense, x, kappa1=kappa, round_decimals=decimals)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        actual = results(deltaformer_write, as_dtype(x, dtype), kappa1=kappa, round_decimals=decimals)
        assert_near(actual, expected, bound)


@pytest.mark.parametrize("seq_len", [65, 513])
def test_long_keys_with_softmax(seq_len: int) -> None:
    x = inputs(seq_len, batch=1)
    for name in ("w", "k"):
        x[name] = (x[name].detach() * 8**0.5).requires_grad_()
    expected = results(deltaformer_write, x, impl="reference")
    assert_near(results(deltaformer_write, x, impl="torch"), expected, 1e-12)
    assert_near(results(deltaformer_write, as_dtype(x, torch.float32), impl="torch"), expected, 1e-5)


BEFORE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "packed": {"pieces": (1, 0, 36, 33)},
    "prefix": {"prefix": 37},
    "prefix of no tokens": {"prefix": 0},
    "prefix with lengths": {"prefix": 37, "lengths": (20, 0, 37)},
    "prefix of whole chunks": {"prefix": 128, "lengths": (63, 64, 65)},
}


@each_impl
@each_kernel
@pytest.mark.parametrize("before", BEFORE)
def test_equals_a_dense_solve(before: str, kappa: str, decimals: int, impl: str) -> None:
    for seq_len in (70,) if before == "packed" else (70, 1, 5):
        x = inputs(seq_len, batch=3, **BEFORE[before])
        options = {"kappa1": kappa, "round_decimals": decimals, "scale": 0.75}
        assert_near(results(deltaformer_write, x, impl=impl, **options), results(dense, x, **options), 1e-12)


@each_kernel
@pytest.mark.parametrize("seq_len", [513, 700, 1537])
def test_gradients_with_left_over_chunks(seq_len: int, kappa: str, decimals: int) -> None:
    x = inputs(seq_len, batch=1, heads=(1, 1), beta=0.2 if kappa == "exp" else None)
    assert_rounds_to_more_than_zero(x, kappa, decimals)
    expected = results(dense, x, kappa1=kappa, round_decimals=decimals)
    assert_near(results(deltaformer_write, x, kappa1=kappa, round_decimals=decimals), expected, 1e-12)


@each_impl
@pytest.mark.parametrize("kappa", SMOOTH)
@pytest.mark.parametrize(
    ("seq_len", "before"),
    [
        (5, {}),
        (5, {"pieces": (2, 0, 3)}),
        (5, {"prefix": 3, "lengths": (1, 3)}),
        (20, {}),
        (20, {"prefix": 3, "lengths": (0, 2)}),
        (67, {}),
        (67, {"pieces": (1, 0, 66)}),
        (67, {"prefix": 5}),
    ],
)
def test_gradcheck(seq_len: int, before: dict[str, Any], kappa: str, impl: str) -> None:
    x = inputs(seq_len, heads=(2, 1), dims=(3, 2), **before)

    def call(*args: Tensor) -> Tensor:
        changed: dict[str, Any] = x | dict(zip(leaves(x), args, strict=True))
        return deltaformer_write(**changed, kappa1=kappa, scale=0.7, impl=impl)

    assert torch.autograd.gradcheck(call, tuple(leaves(x).values()), fast_mode=seq_len > 5)


@each_impl
@pytest.mark.parametrize("decimals", [0, 2])
def test_round_has_the_gradient_of_linear_at_the_rounded_weights(decimals: int, impl: str) -> None:
    x = inputs(70, heads=(1, 1))
    assert_rounds_to_more_than_zero(x, "round", decimals)
    actual = results(deltaformer_write, x, kappa1="round", round_decimals=decimals, impl=impl)
    w, k, v, alpha, beta = (x[name].detach().flatten(2) for name in LEAVES[:5])
    a = ((w @ k.mT) * 10**decimals).round().tril(-1) / 10**decimals
    inverse = torch.linalg.inv(torch.eye(70) + beta * a)
    u = inverse @ (alpha * v)
    weights = torch.randn(2, 70, 1, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[:, :, 0]
    d_written = inverse.mT @ weights
    d_a = -(beta * d_written @ u.mT).tril(-1)
    expected = {
        "result": u,
        "w": d_a @ k,
        "k": d_a.mT @ w,
        "v": alpha * d_written,
        "alpha": (d_written * v).sum(-1),
        "beta": -(d_written * (a @ u)).sum(-1),
    }
    assert_near(actual, {name: y.view_as(actual[name]) for name, y in expected.items()}, 1e-12)


@each_impl
@each_kernel
def test_packed_equals_separate(kappa: str, decimals: int, impl: str) -> None:
    x = inputs(sum(PIECES), pieces=PIECES)
    bounds = x.pop("cu_seqlens")

    def separate(**x: Any) -> Tensor:
        documents = zip(*(y.split(PIECES, 1) for y in (x[name] for name in LEAVES[:5])), strict=True)
        return torch.cat([write(*document) for document in documents if document[0].shape[1]], 1)

    def write(*args: Tensor, **more: Any) -> Tensor:
        return deltaformer_write(*args, kappa1=kappa, round_decimals=decimals, impl=impl, **more)

    expected = results(separate, x)
    for cu_seqlens in (bounds, bounds.long()):
        packed = results(lambda cu_seqlens=cu_seqlens, **x: write(*x.values(), cu_seqlens=cu_seqlens), x)
        assert_near(packed, expected, 1e-12)


@each_impl
@pytest.mark.parametrize("kappa", SMOOTH)
def test_a_document_does_not_reach_the_others(kappa: str, impl: str) -> None:
    x = inputs(sum(PIECES), pieces=PIECES, dtype=torch.float32)
    start, end = (int(i) for i in x["cu_seqlens"][3:5])
    changed = {name: y.detach().clone() for name, y in x.items()}
    for name in LEAVES[:5]:
        changed[name][:, start:end] = 0.9 * changed[name][:, start:end] + 0.1
    before, after = (
        results(deltaformer_write, y, kappa1=kappa, impl=impl) for y in (x, as_dtype(changed, torch.float32))
    )
    for name, y in before.items():
        assert torch.equal(y[:, :start], after[name][:, :start]), name
        assert torch.equal(y[:, end:], after[name][:, end:]), name
        assert not torch.isclose(y[:, start:end], after[name][:, start:end]).all(), name


@each_impl
@each_kernel
@pytest.mark.parametrize("token", [0, 2, 63, 64, 100])
def test_strictly_causal(token: int, kappa: str, decimals: int, impl: str) -> None:
    x = {name: y.detach() for name, y in inputs(130, cos=0.5, dtype=torch.float32).items()}

    def after_change(*names: str) -> Tensor:
        changed = {name: y.clone() for name, y in x.items()}
        for name in names:
            changed[name][:, token] *= -1.5
        return deltaformer_write(**changed, kappa1=kappa, round_decimals=decimals, impl=impl)

    u, every, key, query = (after_change(*names) for names in ((), LEAVES[:5], ("k",), ("w",)))
    assert torch.equal(u[:, :token], every[:, :token])
    assert not torch.isclose(u[:, token], every[:, token]).all()
    assert torch.equal(u[:, : token + 1], key[:, : token + 1])
    assert not torch.isclose(u[:, token + 1 :], key[:, token + 1 :]).all()
    assert torch.equal(u[:, :token], query[:, :token])
    assert torch.isclose(u[:, token], query[:, token]).all() == (token == 0)


@each_impl
@each_kernel
@pytest.mark.parametrize("pieces", [(1, 149), (63, 87), (64, 86), (100, 50), (149, 1), (5, 1, 64, 37, 43)])
def test_split_with_a_prefix(pieces: tuple[int, ...], kappa: str, decimals: int, impl: str) -> None:
    """Gradients flow from the later pieces through prefix_k and prefix_u into the earlier ones."""
    x = inputs(sum(pieces))
    options: dict[str, Any] = {"kappa1": kappa, "round_decimals": decimals, "impl": impl}

    def in_pieces(**x: Tensor) -> Tensor:
        u = x["v"].new_empty(2, 0, 4, 12)
        for start, end in pairwise(accumulate(pieces, initial=0)):
            piece = {name: y[:, start:end] for name, y in x.items()}
            before = {"prefix_k": x["k"][:, :start], "prefix_u": u} if start else {}
            u = torch.cat([u, deltaformer_write(**piece, **before, **options)], 1)
        return u

    assert_near(results(in_pieces, x), results(deltaformer_write, x, **options), 1e-12)


@each_impl
@each_kernel
@pytest.mark.parametrize("seq_len", [1, 20, 70])
def test_rows_of_different_age(seq_len: int, kappa: str, decimals: int, impl: str) -> None:
    lengths = (0, 41, 63, 70)
    x = inputs(seq_len, batch=4, prefix=70, lengths=lengths)
    options: dict[str, Any] = {"kappa1": kappa, "round_decimals": decimals, "impl": impl}

    def each_alone(*, prefix_lengths: Tensor, **x: Tensor) -> Tensor:
        rows = [{name: y[i : i + 1] for name, y in x.items()} for i in range(4)]
        for row, length in zip(rows, prefix_lengths.tolist(), strict=True):
            row |= {name: row[name][:, :length] for name in ("prefix_k", "prefix_u")}
        return torch.cat([deltaformer_write(**row, **options) for row in rows])

    actual = results(deltaformer_write, x, **options)
    assert_near(actual, results(each_alone, x), 1e-12)
    short = x | {"prefix_lengths": x["prefix_lengths"].int()}
    assert_near(results(deltaformer_write, short, **options), actual, 0.0)


@each_impl
@each_kernel
@pytest.mark.parametrize("garbage", [-1e4, 3e38])
def test_slots_beyond_the_prefix_have_no_influence(garbage: float, kappa: str, decimals: int, impl: str) -> None:
    x = inputs(70, batch=3, prefix=37, lengths=(20, 0, 37), dtype=torch.float32)
    dirty = {name: y.detach().clone() for name, y in x.items()}
    absent = torch.arange(37) >= x["prefix_lengths"][:, None]
    for name in ("prefix_k", "prefix_u"):
        dirty[name][absent] = garbage
    options = {"kappa1": kappa, "round_decimals": decimals, "impl": impl}
    expected = results(deltaformer_write, x, **options)
    actual = results(deltaformer_write, as_dtype(dirty, torch.float32), **options)
    for name, y in expected.items():
        assert torch.equal(actual[name], y), name
    assert not any(actual[name][absent].any() for name in ("prefix_k", "prefix_u"))


@each_impl
def test_without_beta_it_is_attention(impl: str) -> None:
    x = inputs(130, beta=0.0)
    q = x.pop("w").detach().mul(3).requires_grad_()
    k, v, beta = x["k"], x["v"], x["beta"].detach()[:, :, :2]

    def through_the_write(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return deltaformer_read(q, k, deltaformer_write(k, k, v, beta=beta, impl=impl), kappa2="softmax")

    x = {"q": q, "k": k, "v": v}
    assert_near(results(through_the_write, x), results(attention, x), 1e-12)


@each_impl
def test_linear_with_one_beta_is_the_delta_rule(impl: str) -> None:
    x = inputs(130)
    x = {"q": x["w"], "k": x["k"], "v": x["v"], "beta": x["beta"].detach()[:, :, :2].requires_grad_()}

    def through_the_write(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        u = deltaformer_write(k, k, v, beta, beta, kappa1="linear", impl=impl)
        return deltaformer_read(q, k, u, kappa2="linear", scale=8**-0.5)

    assert_near(results(through_the_write, x), results(lambda **x: chunk_delta_rule(**x)[0], x), 1e-12)


@each_impl
@each_kernel
def test_first_token_and_defaults(kappa: str, decimals: int, impl: str) -> None:
    x = {name: y.detach() for name, y in inputs(20, heads=(2, 2), beta=1.0).items()}
    options = {"kappa1": kappa, "round_decimals": decimals, "impl": impl}
    u = deltaformer_write(**x, **options)
    assert torch.equal(u[:, 0], x["alpha"][:, 0, :, None] * x["v"][:, 0])
    scale = 8**-0.5 if kappa == "softmax" else 1.0
    assert torch.equal(u, deltaformer_write(**x, **options, scale=scale))
    assert not torch.isclose(u, deltaformer_write(**x, **options, scale=2 * scale)).all()
    ones = torch.ones_like(x["alpha"])
    expected = deltaformer_write(**x | {"alpha": ones, "beta": ones}, **options)
    assert torch.equal(deltaformer_write(x["w"], x["k"], x["v"], **options), expected)


def test_softmax_and_chunks_are_the_default() -> None:
    x = inputs(130)
    expected = deltaformer_write(**x, kappa1="softmax", round_decimals=0, impl="torch")
    assert torch.equal(deltaformer_write(**x), expected)
    assert torch.equal(deltaformer_write(**x, impl="auto"), expected)
    assert torch.equal(deltaformer_write(**x, kappa1="round"), deltaformer_write(**x, kappa1="round", round_decimals=0))
    assert not torch.equal(deltaformer_write(**x, impl="reference"), expected)  # or the comparisons here say nothing


@each_impl
def test_softmax_grows_by_one_value_a_token_at_most(impl: str) -> None:
    """The bound |u_t| <= (t + 1) max|v| (t from 0), and values that reach it: each token answers the one before it."""
    x = inputs(200, beta=1.0)
    u = deltaformer_write(x["w"], x["k"], x["v"], impl=impl)
    most = (torch.arange(200) + 1) * x["v"].abs().max()
    assert (u.abs().amax((0, 2, 3)) <= most).all()
    k = torch.eye(100)[None, :, None]
    signs = torch.ones(100).where(torch.arange(100) % 2 == 0, -1)
    u = deltaformer_write(k.roll(1, 1), k, signs.view(1, 100, 1, 1), scale=200.0, impl=impl)
    torch.testing.assert_close(u.flatten(), signs * (torch.arange(100) + 1))


@pytest.mark.parametrize("kappa", [*SMOOTH, "round"])
@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("cos", [0.99, 1.0])
def test_correlated_keys(cos: float, beta: float, kappa: str) -> None:
    """With one substitution over the whole chunk in place of block recursion the error of "linear" is 8e-5."""
    x = inputs(200, heads=(2, 2), dims=(32, 32), cos=cos, beta=beta / 4 if kappa == "exp" else beta, grid=None)
    x["w"] = x["k"].detach().clone().requires_grad_()
    expected = results(deltaformer_write, x, kappa1=kappa, impl="reference")
    assert_near(results(deltaformer_write, x, kappa1=kappa), expected, 1e-12)
    assert_near(results(deltaformer_write, as_dtype(x, torch.float32), kappa1=kappa), expected, 5e-5)


@each_kernel
@pytest.mark.parametrize("zero", [("w",), ("k",), ("w", "k"), ("prefix_k", "w", "k", "v")])
def test_zero_vectors_have_finite_gradients(zero: tuple[str, ...], kappa: str, decimals: int) -> None:
    x = inputs(70, prefix=5, beta=0.2, dtype=torch.float32)
    x |= {name: torch.zeros_like(x[name]).requires_grad_() for name in zero}
    options = {"kappa1": kappa, "round_decimals": decimals}
    actual = results(deltaformer_write, x, **options)
    assert all(y.isfinite().all() for y in actual.values())
    assert_near(actual, results(deltaformer_write, x, **options, impl="reference"), 1e-5)


@pytest.mark.parametrize(("scale", "bound"), [(100.0, 5e-4), (-100.0, 5e-4), (1e4, 0.1)])
def test_large_logits(scale: float, bound: float) -> None:
    """The log-sum-exp of logits near 1000 has an error of 1e-4 in float32, and so have the weights made from it."""
    x = {name: y for name, y in inputs(200, dims=(32, 12)).items() if name != "alpha"}
    for name in ("w", "k"):
        x[name] = (x[name].detach() * 32**0.5).float().double().requires_grad_()
    expected = results(deltaformer_write, x, scale=scale, impl="reference")
    assert_near(results(deltaformer_write, x, scale=scale), expected, 1e-9)
    actual = results(deltaformer_write, as_dtype(x, torch.float32), scale=scale)
    assert all(y.isfinite().all() for y in actual.values())
    assert_near(actual, expected, bound)


@each_impl
@each_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_only_inputs_and_outputs(
    dtype: torch.dtype, kappa: str, decimals: int, impl: str
) -> None:
    x = as_dtype(inputs(150, heads=(4, 2), dims=(48, 80), cos=0.3, beta=0.5, prefix=9), dtype)
    options = {"kappa1": kappa, "round_decimals": decimals, "impl": impl}
    actual = results(deltaformer_write, x, **options)
    assert {y.dtype for y in actual.values()} == {dtype}
    assert torch.equal(actual["result"], deltaformer_write(**as_dtype(x, torch.float32), **options).to(dtype))
    expected = results(deltaformer_write, as_dtype(x, torch.float64), **options)
    assert_near(actual, expected, 2 * torch.finfo(dtype).eps)  # the upstream gradient and the saved u are rounded too


@each_impl
def test_alpha_and_beta_keep_their_precision(impl: str) -> None:
    x = as_dtype(inputs(70), torch.bfloat16)
    x |= {name: (x[name].detach().float() + 1e-4).requires_grad_() for name in ("alpha", "beta")}
    actual = results(deltaformer_write, x, impl=impl)
    assert (actual["alpha"].dtype, actual["beta"].dtype) == (torch.float32, torch.float32)
    same = as_dtype(x, torch.float32)
    assert torch.equal(actual["result"], deltaformer_write(**same, impl=impl).bfloat16())


def test_mixed_dtypes_are_cast_to_that_of_v() -> None:
    dtypes = dict(zip(LEAVES, (torch.float64, torch.float16, torch.bfloat16, *[torch.float32] * 4), strict=True))
    x = {name: y.detach().to(dtypes[name]).requires_grad_() for name, y in inputs(70, prefix=9, grid=None).items()}
    actual = results(deltaformer_write, x)
    assert {name: actual[name].dtype for name in LEAVES} == dtypes
    cast = {name: y if name in ("alpha", "beta") else y.detach().bfloat16().requires_grad_() for name, y in x.items()}
    assert_near(actual, results(deltaformer_write, cast), 4e-3)  # gradients of k and w are rounded to other dtypes
    assert torch.equal(actual["result"], deltaformer_write(**cast))


@pytest.mark.parametrize("kappa", SMOOTH)
def test_autocast_changes_no_number(kappa: str) -> None:
    x = inputs(70, prefix=9, dtype=torch.float32)
    expected = results(deltaformer_write, x, kappa1=kappa)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_near(results(deltaformer_write, x, kappa1=kappa), expected, 0.0)
        reference = deltaformer_write(**x, kappa1=kappa, impl="reference")
        read = deltaformer_read(x["w"], x["k"], x["v"], kappa2=kappa)
    assert torch.equal(reference, deltaformer_write(**x, kappa1=kappa, impl="reference"))
    assert torch.equal(read, deltaformer_read(x["w"], x["k"], x["v"], kappa2=kappa))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: y.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda y: torch.stack([y, torch.full_like(y, torch.nan)], -1)[..., 0],
    "expanded": lambda y: y[:, :1].expand_as(y),
    "expanded heads": lambda y: y[:, :, :1].expand_as(y),
}


@each_impl
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("before", [{"prefix": 7}, {"pieces": (3, 67)}, {"prefix": 7, "lengths": (0, 6)}])
def test_any_strides(before: dict[str, Any], layout: str, impl: str) -> None:
    x = inputs(70, **before)
    views = {name: LAYOUTS[layout](y.detach()).requires_grad_() for name, y in leaves(x).items()}
    assert not any(y.is_contiguous() for y in views.values())
    copies = {name: y.detach().contiguous().requires_grad_() for name, y in views.items()}
    actual, expected = (results(deltaformer_write, x | y, impl=impl) for y in (views, copies))
    assert_near(actual, expected, 0.0)


@pytest.mark.parametrize("before", [{"prefix": 7}, {"pieces": (3, 67)}])
def test_an_expanded_upstream_gradient(before: dict[str, Any]) -> None:
    x = inputs(70, **before)
    actual, expected = (
        torch.autograd.grad(deltaformer_write(**x, impl=impl).sum(), list(leaves(x).values())) for impl in IMPLS
    )
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kappa", SMOOTH)
def test_rows_do_not_depend_on_the_batch(kappa: str) -> None:
    x = inputs(130, batch=5, dims=(32, 32), prefix=9, lengths=(9, 0, 4, 8, 9), dtype=torch.float32)
    whole, again = (results(deltaformer_write, x, kappa1=kappa) for _ in range(2))
    assert all(torch.equal(y, again[name]) for name, y in whole.items())
    u, grads = whole["result"], torch.autograd.grad(deltaformer_write(**x, kappa1=kappa).sum(), x["v"])[0]
    for i in range(5):
        row = {name: y.detach()[i : i + 1] for name, y in x.items()}
        row["v"].requires_grad_()
        alone = deltaformer_write(**row, kappa1=kappa)
        grad = torch.autograd.grad(alone.sum(), row["v"])[0]
        assert_near({"u": alone.detach(), "v": grad}, {"u": u[i : i + 1], "v": grads[i : i + 1]}, 1e-6)


def memory_changes(x: dict[str, Any], backward: bool) -> list[int]:
    """Bytes taken and given back, in order, by the write and, if so asked, its gradients."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        u = deltaformer_write(**x)
        if backward:
            torch.autograd.grad(u.sum(), list(leaves(x).values()))
    records: Any = profiler.profiler
    return [event.nbytes() for event in records.kineto_results.events() if event.name() == "[memory]"]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("before", [{}, {"pieces": (300, 500)}])
def test_memory_is_linear_in_length(before: dict[str, Any], backward: bool) -> None:
    """The largest piece of memory is a strip [B, H, 64, T]; twice the length takes twice the memory at its peak."""
    peaks = []
    for seq_len in (800, 1600):
        pieces = tuple(n * seq_len // 800 for n in before["pieces"]) if before else None
        x = inputs(seq_len, batch=1, heads=(3, 1), pieces=pieces, dtype=torch.float32)
        changes = memory_changes(x, backward)
        assert max(changes) <= 3 * 64 * -(-seq_len // 64) * 64 * 4
        peaks.append(max(accumulate(changes)))
    assert 1.8 * peaks[0] < peaks[1] < 2.1 * peaks[0]


def read_inputs(
    seq_len: int, num_keys: int, heads: tuple[int, int, int] = (4, 2, 4), dims: tuple[int, int] = (8, 12)
) -> dict[str, Any]:
    """q, k and u of heads H, G and H_u, on the grid of `inputs`."""
    generator = torch.Generator().manual_seed(seq_len)
    shapes = {
        "q": (2, seq_len, heads[0], dims[0]),
        "k": (2, num_keys, heads[1], dims[0]),
        "u": (2, num_keys, heads[2], dims[1]),
    }
    x = {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()}
    x |= {name: F.normalize(x[name], dim=-1).mul(64).round() / 64 for name in ("q", "k")}
    return {name: y.requires_grad_() for name, y in x.items()}


def dense_read(q: Tensor, k: Tensor, u: Tensor, *, kappa2: str, scale: float, mask: Tensor, decimals: int) -> Tensor:
    logits = scale * by_head(q, q.shape[2]) @ by_head(k, q.shape[2]).mT
    return (weigh(logits, mask, kappa2, decimals) @ by_head(u, q.shape[2])).transpose(1, 2)


@each_kernel
@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 4), (4, 1, 2), (4, 4, 1), (6, 2, 3)])
@pytest.mark.parametrize("mask", ["default", "one", "per row"])
def test_read_equals_its_formula(mask: str, heads: tuple[int, int, int], kappa: str, decimals: int) -> None:
    num_keys = 37 if mask == "default" else 50
    x = read_inputs(37, num_keys, heads)
    visible = torch.rand(2 if mask == "per row" else 1, 1, 37, num_keys) < 0.5
    visible[:, :, 3] = False  # a token that sees nothing reads 0
    options: dict[str, Any] = {"kappa2": kappa, "round_decimals": decimals}
    if mask == "default":
        visible = torch.ones(1, 1, 37, 37).tril().bool()
    else:
        options["mask"] = visible
    for scale, given in ((8**-0.5 if kappa == "softmax" else 1.0, {}), (1.5, {"scale": 1.5})):
        expected = results(dense_read, x, kappa2=kappa, scale=scale, mask=visible, decimals=decimals)
        assert_near(results(deltaformer_read, x, **options, **given), expected, 1e-12)
        single = {name: y.detach().float().requires_grad_() for name, y in x.items()}
        assert_near(results(deltaformer_read, single, **options, **given), expected, 1e-5)
    assert mask == "default" or not deltaformer_read(**x, **options)[:, 3].any()


def test_read_rounds_straight_through() -> None:
    x = read_inputs(37, 37, (1, 1, 1))
    actual = results(deltaformer_read, x, kappa2="round")
    q, k, u = (x[name].detach().flatten(2) for name in "qku")
    weights = torch.randn(2, 37, 1, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[:, :, 0]
    a, d_a = (q @ k.mT).round().tril(), (weights @ u.mT).tril()
    assert a.any()
    expected = {"result": a @ u, "q": d_a @ k, "k": d_a.mT @ q, "u": a.mT @ weights}
    assert_near({name: y.flatten(2) for name, y in actual.items()}, expected, 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_read_takes_any_strides(layout: str) -> None:
    views: dict[str, Any] = {
        name: LAYOUTS[layout](y.detach()).requires_grad_() for name, y in read_inputs(37, 37).items()
    }
    copies = {name: y.detach().contiguous().requires_grad_() for name, y in views.items()}
    actual, expected = (results(deltaformer_read, x, kappa2="softmax") for x in (views, copies))
    assert_near(actual, expected, 0.0)
    assert deltaformer_read(**views, kappa2="softmax").is_contiguous()


@each_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_read_rounds_only_inputs_and_outputs(dtype: torch.dtype, kappa: str, decimals: int) -> None:
    x: dict[str, Any] = {name: y.detach().to(dtype) for name, y in read_inputs(37, 37, dims=(48, 80)).items()}
    same: dict[str, Any] = {name: y.float() for name, y in x.items()}
    for scale in (None, 1.3):
        o = deltaformer_read(**x, kappa2=kappa, round_decimals=decimals, scale=scale)
        expected = deltaformer_read(**same, kappa2=kappa, round_decimals=decimals, scale=scale)
        assert o.dtype == dtype
        assert torch.equal(o, expected.to(dtype))


def test_read_casts_mixed_dtypes_to_that_of_u() -> None:
    x = {name: y.detach() for name, y in read_inputs(37, 37).items()}
    x |= {"k": x["k"].half(), "u": x["u"].float()}
    o = deltaformer_read(**x, kappa2="linear")
    assert o.dtype == torch.float32
    assert torch.equal(o, deltaformer_read(**{name: y.float() for name, y in x.items()}, kappa2="linear"))


def swap_error(kappa: str, *, n: int = 64, dim: int = 512, swaps: int = 60, impl: str = "torch") -> float:
    """The largest error, over all swaps, of what n keys read after tokens k_a - k_b have swapped the values of a and b.

    A key finds its own value alone: kappa(k_a . k_i) is 1 for i = a and 0 for the others. The swap token takes from the
    memory what k_a - k_b finds, v_a - v_b, so it writes u = v_b - v_a under that key; to k_a, which sees it with weight
    1, this makes v_b of v_a, and to k_b, which sees it with weight -1, v_a of v_b.
    """
    names = F.normalize(torch.randn(n, dim), dim=-1)
    pairs = [torch.randperm(n)[:2].tolist() for _ in range(swaps)]
    k = torch.cat([names, *(names[a : a + 1] - names[b : b + 1] for a, b in pairs)])[None, :, None]
    v = torch.cat([torch.eye(n), torch.zeros(swaps, n)])[None, :, None]
    u = deltaformer_write(k, k, v, kappa1=kappa, scale=1.0, impl=impl)
    order, expected = list(range(n)), []
    for a, b in pairs:
        order[a], order[b] = order[b], order[a]
        expected.append(torch.eye(n)[order])
    written = torch.arange(n + swaps) < n + 1 + torch.arange(swaps).repeat_interleave(n)[:, None]
    q = names.repeat(swaps, 1)[None, :, None]
    o = deltaformer_read(q, k, u, kappa2=kappa, scale=1.0, mask=written[None, None])
    return float((o[0, :, 0] - torch.cat(expected)).abs().max())


@each_impl
def test_round_tracks_swaps_exactly(impl: str) -> None:
    assert swap_error("round", impl=impl) == 0
    assert swap_error("linear", impl=impl) > 0.1
