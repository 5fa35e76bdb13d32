"""The Deltaformer's Triton kernels on a CUDA device: equal to float64, bit-identical, compiled, in little memory.

Shapes: B batch, T tokens, H heads of w, G key/value heads, D and D_v their sizes.
"""

import importlib
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from half_precision import half_write
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from zoo.kernels.deltaformer import deltaformer_write
from zoo.kernels.deltaformer.schedule import Configuration, configuration

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


DEVICE = "cuda"
KERNELS = [("softmax", 0), ("linear", 0), ("relu", 0), ("exp", 0), ("round", 0), ("round", 2)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LEAVES: tuple[str, ...] = ("w", "k", "v", "alpha", "beta")
PIECES = (1, 63, 64, 65, 1000)
SIZES = (16, 32, 64, 128, 256)
FLOAT32_BOUND = 1e-4
# What the errors may be, in those that rounding the exact results makes; or, but for softmax's u, of `half_write`.
ROUNDINGS = {"u": 1.5, "w": 3.0, "k": 3.0, "v": 3.0, "alpha": 3.0, "beta": 7.0}
IN_PYTORCH = 1.2


def inputs(
    seq_len: int,
    kappa1: str = "softmax",
    *,
    batch: int = 2,
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = BF16,
    pieces: tuple[int, ...] | None = None,
    cos: float = 0.0,
    size: float = 1.0,
    beta: float | None = None,
) -> dict[str, Any]:
    """Arguments; softmax's logits are of the size of `size`, w and k unit vectors where kappa1 has no bounds.

    The mean cosine of w and k is `cos`, and for "round" they are multiples of 1/64. `pieces` are the lengths of
    packed documents.
    """
    generator = torch.Generator(DEVICE).manual_seed(seq_len)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=DEVICE, generator=generator)

    def alike(num_heads: int) -> Tensor:
        own = F.normalize(randn(batch, seq_len, num_heads, key_dim), dim=-1)
        y = F.normalize(cos**0.5 * common + (1 - cos) ** 0.5 * own, dim=-1)
        return (64 * y).round() / 64 if kappa1 in ("relu", "round") else y

    (num_heads, groups), (key_dim, value_dim) = heads, dims
    common = F.normalize(randn(1, 1, 1, key_dim), dim=-1)
    alphas, betas = torch.rand(2, batch, seq_len, num_heads, device=DEVICE, generator=generator)
    if kappa1 in ("exp", "round"):  # more would make u grow
        betas *= 0.2
    length = key_dim**0.5 if kappa1 == "softmax" else 1.0
    x: dict[str, Any] = {
        "w": (length * size * alike(num_heads)).to(dtype),
        "k": (length * alike(groups)).to(dtype),
        "v": randn(batch, seq_len, groups, value_dim).to(dtype),
        "alpha": alphas + 0.5,
        "beta": betas if beta is None else torch.full_like(betas, beta),
    }
    x = {name: y.requires_grad_() for name, y in x.items()}
    if pieces is not None:
        x["cu_seqlens"] = torch.tensor([0, *pieces], device=DEVICE).cumsum(0).int()
    return x


def changed(x: dict[str, Any], change: Callable[[Tensor], Tensor], names: tuple[str, ...] = LEAVES) -> dict[str, Any]:
    """With new leaves in place of those named."""
    return x | {name: change(x[name].detach()).requires_grad_() for name in names}


