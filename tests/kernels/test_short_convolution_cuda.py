"""The short convolution's Triton kernels on a CUDA device, against plain PyTorch in float64.

Shapes: B batch, T tokens, C channels, K taps.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from zoo.kernels.short_convolution import ops, short_convolution

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {BF16: 1e-2, FP16: 2e-3, FP32: 1e-5}
PIECES = (1, 2, 3, 64, 930)


def inputs(
    seq_len: int,
    *,
    size: int = 4,
    channels: int = 3072,
    batch: int = 4,
    bias: bool = True,
    dtype: torch.dtype = BF16,
    pieces: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Arguments of `short_convolution`; x is part of a wider projection, `pieces` are packed documents' lengths."""
    batch = batch if pieces is None else 1
    generator = torch.Generator(DEVICE).manual_seed(seq_len)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator).to(dtype)

    x: dict[str, Any] = {"x": randn(batch, seq_len, channels + 128)[..., :channels], "weight": randn(size, channels)}
    if bias:
        x["bias"] = randn(channels)
    x = {name: y.requires_grad_() for name, y in x.items()}
    if pieces is not None:
        x["positions"] = torch.cat([torch.arange(piece, device=DEVICE) for piece in pieces])[None]
    return x


def results(x: dict[str, Any], **options: Any) -> list[Tensor]:
    """y, and the gradients of every leaf."""
    arguments: dict[str, Any] = {"impl": "triton", "activation": "silu"} | options
    y = torch.cat(short_convolution(**x, **arguments), -1)
    grad_y = torch.randn(y.shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).bfloat16().to(y)
    return [y.detach(), *torch.autograd.grad(y, [z for z in x.values() if z.requires_grad], grad_y)]


def exact(x: dict[str, Any], **options: Any) -> list[Tensor]:
    wide = {name: y.detach().double().requires_grad_() if y.is_floating_point() else y for name, y in x.items()}
    return results(wide, impl="torch", **options)


def assert_near(actual: list[Tensor], expected: list[Tensor], bound: float) -> None:
    """Every result within `bound` of the expected one, relative to its norm."""
    for y, z in zip(actual, expected, strict=True):
        error = (y.double() - z.double()).norm() / z.double().norm().clamp_min(1e-30)
        assert error <= bound, f"{list(z.shape)}: relative error {error:.1e} > {bound}"


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("pieces", [None, PIECES], ids=["dense", "packed"])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_pytorch(dtype: torch.dtype, pieces: tuple[int, ...] | None, activation: str, bias: bool) -> None:
    x = inputs(1000, dtype=dtype, pieces=pieces, bias=bias)
    assert_near(results(x, activation=activation), exact(x, activation=activation), BOUNDS[dtype])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 16])
@pytest.mark.parametrize("channels", [1, 100, 1000])
def test_sizes(size: int, channels: int) -> None:
    x = inputs(300, size=size, channels=channels, dtype=FP32)
    assert_near(results(x), exact(x), 1e-5)


@pytest.mark.parametrize("pieces", [None, PIECES], ids=["dense", "packed"])
def test_parts(pieces: tuple[int, ...] | None) -> None:
    x = inputs(1000, pieces=pieces)
    actual, expected = results(x, widths=[1024, 100, 0, 1948]), results(x)
    assert all(torch.equal(y, z) for y, z in zip(actual, expected, strict=True))


def test_auto_is_triton() -> None:
    x = inputs(200)
    assert all(torch.equal(y, z) for y, z in zip(results(x, impl="auto"), results(x), strict=True))


def test_autocast() -> None:
    x = inputs(200, dtype=FP32)
    x["x"] = x["x"].detach().bfloat16().requires_grad_()
    with torch.autocast(DEVICE, BF16):
        actual = results(x)
    assert [y.dtype for y in actual] == [BF16, BF16, FP32, FP32]
    assert_near(actual, exact(x), 1e-2)


@pytest.mark.parametrize("pieces", [None, (3, 67)], ids=["dense", "packed"])
@pytest.mark.parametrize("bias", [False, True])
def test_ops_are_sound(pieces: tuple[int, ...] | None, bias: bool) -> None:
    x = inputs(70, channels=100, batch=2, dtype=FP32, pieces=pieces, bias=bias)
    args = x["x"], x["weight"], x.get("bias"), x.get("positions")
    torch.library.opcheck(ops.short_convolution, (*args, [60, 40], True))
    plain = [None if y is None else y.detach() for y in args]
    grad_parts = [torch.ones_like(part) for part in x["x"].detach().split([60, 40], -1)]
    torch.library.opcheck(ops.short_convolution_backward, (grad_parts, *plain, True))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_one_graph_over_lengths(packed: bool) -> None:
    def loss(x: dict[str, Any]) -> Tensor:
        parts = short_convolution(**x, activation="silu", widths=[32, 64], impl="triton")
        return torch.cat(parts, -1).float().square().mean()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seq_len in range(61, 500, 49):
            x = inputs(seq_len, channels=96, pieces=(2, 7, seq_len - 9) if packed else None)
            leaves = [y for y in x.values() if y.requires_grad]
            actual, expected = compiled(x), loss(x)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0)
            grads, eager_grads = (list(torch.autograd.grad(y, leaves)) for y in (actual, expected))
            assert_near(grads, eager_grads, 4e-3)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("pieces", [None, PIECES], ids=["dense", "packed"])
def test_two_runs_are_bit_identical(pieces: tuple[int, ...] | None) -> None:
    x = inputs(1000, pieces=pieces)
    first, second = results(x), results(x)
    assert all(torch.equal(y, z) for y, z in zip(first, second, strict=True))


def test_offsets_beyond_32_bits() -> None:
    """The last of 2^31 elements and more is what it is alone."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free device memory")
    channels, tail = 4096, 300
    seq_len = 2**31 // channels + 1000
    x = torch.randn(1, seq_len, channels, device=DEVICE, dtype=BF16)
    weight = torch.randn(4, channels, device=DEVICE, dtype=BF16)
    (y,) = ops.short_convolution(x, weight, None, None, [channels], True)
    (last,) = ops.short_convolution(x[:, -tail:], weight, None, None, [channels], True)
    assert torch.equal(y[:, 3 - tail :], last[:, 3:])
    del y
    grad_y = torch.zeros_like(x)
    grad_y[:, -tail + 3 :] = 1
    grad_x, grad_weight, _ = ops.short_convolution_backward([grad_y], x, weight, None, None, True)
    alone = ops.short_convolution_backward([grad_y[:, -tail:]], x[:, -tail:], weight, None, None, True)
    assert torch.equal(grad_x[:, -tail:], alone[0])
    assert not grad_x[:, : -tail - 3].any()
    torch.testing.assert_close(grad_weight, alone[1], rtol=1e-2, atol=1e-2)
