"""The short convolution's Triton kernels against the reference, on a CUDA device or in Triton's interpreter.

Without a device they run in a process of their own, for the interpreter is chosen when the kernels are imported:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_short_convolution_triton.py

Shapes: B batch, T tokens, C channels, K taps.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_near
from torch import Tensor

from zoo.kernels.short_convolution.reference import short_convolution_reference

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 and a process of its own", allow_module_level=True)

from zoo.kernels.short_convolution.triton.launch import convolution_backward, convolution_forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEAVES = ("x", "weight", "bias")
BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3}
PIECES = (1, 2, 3, 64, 1, 70)


def inputs(
    seq_len: int,
    *,
    size: int = 4,
    channels: int = 16,
    batch: int = 2,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    pieces: tuple[int, ...] | None = None,
) -> dict[str, Tensor]:
    """Float64 leaves on the CPU that `dtype` can hold, and the upstream gradient; `pieces` are packed documents'."""
    generator = torch.Generator().manual_seed(seq_len)
    shapes = {"x": (batch, seq_len, channels), "weight": (size, channels), "bias": (channels,)}
    shapes["grad_y"] = shapes["x"]
    found = {name: torch.randn(shape, generator=generator).to(dtype).double() for name, shape in shapes.items()}
    if not bias:
        del found["bias"]
    found |= {name: found[name].requires_grad_() for name in LEAVES if name in found}
    if pieces is not None:
        found["positions"] = torch.cat([torch.arange(piece) for piece in pieces])[None]
    return found


def reference(x: dict[str, Tensor], *, silu: bool = True) -> dict[str, Tensor]:
    """y, and the gradients of all leaves, by autograd."""
    y = short_convolution_reference(x["x"], x["weight"], x.get("bias"), x.get("positions"), silu=silu)
    leaves = {name: x[name] for name in LEAVES if name in x}
    grads = torch.autograd.grad(y, list(leaves.values()), x["grad_y"])
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def kernels(
    x: dict[str, Tensor],
    *,
    silu: bool = True,
    dtype: torch.dtype = torch.float32,
    view: Callable[[Tensor], Tensor] = lambda y: y,
    view_grad: Callable[[Tensor], Tensor] | None = None,
    widths: list[int] | None = None,
) -> dict[str, Tensor]:
    """The same from the launchers."""
    given = {name: y.detach().to(DEVICE) for name, y in x.items()}
    given = {name: y.to(dtype) if y.is_floating_point() else y for name, y in given.items()}
    tensors = view(given["x"]), given["weight"], given.get("bias"), given.get("positions")
    widths = [x["x"].shape[2]] if widths is None else widths
    parts = convolution_forward(*tensors, widths, silu=silu)
    grad_parts = (view_grad or view)(given["grad_y"]).split(widths, -1)
    grads = convolution_backward(list(grad_parts), *tensors, silu=silu)
    assert [list(y.shape) for y in parts] == [[*x["x"].shape[:2], width] for width in widths]
    assert all(z.is_contiguous() and z.dtype == dtype for z in (*parts, *grads))
    assert all(z.untyped_storage().nbytes() == z.nbytes for z in (*parts, *grads))
    assert grads[2].shape == (given["bias"].shape if "bias" in x else (0,))
    found = {"y": torch.cat(parts, -1)} | {name: grad for name, grad in zip(LEAVES, grads, strict=True) if name in x}
    return {name: z.double().cpu() for name, z in found.items()}


