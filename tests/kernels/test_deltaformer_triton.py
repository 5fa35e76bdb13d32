"""The Deltaformer's Triton kernels against its chunked form in float64, on a CUDA device or in Triton's interpreter.

Without a device they run in a process of their own, for the interpreter is chosen when the kernels are imported:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_deltaformer_triton.py

Shapes: B batch, T tokens, H heads of w, G key/value heads, D and D_v their sizes, N documents.
"""

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import LAYOUTS, assert_equal, assert_near_or_zero
from torch import Tensor

from zoo.kernels.deltaformer import chunk
from zoo.kernels.deltaformer.schedule import Configuration, configuration

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 and a process of its own", allow_module_level=True)

from zoo.kernels.deltaformer.triton.launch import write_backward, write_forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEAVES = ("w", "k", "v", "alpha", "beta")
KERNELS = (("softmax", 0), ("linear", 0), ("relu", 0), ("exp", 0), ("round", 0), ("round", 2))
BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3}
PIECES = (0, 1, 2, 63, 0, 64, 65, 0)
GUARD = 4096  # numbers before and after each tensor
FAR_AWAY = 1 << 30  # where no token stands
each_kernel = pytest.mark.parametrize(("kappa", "decimals"), KERNELS)
bounded_and_unbounded = pytest.mark.parametrize("kappa", ["softmax", "linear"])


def inputs(
    seq_len: int,
    kappa: str = "softmax",
    *,
    batch: int = 1,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (16, 20),
    dtype: torch.dtype = torch.float32,
    pieces: tuple[int, ...] | None = None,
    cos: float = 0.0,
    alpha: float | None = None,
    beta: float | None = None,
) -> dict[str, Any]:
    """Float64 leaves on the CPU that `dtype` can hold, or float32 alpha and beta; `pieces` are lengths of documents.

    w and k have the mean cosine `cos`. They are unit vectors where kappa has no bounds, and multiples of 1/64 for
    "relu" and "round", so that float32 and float64 fall on the same side of each boundary.
    """
    generator = torch.Generator().manual_seed(seq_len)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def alike(num_heads: int) -> Tensor:
        own = F.normalize(randn(batch, seq_len, num_heads, key_dim), dim=-1)
        y = F.normalize(cos**0.5 * common + (1 - cos) ** 0.5 * own, dim=-1)
        if kappa == "softmax":
            return key_dim**0.5 * y
        return (64 * y).round() / 64 if kappa in ("relu", "round") else y

    (num_heads, groups), (key_dim, value_dim) = heads, dims
    common = F.normalize(randn(1, 1, 1, key_dim), dim=-1)
    alphas, betas = torch.rand(2, batch, seq_len, num_heads, dtype=torch.float64, generator=generator)
    if kappa in ("exp", "round"):  # more would make u grow
        betas *= 0.2
    x: dict[str, Any] = {
        "w": alike(num_heads),
        "k": alike(groups),
        "v": randn(batch, seq_len, groups, value_dim),
        "alpha": alphas + 0.5 if alpha is None else torch.full_like(alphas, alpha),
        "beta": betas if beta is None else torch.full_like(betas, beta),
    }
    x = {name: y.to(dtype if name in "wkv" else torch.float32).double() for name, y in x.items()}
    if pieces is not None:
        x["cu_seqlens"] = torch.tensor([0, *pieces]).cumsum(0).int()
    return x


def upstream(x: dict[str, Any], dtype: torch.dtype = torch.float32) -> Tensor:
    """A gradient of u."""
    shape = *x["w"].shape[:3], x["v"].shape[3]
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).double()


def default_scale(x: dict[str, Any], kappa: str) -> float:
    """Of the logits, such that softmax prefers some keys, and "round" has more to round to than 0."""
    return {"softmax": 2 * x["w"].shape[3] ** -0.5, "round": 3.0}.get(kappa, 1.0)


