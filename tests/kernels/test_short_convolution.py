"""The short convolution against torch's own, and its error messages.

Shapes: B batch, T tokens, C channels, K taps.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from zoo.kernels.short_convolution import short_convolution

PIECES = (1, 2, 5, 1, 3)
each_activation = pytest.mark.parametrize("activation", [None, "silu"])


def inputs(length: int, *, size: int = 4, bias: bool = True, batch: int = 2) -> list[Any]:
    """x, weight and bias in float64."""
    shapes = [(batch, length, 6), (size, 6), (6,)]
    x, weight, shift = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return [x, weight, shift if bias else None]


def convolve(*args: Any, **options: Any) -> Tensor:
    """In one part."""
    (y,) = short_convolution(*args, **options)
    return y


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    kernel = weight.flip(0).t()[:, None]
    return F.conv1d(F.pad(x.mT, (weight.shape[0] - 1, 0)), kernel, bias, groups=x.shape[2]).mT


def positions(pieces: tuple[int, ...] = PIECES) -> Tensor:
    return torch.cat([torch.arange(piece) for piece in pieces])[None]


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 20])
@each_activation
def test_equals_conv1d(size: int, bias: bool, length: int, activation: Any) -> None:
    args = inputs(length, size=size, bias=bias)
    expected = conv1d(*args)
    results = convolve(*args, activation=activation), F.silu(expected) if activation else expected
    leaves = [y for y in args if y is not None]
    actual, expected = ([y, *torch.autograd.grad(y.square().sum(), leaves)] for y in results)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("widths", [[6], [1, 2, 3], [0, 5, 0, 1], (4, 2, 0)])
def test_parts(widths: list[int]) -> None:
    args = inputs(5)
    parts = short_convolution(*args, widths=widths)
    assert [y.shape[-1] for y in parts] == list(widths)
    torch.testing.assert_close(torch.cat(parts, -1), convolve(*args))


@pytest.mark.parametrize("packed", [False, True])
@each_activation
def test_gradients(packed: bool, activation: Any) -> None:
    x, weight, bias = inputs(12, batch=1)
    leaves = [x, weight, bias] if packed else [x, weight, bias, torch.randn_like(x[:, :3], requires_grad=True)]
    where = positions() if packed else None

    def function(x: Tensor, weight: Tensor, bias: Tensor, taps: Tensor | None = None) -> Tensor:
        return convolve(x, weight, bias, activation=activation, positions=where, taps=taps)

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@each_activation
def test_packed_is_each_alone(dtype: torch.dtype, activation: Any) -> None:
    x, weight, bias = inputs(12, batch=1)
    packed = convolve(x, weight, bias, activation=activation, positions=positions().to(dtype))
    alone = [convolve(piece, weight, bias, activation=activation) for piece in x.split(PIECES, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


def test_a_document_does_not_reach_the_others() -> None:
    x, weight, bias = (y.detach() for y in inputs(12, batch=1))
    spoilt = x.clone()
    spoilt[:, 3:8] = torch.nan
    before, after = (convolve(y, weight, bias, positions=positions()) for y in (x, spoilt))
    for tokens in (slice(0, 3), slice(8, None)):
        assert torch.equal(before[:, tokens], after[:, tokens])


@pytest.mark.parametrize("size", [1, 4])
@each_activation
def test_goes_on_from_its_taps(size: int, activation: Any) -> None:
    x, weight, bias = inputs(12, size=size)
    before, ys = x.new_zeros(2, size - 1, 6), []
    for piece in x.split(PIECES, 1):
        ys.append(convolve(piece, weight, bias, activation=activation, taps=before))
        before = torch.cat([before, piece], 1)[:, piece.shape[1] :]
    torch.testing.assert_close(torch.cat(ys, 1), convolve(x, weight, bias, activation=activation))


@each_activation
def test_has_the_dtype_of_x(activation: Any) -> None:
    x, weight, bias = inputs(5)
    assert convolve(x.bfloat16(), weight, bias, activation=activation).dtype == torch.bfloat16
    assert convolve(x, weight.half(), bias.half(), activation=activation).dtype == torch.float64


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("packed", [False, True])
def test_one_graph_over_lengths(packed: bool) -> None:
    compiled = torch.compile(convolve, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (11, 12, 30):
            x, weight, bias = inputs(length, batch=1 if packed else 2)
            where = positions((2, length - 2)) if packed else None
            options: dict[str, Any] = {"activation": "silu", "positions": where}
            actual, expected = compiled(x, weight, bias, **options), convolve(x, weight, bias, **options)
            torch.testing.assert_close(actual, expected)
            torch.testing.assert_close(*(torch.autograd.grad(y.sum(), [x, weight, bias]) for y in (actual, expected)))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "impl": ({"impl": "cuda"}, "impl: expected one of 'auto', 'torch', 'triton', got 'cuda'"),
    "activation": ({"activation": "gelu"}, "activation: expected 'silu' or None, got 'gelu'"),
    "x": ({"x": torch.ones(5, 6)}, "x: expected [B, T, C] with T and C >= 1, got [5, 6]"),
    "number": ({"x": torch.tensor(1.0)}, "x: expected [B, T, C] with T and C >= 1, got []"),
    "empty": ({"x": torch.ones(1, 0, 6)}, "x: expected [B, T, C] with T and C >= 1, got [1, 0, 6]"),
    "no channels": ({"x": torch.ones(1, 5, 0)}, "x: expected [B, T, C] with T and C >= 1, got [1, 5, 0]"),
    "weight": ({"weight": torch.ones(6)}, "weight: expected [K, C] with K >= 1, got [6]"),
    "no weight": ({"weight": torch.ones(0, 6)}, "weight: expected [K, C] with K >= 1, got [0, 6]"),
    "channels": ({"weight": torch.ones(4, 1)}, "weight: expected [K, C] = [4, 6], got [4, 1]"),
    "bias": ({"bias": torch.ones(1)}, "bias: expected [C] = [6], got [1]"),
    "taps": ({"taps": torch.ones(1, 4, 6)}, "taps: expected [B, K - 1, C] = [1, 3, 6], got [1, 4, 6]"),
    "widths": ({"widths": [4, 3]}, "widths: expected numbers of at least 0, C = 6 in all, got [4, 3]"),
    "no widths": ({"widths": []}, "widths: expected numbers of at least 0, C = 6 in all, got []"),
    "negative widths": ({"widths": [7, -1]}, "widths: expected numbers of at least 0, C = 6 in all, got [7, -1]"),
    "positions": ({"positions": torch.arange(5)}, "positions: expected [1, T] = [1, 5], got [5]"),
    "packed rows": (
        {"x": torch.ones(2, 5, 6), "positions": torch.arange(5)[None]},
        "positions: packed sequences are one row, expected B = 1, got B = 2",
    ),
    "float positions": ({"positions": torch.ones(1, 5)}, "positions: expected int32 or int64, got torch.float32"),
    "integers": ({"x": torch.ones(1, 5, 6).long()}, "x: expected a floating-point dtype, got torch.int64"),
    "device": (
        {"weight": torch.ones(4, 6, device="meta")},
        "weight: expected the device of x, cpu, got meta",
    ),
    "triton": ({"impl": "triton"}, "impl: 'triton' needs CUDA tensors, got cpu"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_errors(change: dict[str, Any], message: str) -> None:
    args: dict[str, Any] = {"x": torch.ones(1, 5, 6), "weight": torch.ones(4, 6)} | change
    with pytest.raises(ValueError) as error:  # noqa: PT011
        convolve(**args)
    assert str(error.value) == message


def on_cuda(*, size: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """x, weight and taps that say they are on a CUDA device: under `FakeTensorMode` none is needed."""
    x = torch.empty(1, 5, 6, dtype=dtype, device="cuda")
    return {"x": x, "weight": torch.empty(size, 6, device="cuda"), "taps": x.new_empty(1, size - 1, 6)}


@pytest.mark.parametrize(
    ("options", "taps", "missing"),
    [
        ({"dtype": torch.float64}, False, "x in bfloat16, float16 or float32, got torch.float64"),
        ({"size": 17}, False, "K of at most 16, got 17"),
        ({}, True, "taps to be None, got [1, 3, 6]"),
    ],
)
def test_what_triton_cannot(options: dict[str, Any], taps: bool, missing: str) -> None:
    with FakeTensorMode():
        args = on_cuda(**options)
        if not taps:
            del args["taps"]
        with pytest.raises(ValueError) as error:  # noqa: PT011
            convolve(**args, impl="triton")
    assert str(error.value) == f"impl: 'triton' needs {missing}"