def with_gradients(x: dict[str, Any], grad_u: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
    """u and the gradients of every leaf, in Triton unless `options` say otherwise."""
    options = {"impl": "triton"} | options
    u = deltaformer_write(**x, **options)
    grads = torch.autograd.grad(u, [x[name] for name in LEAVES], upstream(u) if grad_u is None else grad_u)
    return {"u": u.detach(), **dict(zip(LEAVES, grads, strict=True))}


def upstream(u: Tensor) -> Tensor:
    """A gradient of u that every dtype can hold."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    return torch.randn(u.shape, device=DEVICE, generator=generator).bfloat16().to(u)


def exact(x: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """The same in float64, from the values that x has in its own precision."""
    return with_gradients(changed(x, torch.Tensor.double), **options, impl="torch")


def in_half_precision(x: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """The same by `half_write`."""
    u = half_write(**x, **options)
    return {"u": u, **dict(zip(LEAVES, torch.autograd.grad(u, [x[name] for name in LEAVES], upstream(u)), strict=True))}


def assert_rounded(actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Every error a few times that of rounding the exact result to `dtype`; in float32 1e-4 of the result.

    Where the result is 0, it is compared with the largest one.
    """
    assert actual.keys() == expected.keys()
    largest = max(float(y.norm()) for y in expected.values())
    for name, y in expected.items():
        if y.norm() <= 1e-9 * largest:
            allowed = largest * (FLOAT32_BOUND if dtype == FP32 else torch.finfo(dtype).eps)
        elif dtype == FP32:
            allowed = FLOAT32_BOUND * float(y.norm())
        else:
            allowed = ROUNDINGS[name] * float((y.to(dtype).double() - y).norm())
        error = float((actual[name].double() - y).norm())
        assert error <= allowed, f"{name}: error {error:.1e} > {allowed:.1e}, of {float(y.norm()):.1e}"


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Every result within `bound` of the expected one, relative to its norm, or to the largest one where that is 0."""
    assert actual.keys() == expected.keys()
    largest = max(float(y.double().norm()) for y in expected.values())
    for name, y in expected.items():
        norm = float(y.double().norm())
        error = float((actual[name].double() - y.double()).norm()) / (norm if norm > 1e-9 * largest else largest)
        assert error <= bound, f"{name}: relative error {error:.1e} > {bound}"


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, y in expected.items():
        assert torch.equal(actual[name], y), name


def check(x: dict[str, Any]) -> None:
    """u and every gradient, with softmax."""
    assert_rounded(with_gradients(x), exact(x), x["v"].dtype)


def check_hard(x: dict[str, Any], **options: Any) -> None:
    """u and every gradient; all but softmax's u may also be about as far off as the same formulas in PyTorch."""
    dtype, actual, expected = x["v"].dtype, with_gradients(x, **options), exact(x, **options)
    if dtype != FP32:
        for name, y in in_half_precision(x, **options).items():
            error, allowed = (float((z.double() - expected[name]).norm()) for z in (actual[name], y))
            if error <= IN_PYTORCH * allowed and (name != "u" or options.get("kappa1", "softmax") != "softmax"):
                del actual[name], expected[name]
    assert_rounded(actual, expected, dtype)


@pytest.mark.parametrize("seq_len", [1, 2, 63, 64, 65, 127, 513, 700, 1000, 1537, 4097])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_lengths(dtype: torch.dtype, seq_len: int) -> None:
    check(inputs(seq_len, batch=max(2, 64 // seq_len), dtype=dtype))


@pytest.mark.parametrize(
    "dims",
    [*((dim, dim) for dim in (32, 48, 64, 80, 96, 100, 128, 256)), (48, 128), (256, 80)],
)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_head_dims(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    check(inputs(700, dims=dims, dtype=dtype))


@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (3, 3)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_grouped_heads(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    check(inputs(700, heads=heads, dtype=dtype))


@pytest.mark.parametrize("pieces", [None, (1, 0, 363, 336)], ids=["dense", "packed"])
@pytest.mark.parametrize(("kappa1", "round_decimals"), KERNELS)
def test_kernels_in_float32(kappa1: str, round_decimals: int, pieces: tuple[int, ...] | None) -> None:
    x = inputs(700, kappa1, batch=2 if pieces is None else 1, dtype=FP32, pieces=pieces)
    options = {"kappa1": kappa1, "round_decimals": round_decimals, "scale": 3.0 if kappa1 == "round" else None}
    assert_near(with_gradients(x, **options), exact(x, **options), FLOAT32_BOUND)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("kappa1", "round_decimals"), KERNELS[1:])
def test_kernels_in_half_precision(kappa1: str, round_decimals: int, dtype: torch.dtype) -> None:
    x = inputs(700, kappa1, dtype=dtype)
    check_hard(x, kappa1=kappa1, round_decimals=round_decimals, scale=3.0 if kappa1 == "round" else None)


@pytest.mark.parametrize("seq_len", [512, 1000, 2048])
@pytest.mark.parametrize("beta", [None, 1.0])
@pytest.mark.parametrize(
    ("size", "cos"), [(1.0, 0.0), (4.0, 0.0), (1.0, 0.5), (1.0, 1.0)], ids=["random", "large", "alike", "equal"]
)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_errors_are_those_of_rounding(
    dtype: torch.dtype, size: float, cos: float, beta: float | None, seq_len: int
) -> None:
    check_hard(inputs(seq_len, dims=(128, 128), dtype=dtype, size=size, cos=cos, beta=beta))


@pytest.mark.parametrize("beta", [0.0, 1e-3])
def test_tokens_that_read_little(beta: float) -> None:
    """w and k have then hardly a gradient, up to the rounding of u."""
    x = inputs(300, beta=beta)
    actual, expected = with_gradients(x), exact(x)
    largest = max(float(y.norm()) for y in expected.values())
    for name in ("w", "k"):
        assert float((actual[name].double() - expected[name]).norm()) <= torch.finfo(BF16).eps * largest
    few = ("u", "v", "alpha", "beta")
    assert_rounded({name: actual[name] for name in few}, {name: expected[name] for name in few}, BF16)


@pytest.mark.parametrize("batch_and_heads", [(1, 1), (1, 17), (3, 5), (64, 16)])
@pytest.mark.parametrize("seq_len", [65, 700])
def test_batches_and_heads(seq_len: int, batch_and_heads: tuple[int, int]) -> None:
    batch, heads = batch_and_heads
    check(inputs(seq_len, batch=batch, heads=(heads, heads)))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (100, 256)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_packed(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    check(inputs(sum(PIECES), batch=1, heads=(4, 2), dims=dims, pieces=PIECES, dtype=dtype))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_packed_equals_each_alone(dtype: torch.dtype) -> None:
    """Bit for bit, in a pack of its own."""
    x = inputs(sum(PIECES), batch=1, heads=(4, 2), pieces=PIECES, dtype=dtype)
    grad_u = torch.randn(1, sum(PIECES), 4, 64, device=DEVICE).to(dtype)
    whole = with_gradients(x, grad_u)
    for start, end in pairwise(x["cu_seqlens"].tolist()):
        alone = changed(x, lambda y, a=start, b=end: y[:, a:b].clone())
        alone["cu_seqlens"] = torch.tensor([0, end - start], device=DEVICE)
        assert_equal({name: y[:, start:end] for name, y in whole.items()}, with_gradients(alone, grad_u[:, start:end]))


def test_a_document_does_not_reach_the_others() -> None:
    x = inputs(sum(PIECES), batch=1, pieces=PIECES)
    start, end = x["cu_seqlens"][2:4].tolist()
    other = changed(x, torch.clone)
    with torch.no_grad():
        for name in LEAVES:
            other[name][:, start:end] = 0.25
    before, after = (with_gradients(y) for y in (x, other))
    for name, y in before.items():
        z = after[name]
        assert torch.equal(y[:, :start], z[:, :start]), name
        assert torch.equal(y[:, end:], z[:, end:]), name
        assert not torch.equal(y[:, start:end], z[:, start:end]), name


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_a_long_sequence(dims: tuple[int, int]) -> None:
    """Values of mean 1 make what is read large."""
    check(changed(inputs(65_536, batch=1, dims=dims, size=1.5), lambda y: y + 1, ("v",)))


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_more_numbers_than_int32_counts(packed: bool) -> None:
    """The last of 132 sequences is bit for bit what it is alone."""
    count, seq_len, heads, dim = 132, 1024, 128, 128
    assert count * seq_len * heads * dim > 2**31
    shape = (1, count * seq_len, heads) if packed else (count, seq_len, heads)
    generator = torch.Generator(DEVICE).manual_seed(0)
    sizes = {"w": (dim,), "k": (dim,), "v": (dim,), "alpha": (), "beta": (), "u": ()}

    def rand(*shape: int, half: bool) -> Tensor:
        return torch.rand(*shape, device=DEVICE, dtype=BF16 if half else FP32, generator=generator)

    x: dict[str, Any] = {name: rand(*shape, *sizes[name], half=sizes[name] != ()).requires_grad_() for name in LEAVES}
    grad_u = rand(*shape, dim, half=True)
    if packed:
        x["cu_seqlens"] = torch.arange(0, count * seq_len + 1, seq_len, device=DEVICE)
    whole = with_gradients(x, grad_u)

    def last(y: Tensor) -> Tensor:
        return (y[:, -seq_len:] if packed else y[-1:]).detach().clone()

    alone = changed(x, last)
    if packed:
        alone["cu_seqlens"] = x["cu_seqlens"][:2]
    assert_equal({name: last(y) for name, y in whole.items()}, with_gradients(alone, last(grad_u)))


def test_more_blocks_than_the_device_has_room_for() -> None:
    x = inputs(2048, batch=8, heads=(16, 16))
    programs = 8 * 16 * 2048 // configuration(64, 64, BF16).block
    assert programs > 16 * torch.cuda.get_device_properties(DEVICE).multi_processor_count
    check(x)


@pytest.mark.parametrize("pieces", [None, PIECES], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_two_runs_of_the_kernels_are_bit_identical(dtype: torch.dtype, pieces: tuple[int, ...] | None) -> None:
    x = inputs(sum(PIECES), batch=4 if pieces is None else 1, heads=(8, 4), dims=(128, 128), dtype=dtype, pieces=pieces)
    first = with_gradients(x)
    for _ in range(3):
        assert_equal(with_gradients(x), first)


@pytest.mark.parametrize(("seq_len", "heads"), [(100, (3, 3)), (1000, (6, 3)), (1000, (19, 19))])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype, seq_len: int, heads: tuple[int, int]) -> None:
    x = inputs(seq_len, batch=8, heads=heads, dtype=dtype)
    grad_u = torch.randn(8, seq_len, heads[0], 64, device=DEVICE).to(dtype)
    whole = with_gradients(x, grad_u)
    for i in range(8):
        alone = with_gradients(changed(x, lambda y, i=i: y[i : i + 1].clone()), grad_u[i : i + 1].clone())
        assert_equal(alone, {name: y[i : i + 1] for name, y in whole.items()})


def test_beside_a_busy_stream() -> None:
    """Programs that wait are never those that hold the device while others of their launch find no room."""
    x = inputs(2048, batch=4, heads=(8, 8))
    expected = with_gradients(x)
    matrix = torch.randn(8192, 8192, dtype=BF16, device=DEVICE)
    product = torch.empty_like(matrix)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(other):
            for _ in range(20):
                torch.mm(matrix, matrix, out=product)
        actual = with_gradients(x)
        with torch.cuda.stream(other):
            for _ in range(20):
                torch.mm(matrix, matrix, out=product)
        assert_equal(actual, expected)
    torch.cuda.synchronize()


def distinct_configurations() -> list[tuple[torch.dtype, tuple[int, int]]]:
    """The dtypes and head dims that between them need every configuration there is."""
    found = []
    for dtype in (BF16, FP32):
        dims = {configuration(*each, dtype): each for each in ((a, b) for a in SIZES for b in SIZES)}
        found += [(dtype, each) for each in dims.values()]
    return found


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize(("dtype", "dims"), distinct_configurations(), ids=str)
def test_every_configuration(
    dtype: torch.dtype, dims: tuple[int, int], warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_warps(*sizes: Any) -> Configuration:
        chosen = configuration(*sizes)
        names = ("solve", "rows", "keys")
        return chosen._replace(**{name: getattr(chosen, name)._replace(warps=warps) for name in names})

    monkeypatch.setattr("zoo.kernels.deltaformer.triton.launch.configuration", with_warps)
    check(inputs(700, dims=dims, dtype=dtype))


@pytest.mark.parametrize(("ahead", "at_once"), [(1, 1), (1, 8), (2, 3), (8, 2), (100, 1)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_far_and_near_blocks(dtype: torch.dtype, ahead: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "zoo.kernels.deltaformer.triton.launch.configuration",
        lambda *sizes: configuration(*sizes)._replace(ahead=ahead, at_once=at_once),
    )
    check(inputs(1000, dtype=dtype))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: y.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda y: torch.stack([y, torch.full_like(y, torch.nan)], -1)[..., 0],
    "sliced": lambda y: torch.cat([torch.full_like(y[..., :1], torch.nan), y], -1)[..., 1:],
    "expanded": lambda y: y[:, :, :1].expand_as(y),
    "misaligned": lambda y: torch.cat([y.new_full((1,), torch.nan), y.flatten()])[1:].view_as(y),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("batch", "pieces"), [(1, None), (2, None), (1, (3, 147))], ids=["one", "two", "packed"])
def test_any_strides(layout: str, batch: int, pieces: tuple[int, ...] | None) -> None:
    views = changed(inputs(150, batch=batch, heads=(4, 2), pieces=pieces), LAYOUTS[layout])
    assert layout == "misaligned" or not views["k"].is_contiguous()
    check(views)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_of_upstream_gradients(layout: str) -> None:
    x = inputs(150, heads=(4, 2))
    view = LAYOUTS[layout](torch.randn(2, 150, 4, 64, dtype=BF16, device=DEVICE))
    assert_equal(with_gradients(x, view), with_gradients(x, view.clone(memory_format=torch.contiguous_format)))


def test_upstream_gradient_of_a_sum() -> None:
    x = inputs(150, heads=(4, 2))
    grads = torch.autograd.grad(deltaformer_write(**x, impl="triton").sum(), [x[name] for name in LEAVES])
    expected = with_gradients(x, torch.ones(2, 150, 4, 64, dtype=BF16, device=DEVICE))
    expected.pop("u")
    assert_equal(dict(zip(LEAVES, grads, strict=True)), expected)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_auto_is_triton(dtype: torch.dtype) -> None:
    x = inputs(70, dtype=dtype)
    assert_equal(with_gradients(x, impl="auto"), with_gradients(x))


def test_without_alpha_and_beta() -> None:
    x = changed(inputs(300), torch.ones_like, ("alpha", "beta"))
    given = [x[name] for name in ("w", "k", "v")]
    u = deltaformer_write(*given, impl="triton")
    expected = with_gradients(x)
    assert torch.equal(u, expected["u"])
    for grad, name in zip(torch.autograd.grad(u, given, upstream(u)), ("w", "k", "v"), strict=True):
        assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    x = inputs(300, heads=(4, 2), dtype=dtype)
    expected = with_gradients(x)
    with torch.autocast(DEVICE, BF16):
        assert_equal(with_gradients(x), expected)


@pytest.mark.parametrize("pieces", [None, PIECES], ids=["dense", "packed"])
def test_replays_of_a_cuda_graph(pieces: tuple[int, ...] | None) -> None:
    """Each replay counts its blocks anew, also where documents end elsewhere."""
    x = inputs(sum(PIECES), batch=1, heads=(4, 2), pieces=pieces)
    grad_u = upstream(with_gradients(x)["u"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = with_gradients(x, grad_u)
    for _ in range(3):
        with torch.no_grad():
            for name in LEAVES:
                x[name].copy_(x[name].flip(1))
        if pieces is not None:
            x["cu_seqlens"].copy_(torch.tensor([0, *pieces[::-1]], device=DEVICE).cumsum(0))
        graph.replay()
        assert_equal(actual, with_gradients(x, grad_u))


def test_without_gradients() -> None:
    x = inputs(300)
    with torch.no_grad():
        u = deltaformer_write(**x, impl="triton")
    assert torch.equal(u, with_gradients(x)["u"])


def test_what_the_kernels_do_not_take() -> None:
    x = inputs(70, dims=(260, 64))
    message = r"^impl: 'triton' needs D and D_v of at most 256, got 260 and 64$"
    with pytest.raises(ValueError, match=message):
        deltaformer_write(**x, impl="triton")
    assert_equal(with_gradients(x, impl="auto"), with_gradients(x, impl="torch"))
    x = inputs(70)
    prefix = {"prefix_k": x["k"].detach()[:, :5], "prefix_u": x["v"].detach()[:, :5]}
    with pytest.raises(ValueError, match=r"^impl: 'triton' needs a call without a prefix$"):
        deltaformer_write(**x, **prefix, impl="triton")
    assert torch.equal(deltaformer_write(**x, **prefix), deltaformer_write(**x, **prefix, impl="torch"))


@pytest.mark.parametrize("pieces", [None, (5, 0, 65)], ids=["dense", "packed"])
@pytest.mark.parametrize("kappa1", ["softmax", "linear"])
def test_ops_are_sound(kappa1: str, pieces: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # What no backward reads stays unwritten, and opcheck would compare it.
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    x = inputs(70, kappa1, batch=3 if pieces is None else 1, heads=(4, 2), dims=(16, 32), dtype=FP32, pieces=pieces)
    leaves, cu_seqlens = [x[name] for name in LEAVES], x.get("cu_seqlens")
    plain = [y.detach() for y in leaves]
    op, options = torch.ops.zoo.deltaformer_write_triton.default, (kappa1, 0, 0.3)
    torch.library.opcheck(op, (*leaves, cu_seqlens, *options, True))
    torch.library.opcheck(op, (*plain, cu_seqlens, *options, False))
    u, *saved = op(*leaves, cu_seqlens, *options, True)
    assert not any(y.requires_grad for y in saved)  # no gradient flows through what only the backward reads
    backward = torch.ops.zoo.deltaformer_write_triton_backward.default
    given = torch.randn_like(u), *plain, cu_seqlens, u.detach(), *saved
    torch.library.opcheck(backward, (*given, *options))


def compiled_kernels() -> int:
    """How many variants of the kernels Triton has compiled in this process, or loaded."""
    names = ("write", "solve", "gradients")
    modules = [importlib.import_module(f"zoo.kernels.deltaformer.triton.{name}") for name in names]
    kernels = {id(y): y for module in modules for y in vars(module).values() if hasattr(y, "device_caches")}
    return sum(len(cache[0]) for kernel in kernels.values() for cache in kernel.device_caches.values())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_one_graph_and_no_new_kernels_over_lengths(packed: bool) -> None:
    def arguments(seq_len: int) -> dict[str, Any]:
        pieces = (2, 0, 7, seq_len - 20, 11) if packed else None
        return inputs(seq_len, batch=1 if packed else 3, heads=(4, 2), dims=(32, 48), pieces=pieces)

    def loss(x: dict[str, Any]) -> Tensor:
        return deltaformer_write(**x).float().square().mean()

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
            leaves = [x[name] for name in LEAVES]
            actual, expected = compiled(x), loss(x)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0)
            grads = (torch.autograd.grad(y, leaves) for y in (actual, expected))
            compiled_grads, eager_grads = (dict(zip(LEAVES, y, strict=True)) for y in grads)
            assert_near(compiled_grads, eager_grads, 1e-2)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert compiled_kernels() == known


def test_what_is_kept_for_the_backward() -> None:
    """Beside inputs and u, for each token and head: a float32, a row of a block of 64 by 64, what u's rounding took."""
    seq_len, heads = 512, 4
    x = inputs(seq_len, heads=(heads, 2), dims=(128, 128))
    saved: list[Tensor] = []

    def keep(y: Tensor) -> Tensor:
        saved.append(y)
        return y

    with saved_tensors_hooks(keep, lambda y: y):
        u = deltaformer_write(**x, impl="triton")
    known = {y.untyped_storage().data_ptr() for y in (u, *x.values())}
    others = {y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in saved}
    assert u.untyped_storage().data_ptr() in others
    kept = sum(size for place, size in others.items() if place not in known)
    assert kept == (4 + 2 * 64 + 2 * 128) * 2 * seq_len * heads


def test_a_wait_without_end_is_an_error(tmp_path: Path) -> None:
    """In a process of its own, which the error leaves without a device."""
    script = tmp_path / "wait_for_nobody.py"
    script.write_text(WAIT_FOR_NOBODY)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout == "served\n", run.stderr
    assert run.returncode != 0
    assert "CUDA error" in run.stderr


WAIT_FOR_NOBODY = """
import torch
import triton
import triton.language as tl

from zoo.kernels.deltaformer.triton import dataflow
from zoo.kernels.deltaformer.triton.dataflow import wait

dataflow._LONGEST_WAIT = tl.constexpr(1000)


@triton.jit(do_not_specialize=["count", "done"])
def wait_kernel(published, count, done):
    wait(published, count, done)


published = torch.full((1,), 3, dtype=torch.int32, device="cuda")
wait_kernel[(1,)](published, 3, 0)
torch.cuda.synchronize()
print("served", flush=True)
wait_kernel[(1,)](published, 4, 0)
torch.cuda.synchronize()
"""