def reference(
    x: dict[str, Any], grad_u: Tensor, kappa: str = "softmax", decimals: int = 0, scale: float | None = None
) -> dict[str, Tensor]:
    """u and the gradients of all leaves."""
    w, k, v, alpha, beta = (x[name] for name in LEAVES)
    scale = default_scale(x, kappa) if scale is None else scale
    nothing = v.new_empty(v.shape[0], 0, w.shape[2], v.shape[3])
    strips = chunk.Strips(w, k, None, x.get("cu_seqlens"), kappa, decimals, scale)
    u, lse = chunk.write_forward(strips, v, alpha, beta, nothing)
    grads = chunk.write_backward(strips, grad_u, v, alpha, beta, nothing, u, lse)
    return {"u": u, **dict(zip(LEAVES, grads[:5], strict=True))}


def kernels(
    x: dict[str, Any],
    grad_u: Tensor | None,
    kappa: str = "softmax",
    decimals: int = 0,
    scale: float | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    bounded: bool = True,
    view: Callable[[Tensor], Tensor] = lambda y: y,
    view_grad: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """The same from the launchers; without `grad_u` nothing is saved, and there are no gradients."""
    dtypes = [dtype] * 3 + [torch.float32] * 2
    w, k, v, alpha, beta = (view(x[name].to(DEVICE, each)) for name, each in zip(LEAVES, dtypes, strict=True))
    cu_seqlens = None if x.get("cu_seqlens") is None else x["cu_seqlens"].to(DEVICE)
    shared = w, k, v, alpha, beta, cu_seqlens
    options = kappa, decimals, default_scale(x, kappa) if scale is None else scale
    u, lse, inverse, rest = write_forward(*shared, *options, bounded=bounded, save=grad_u is not None)
    found: dict[str, Tensor] = {"u": u}
    if grad_u is not None:
        grad_u = (view_grad or view)(grad_u.to(DEVICE, dtype))
        found |= zip(LEAVES, write_backward(grad_u, *shared, u, lse, inverse, rest, *options), strict=True)
    assert [y.dtype for y in found.values()] == [dtype, *dtypes][: len(found)]
    return {name: y.double().cpu() for name, y in found.items()}


def check(
    x: dict[str, Any],
    kappa: str = "softmax",
    decimals: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    bound: float | None = None,
    scale: float | None = None,
    **options: Any,
) -> None:
    """u and every gradient."""
    grad_u = upstream(x, dtype)
    expected = reference(x, grad_u, kappa, decimals, scale)
    actual = kernels(x, grad_u, kappa, decimals, scale, dtype=dtype, **options)
    assert_near_or_zero(actual, expected, bound or BOUNDS[dtype])


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Configuration], Configuration]], None]:
    """Changes the configurations that the launchers get."""

    def configure(change: Callable[[Configuration], Configuration]) -> None:
        monkeypatch.setattr(
            "zoo.kernels.deltaformer.triton.launch.configuration", lambda *sizes: change(configuration(*sizes))
        )

    return configure


Configure = Callable[[Callable[[Configuration], Configuration]], None]


def in_groups(chosen: Configuration) -> Configuration:
    """With several groups of earlier blocks in a few hundred tokens."""
    return chosen._replace(ahead=1, at_once=2)