def check(x: dict[str, Tensor], *, silu: bool = True, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Forward and every gradient."""
    assert_near(kernels(x, silu=silu, dtype=dtype, **options), reference(x, silu=silu), BOUNDS[dtype])


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 63, 64, 65, 130, 200])
def test_lengths(seq_len: int) -> None:
    check(inputs(seq_len))


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_taps(size: int, bias: bool, silu: bool) -> None:
    check(inputs(45, size=size, bias=bias, batch=3), silu=silu)


@pytest.mark.parametrize("size", [4, 7])
@pytest.mark.parametrize("channels", [1, 16, 100, 200, 300])
def test_channels(channels: int, size: int) -> None:
    check(inputs(9, channels=channels, size=size))


@pytest.mark.parametrize("widths", [[1, 2, 297], [256, 44], [150, 0, 150], [0, 300, 0], [128, 128, 44]])
def test_parts(widths: list[int]) -> None:
    check(inputs(70, channels=300), widths=widths)


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("silu", [False, True])
def test_packed(size: int, silu: bool) -> None:
    check(inputs(sum(PIECES), size=size, batch=1, pieces=PIECES), silu=silu)


@pytest.mark.parametrize("seq_len", [40, 200])
def test_a_document_that_goes_on(seq_len: int) -> None:
    """Nothing stands before x, whatever its first positions are."""
    x = inputs(seq_len, batch=1)
    x["positions"] = torch.arange(100, 100 + seq_len)[None]
    check(x, view=lambda y: torch.cat([torch.full_like(y, torch.nan), y], 1)[:, seq_len:])


@pytest.mark.parametrize("pieces", [None, (3, 62)])
def test_half_precision(pieces: tuple[int, ...] | None) -> None:
    x = inputs(65, batch=1, pieces=pieces, dtype=torch.float16)
    check(x, dtype=torch.float16)


def test_parameters_of_other_dtypes() -> None:
    """As under autocast."""
    x = inputs(20, dtype=torch.float16)
    given = {name: y.detach().to(DEVICE, torch.float16 if name in ("x", "grad_y") else None) for name, y in x.items()}
    tensors = given["x"], given["weight"].float(), given["bias"].bfloat16(), None
    x["bias"] = tensors[2].double().cpu().requires_grad_()
    (y,) = convolution_forward(*tensors, [16], silu=True)
    grads = convolution_backward([given["grad_y"]], *tensors, silu=True)
    assert [z.dtype for z in (y, *grads)] == [torch.float16, torch.float16, torch.float32, torch.bfloat16]
    actual = {name: z.double().cpu() for name, z in zip(("y", *LEAVES), (y, *grads), strict=True)}
    assert_near(actual, reference(x), 5e-3)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced": lambda y: torch.cat([y.new_full((*y.shape[:2], 5), torch.nan), y, y], -1)[..., 5 : 5 + y.shape[2]],
    "transposed": lambda y: y.mT.contiguous().mT,
    "strided": lambda y: torch.stack([y, torch.full_like(y, torch.nan)], -1)[..., 0],
    "cut": lambda y: torch.cat([y, torch.full_like(y, torch.nan)], 1)[:, : y.shape[1]],
    "misaligned": lambda y: torch.cat([y.new_full((1,), torch.nan), y.flatten()])[1:].view_as(y),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seq_len", [1, 20])
def test_any_strides(layout: str, seq_len: int) -> None:
    check(inputs(seq_len), view=LAYOUTS[layout])


def test_upstream_gradient_of_a_sum() -> None:
    x = inputs(20)
    x["grad_y"] = torch.ones_like(x["grad_y"])
    check(x, view_grad=lambda y: y[:1, :1, :1].expand_as(y))


def test_expanded_rows() -> None:
    x = inputs(20)
    x["x"] = x["x"].detach()[:1, :1].expand_as(x["x"]).requires_grad_()
    check(x, view=lambda y: y[:1, :1].expand_as(y), view_grad=lambda y: y)


def test_a_document_does_not_reach_the_others() -> None:
    x = inputs(sum(PIECES), batch=1, pieces=PIECES)
    start, end = 6, 70
    spoilt = x | {name: x[name].detach().clone() for name in ("x", "grad_y")}
    for name in ("x", "grad_y"):
        spoilt[name][:, start:end] = torch.nan
    before, after = kernels(x), kernels(spoilt)
    for name in ("y", "x"):
        for tokens in (slice(0, start), slice(end, None)):
            assert torch.equal(before[name][:, tokens], after[name][:, tokens]), name


def test_a_row_does_not_reach_the_others() -> None:
    x = inputs(50, batch=3)
    spoilt = x | {name: x[name].detach().clone() for name in ("x", "grad_y")}
    for name in ("x", "grad_y"):
        spoilt[name][1] = torch.nan
    before, after = kernels(x), kernels(spoilt)
    for name in ("y", "x"):
        assert torch.equal(before[name][::2], after[name][::2]), name
