"""The results of the Deltaformer's Triton kernels on a CUDA device: equal to float64."""

from itertools import pairwise

import pytest
import torch
from comparing import FLOAT32_BOUND, LAYOUTS, assert_equal, assert_near, assert_rounded
from configurations import distinct, with_warps
from deltaformer_cases import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    IN_PYTORCH,
    KERNELS,
    LEAVES,
    PIECES,
    changed,
    check,
    check_hard,
    exact,
    in_half_precision,
    inputs,
    upstream,
    with_gradients,
)

from zoo.kernels.deltaformer import deltaformer_write
from zoo.kernels.deltaformer.schedule import configuration

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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


@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (32, 48)])
@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (3, 3)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_grouped_heads(dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    check(inputs(700, heads=heads, dims=dims, dtype=dtype))


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


@pytest.mark.parametrize("beta", [-1.5, 0.0, 1e-5, 1e-3, 2.0])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_strengths(dtype: torch.dtype, beta: float) -> None:
    """Of tokens that read little, or more than there is."""
    check_hard(inputs(300, dtype=dtype, beta=beta))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (64, 256)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("beta", [0.99, 1.2, 2.0])
def test_a_chain(beta: float, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """Each token reads the one before it alone, so that u grows like beta^t; w and k have next to no gradients.

    A few rows count for most, after several roundings: as many as in the same formulas in PyTorch.
    """
    x = inputs(100 if beta < 2 else 48, batch=1, dims=dims, dtype=dtype, beta=beta)
    x["w"] = (2 * x["k"].detach().roll(1, 1)).requires_grad_()
    actual, expected = with_gradients(x), exact(x)
    assert all(y.isfinite().all() for y in actual.values())
    in_pytorch = expected if dtype == FP32 else in_half_precision(x)
    names = ("u", "v", "alpha", "beta")
    alternatives = {name: IN_PYTORCH * float((in_pytorch[name].double() - expected[name]).norm()) for name in names}
    actual, expected = ({name: y[name] for name in names} for y in (actual, expected))
    assert_rounded(actual, expected, dtype, alternatives)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (64, 256)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_bounds_that_nobody_knows(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    x = inputs(300, dims=dims, dtype=dtype)
    assert_rounded(with_gradients(x, bounded=False), exact(x), dtype)


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


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize(("dtype", "dims"), distinct(configuration), ids=str)
def test_every_configuration(
    dtype: torch.dtype, dims: tuple[int, int], warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure = with_warps(configuration, warps, "solve", "rows", "keys")
    monkeypatch.setattr("zoo.kernels.deltaformer.triton.launch.configuration", configure)
    for seq_len in (61, 700):
        check_hard(inputs(seq_len, dims=dims, dtype=dtype))


@pytest.mark.parametrize(("dtype", "dims"), distinct(configuration), ids=str)
def test_every_configuration_without_bounds(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """Packed, and with grouped heads."""
    x = inputs(381, "linear", batch=1, heads=(4, 2), dims=dims, dtype=dtype, pieces=(1, 0, 320, 60))
    assert_near(with_gradients(x, kappa1="linear"), exact(x, kappa1="linear"), FLOAT32_BOUND if dtype == FP32 else 1e-2)


@pytest.mark.parametrize(("ahead", "at_once"), [(1, 1), (1, 8), (2, 3), (8, 2), (100, 1)])
@pytest.mark.parametrize(("dtype", "dims"), [(BF16, (64, 64)), (BF16, (128, 256)), (FP32, (64, 64))])
def test_far_and_near_blocks(
    dtype: torch.dtype, dims: tuple[int, int], ahead: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "zoo.kernels.deltaformer.triton.launch.configuration",
        lambda *sizes: configuration(*sizes)._replace(ahead=ahead, at_once=at_once),
    )
    check(inputs(1000, dims=dims, dtype=dtype))


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
    grads = torch.autograd.grad(deltaformer_write(**x, bounded=True, impl="triton").sum(), [x[name] for name in LEAVES])
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