@pytest.fixture
def three_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes are worked on by threes, so that some remain."""
    monkeypatch.setattr("zoo.kernels.deltaformer.triton.launch._Run.together", lambda *_: 3)


@pytest.mark.parametrize("seq_len", [1, 2, 31, 33, 63, 64, 65, 127, 200])
@bounded_and_unbounded
def test_lengths(kappa: str, seq_len: int) -> None:
    check(inputs(seq_len, kappa, heads=(1, 1)), kappa)


@pytest.mark.parametrize("pieces", [None, PIECES], ids=["dense", "packed"])
@each_kernel
def test_kernels(kappa: str, decimals: int, pieces: tuple[int, ...] | None, configure: Configure) -> None:
    configure(in_groups)
    x = inputs(sum(PIECES), kappa, heads=(1, 1), pieces=pieces)
    if kappa == "round":
        logits = default_scale(x, kappa) * x["w"][0, :, 0] @ x["k"][0, :, 0].T
        assert logits.round(decimals=decimals).count_nonzero() > 0.01 * logits.numel()
    check(x, kappa, decimals)


@pytest.mark.parametrize(("ahead", "at_once"), [(1, 1), (2, 8), (3, 2), (8, 1)])
@pytest.mark.parametrize("pieces", [None, (20, 190, 20)], ids=["dense", "packed"])
def test_far_and_near_blocks(pieces: tuple[int, ...] | None, ahead: int, at_once: int, configure: Configure) -> None:
    configure(lambda chosen: chosen._replace(ahead=ahead, at_once=at_once))
    check(inputs(230, heads=(1, 1), pieces=pieces))


@pytest.mark.usefixtures("three_together")
@pytest.mark.parametrize(("batch", "heads"), [(1, (2, 1)), (1, (3, 3)), (2, (2, 2))])
def test_lanes_together(batch: int, heads: tuple[int, int]) -> None:
    check(inputs(70, batch=batch, heads=heads))


@pytest.mark.parametrize("dims", [(20, 24), (24, 20), (48, 16), (16, 48), (100, 1), (1, 100)])
@bounded_and_unbounded
def test_head_dims(kappa: str, dims: tuple[int, int]) -> None:
    check(inputs(70, kappa, dims=dims), kappa)


@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (4, 1)])
@bounded_and_unbounded
def test_grouped_heads(kappa: str, heads: tuple[int, int]) -> None:
    check(inputs(40, kappa, batch=2, heads=heads), kappa)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("kappa", ["softmax", "linear", "relu", "exp"])
def test_half_precision(kappa: str, bounded: bool, configure: Configure) -> None:
    configure(in_groups)
    x = inputs(260, kappa, heads=(1, 1), dims=(32, 48), dtype=torch.float16)
    check(x, kappa, dtype=torch.float16, bounded=bounded)


@pytest.mark.parametrize(("dtype", "index"), [(torch.float32, torch.int64), (torch.float16, torch.int32)])
def test_packed(dtype: torch.dtype, index: torch.dtype) -> None:
    x = inputs(sum(PIECES), pieces=PIECES, dtype=dtype)
    check(x | {"cu_seqlens": x["cu_seqlens"].to(index)}, dtype=dtype)


def test_packed_equals_each_alone(configure: Configure) -> None:
    configure(in_groups)
    x = inputs(sum(PIECES), pieces=PIECES)
    grad_u = upstream(x)
    whole = kernels(x, grad_u)
    for start, end in pairwise(x["cu_seqlens"].tolist()):
        if start == end:
            continue
        alone = kernels({name: x[name][:, start:end] for name in LEAVES}, grad_u[:, start:end])
        assert_equal({name: y[:, start:end] for name, y in whole.items()}, alone)


@bounded_and_unbounded
def test_a_document_does_not_reach_the_others(kappa: str) -> None:
    x = inputs(sum(PIECES), kappa, heads=(1, 1), pieces=PIECES)
    start, end = x["cu_seqlens"][5:7].tolist()
    other = x | {name: x[name].clone() for name in LEAVES}
    for name in LEAVES:
        other[name][:, start:end] = 0.25
    before, after = (kernels(y, upstream(x), kappa) for y in (x, other))
    for name, y in before.items():
        z = after[name]
        assert torch.equal(y[:, :start], z[:, :start]), name
        assert torch.equal(y[:, end:], z[:, end:]), name
        assert not torch.equal(y[:, start:end], z[:, start:end]), name


@pytest.mark.parametrize("pieces", [None, (3, 97)], ids=["dense", "packed"])
@bounded_and_unbounded
def test_slices_of_values(kappa: str, pieces: tuple[int, ...] | None, configure: Configure) -> None:
    def sliced(chosen: Configuration) -> Configuration:
        return chosen._replace(solve=chosen.solve._replace(block_v=16))

    configure(lambda chosen: sliced(in_groups(chosen)))
    check(inputs(100, kappa, dims=(16, 40), pieces=pieces), kappa)


@pytest.mark.parametrize("layout", ["transposed", "strided", "sliced", "misaligned"])
@pytest.mark.parametrize("batch", [1, 2])
def test_any_strides(layout: str, batch: int) -> None:
    check(inputs(40, batch=batch, heads=(4, 2)), view=LAYOUTS[layout])


def test_expanded_inputs() -> None:
    x = {name: y[:, :1].expand_as(y) for name, y in inputs(70).items()}
    check(x, view=lambda y: y[:, :1].expand_as(y), view_grad=torch.Tensor.contiguous)


def test_upstream_gradient_of_a_sum() -> None:
    """It is one number, for all of u."""
    x = inputs(40, batch=2)
    ones = torch.ones_like(upstream(x))

    def one_number(y: Tensor) -> Tensor:
        return torch.cat([y.flatten()[:1], torch.full_like(y, torch.nan).flatten()])[0].expand_as(y)

    assert_near_or_zero(kernels(x, ones, view_grad=one_number), reference(x, ones), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@bounded_and_unbounded
def test_tokens_that_read_nothing(kappa: str, dtype: torch.dtype) -> None:
    """Where beta is 0, u is alpha v, and w and k have no influence, up to the rounding of u."""
    x = inputs(70, kappa, dtype=dtype, beta=0.0)
    grad_u = upstream(x, dtype)
    found = kernels(x, grad_u, kappa, dtype=dtype)
    assert torch.equal(found["u"], (x["alpha"][..., None] * x["v"]).to(dtype).double())
    expected = reference(x, grad_u, kappa)
    assert expected["w"].count_nonzero() == expected["k"].count_nonzero() == 0
    assert_near_or_zero(found, expected, BOUNDS[dtype])


@pytest.mark.parametrize("beta", [1e-5, 1e-3])
def test_tokens_that_read_little(beta: float) -> None:
    """w and k have gradients of the size of beta, as exact as the others."""
    x = inputs(100, beta=beta)
    grad_u = upstream(x)
    expected = reference(x, grad_u)
    for name, y in kernels(x, grad_u).items():
        assert (y - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


@bounded_and_unbounded
def test_tokens_that_write_nothing(kappa: str) -> None:
    """Where alpha is 0, so is u, and only alpha has a gradient: each step that would multiply by u is an exact 0."""
    x = inputs(70, kappa, alpha=0.0)
    grad_u = upstream(x)
    found = kernels(x, grad_u, kappa)
    assert [name for name, y in found.items() if y.count_nonzero()] == ["alpha"]
    assert_near_or_zero(found, reference(x, grad_u, kappa), 1e-5)


@pytest.mark.parametrize("beta", [None, 1.0])
@pytest.mark.parametrize("cos", [0.99, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_alike(dtype: torch.dtype, cos: float, beta: float | None) -> None:
    """The gradient of w is then what is left where keys cancel each other, and the rounding of u to float16 counts."""
    bound = 1e-2 if dtype == torch.float16 and cos < 1 else None
    check(inputs(200, heads=(1, 1), dims=(32, 32), dtype=dtype, cos=cos, beta=beta), dtype=dtype, bound=bound)


@pytest.mark.parametrize("scale", [0.0, -2.0, 4.0])
@pytest.mark.parametrize("kappa", ["softmax", "exp"])
def test_scale(scale: float, kappa: str) -> None:
    x = inputs(70, kappa)
    x["beta"] = 0.01 * x["beta"] if kappa == "exp" else x["beta"]
    check(x, kappa, scale=scale / 2 if kappa == "exp" else scale)


def test_logits_that_leave_one_key() -> None:
    """Their exponentials overflow unless the largest is subtracted, and most weights are 0."""
    check(inputs(130), scale=30.0, bound=1e-3)


@pytest.mark.parametrize("pieces", [None, (3, 67)], ids=["dense", "packed"])
@bounded_and_unbounded
def test_saving_changes_no_number(kappa: str, pieces: tuple[int, ...] | None) -> None:
    x = inputs(70, kappa, pieces=pieces)
    saving = kernels(x, upstream(x), kappa)
    assert torch.equal(kernels(x, None, kappa)["u"], saving["u"])


def test_what_is_not_saved_takes_no_memory() -> None:
    x = inputs(70)
    w, k, v, alpha, beta = (x[name].to(DEVICE, torch.float32) for name in LEAVES)
    block = configuration(16, 20, torch.float32).block
    for save, sizes in ((False, [0, 0, 0]), (True, [140, 2 * -(-70 // block) * block**2, 2800])):
        u, *saved = write_forward(w, k, v, alpha, beta, None, "softmax", 0, 1.0, bounded=True, save=save)
        assert (u.shape, [x.numel() for x in saved]) == ((1, 70, 2, 20), sizes)


@pytest.mark.usefixtures("three_together")
@pytest.mark.parametrize("heads", [(2, 2), (2, 1)])
def test_rows_do_not_depend_on_the_batch(heads: tuple[int, int], configure: Configure) -> None:
    configure(in_groups)
    x = inputs(100, batch=2, heads=heads)
    grad_u = upstream(x)
    whole = kernels(x, grad_u)
    alone = kernels({name: y[1:2] for name, y in x.items()}, grad_u[1:2])
    assert_equal({name: y[1:2] for name, y in whole.items()}, alone)


@pytest.mark.parametrize(
    "pieces",
    [None, PIECES, (150, -20, 1 << 20), (150, 1 << 20, -20)],
    ids=["dense", "packed", "falling and too far", "too far and falling"],
)
@pytest.mark.parametrize("save", [True, False])
def test_stays_inside_its_memory(
    save: bool, pieces: tuple[int, ...] | None, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written beside the tensors that the launchers allocate, nor read from where nothing was written.

    Where ends are wrong, which nobody checks on a device, what is written where is not said, but no less inside.
    """
    configure(in_groups)
    x = inputs(sum(PIECES), pieces=pieces)
    allocated = []

    def guarded(shape: Any, dtype: torch.dtype) -> Tensor:
        shape = torch.Size(shape if isinstance(shape, tuple | list) else (shape,))
        nothing = torch.nan if dtype.is_floating_point else FAR_AWAY
        memory = torch.full((shape.numel() + 2 * GUARD,), nothing, dtype=dtype, device=DEVICE)
        allocated.append((memory, shape.numel()))
        return memory[GUARD : GUARD + shape.numel()].view(shape)

    def new_empty(like: Tensor, *shape: Any, dtype: torch.dtype | None = None, **others: Any) -> Tensor:
        if others:  # not the launchers' but the interpreter's own
            return torch.zeros(shape, dtype=dtype or like.dtype, **others)
        return guarded(shape[0] if isinstance(shape[0], tuple | list) else shape, dtype or like.dtype)

    grad_u = upstream(x)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", new_empty)
        patch.setattr(torch, "empty_like", lambda like: guarded(like.shape, like.dtype))
        actual = kernels(x, grad_u if save else None)
    for memory, size in allocated:
        around = torch.cat([memory[:GUARD], memory[GUARD + size :]])
        assert (around.isnan() | (around == FAR_AWAY)).all()
    tables = 0 if pieces is None else 1 + save  # of blocks, in each direction
    assert len(allocated) == (11 if save else 4) + tables
    if pieces in (None, PIECES):
        expected = reference(x, grad_u)
        assert_near_or_zero(actual, expected if save else {"u": expected["u"]}, 1e-5)
