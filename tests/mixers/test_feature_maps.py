"""The shared feature maps against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.kernels.ring import newest, slot_positions
from zoo.mixers.context import Context
from zoo.mixers.feature_maps import OnePlusELU, ShortConvolution, Strength, convolve, l1_normalize, l2_normalize


def convolution(size: int, bias: bool) -> ShortConvolution:
    module = ShortConvolution(6, size, bias=bias)
    if module.bias is not None:
        torch.nn.init.normal_(module.bias)
    return module


def conv1d(x: Tensor, module: ShortConvolution) -> Tensor:
    size = module.weight.shape[0]
    weight = module.weight.flip(0).t()[:, None]
    return F.conv1d(F.pad(x.mT, (size - 1, 0)), weight, module.bias, groups=x.shape[2]).mT


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 20])
def test_convolution_equals_conv1d(size: int, bias: bool, length: int) -> None:
    module, x = convolution(size, bias), torch.randn(3, length, 6, requires_grad=True)
    leaves = [x, *module.parameters()]
    results = []
    for y in (module(x)[0], conv1d(x, module)):
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 4])
def test_convolution_goes_on_from_its_taps(size: int) -> None:
    module, x = convolution(size, True), torch.randn(2, 12, 6)
    (expected,) = module(x)
    start, ys = torch.zeros(2, dtype=torch.int64), []
    state = {"taps": module.new_taps(2, x.device, x.dtype)}
    for piece in x.split((1, 2, 5, 1, 3), 1):
        context = Context.from_state(torch.zeros(piece.shape[:2]), start, 12)
        ys += convolve(module, piece, [6], context, state)
        start += piece.shape[1]
    torch.testing.assert_close(torch.cat(ys, 1), expected)
    assert torch.equal(newest(state["taps"], start, size), x[:, 12 - size :])


def test_taps_are_of_tokens_that_are_there() -> None:
    module, x, lengths = convolution(4, False), torch.randn(5, 6, 6), [0, 1, 2, 4, 6]
    seen, before = torch.tensor([0, 3, 4, 7, 9]), torch.randn(5, 4, 6)
    ring = before.gather(1, slot_positions(seen, 4)[..., None].expand(-1, -1, 6) % 4)
    expected = [torch.cat([newest(ring[i : i + 1], seen[i : i + 1], 4)[0], x[i, : lengths[i]]])[-4:] for i in range(5)]
    context = Context.from_state(torch.zeros(5, 6), seen, 12, lengths=torch.tensor(lengths))
    convolve(module, x, [6], context, {"taps": ring})
    assert torch.equal(newest(ring, seen + torch.tensor(lengths), 4), torch.stack(expected))


def test_convolution_stays_within_documents() -> None:
    module, x, pieces = convolution(4, True), torch.randn(1, 12, 6), (1, 2, 5, 1, 3)
    positions = torch.cat([torch.arange(piece) for piece in pieces])[None]
    separate = torch.cat([module(piece)[0] for piece in x.split(pieces, 1)], 1)
    torch.testing.assert_close(module(x, positions)[0], separate)


@pytest.mark.parametrize("normalize", [l2_normalize, l1_normalize])
@pytest.mark.parametrize("value", [0.0, 1e-20, 1e18])
def test_norms_have_finite_gradients_everywhere(normalize, value: float) -> None:
    x = torch.full((2, 5), value, requires_grad=True)
    y = normalize(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.isfinite(y).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(("normalize", "order"), [(l2_normalize, 2), (l1_normalize, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_norms_divide_by_the_norm(normalize, order: int, dtype: torch.dtype) -> None:
    x = torch.randn(4, 16).to(dtype)
    expected = F.normalize(x.double(), p=order, dim=-1)
    assert normalize(x).dtype == dtype
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(normalize(x).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "highest"), [("sigmoid", 1), ("2sigmoid", 2)])
def test_beta_range(kind, highest: int) -> None:
    beta = Strength(kind, 3)(torch.tensor([-100.0, 0.0, 100.0]).bfloat16())
    assert beta.dtype == torch.float32
    assert beta.tolist() == [pytest.approx(0, abs=1e-30), highest / 2, highest]


@pytest.mark.parametrize(("kind", "bounded"), [("sigmoid", True), ("2sigmoid", False), (1.0, True), (1.5, False)])
def test_whether_a_strength_may_exceed_one(kind, bounded: bool) -> None:
    assert Strength(kind, 3).bounded == bounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_fixed_beta(dtype: torch.dtype) -> None:
    beta = Strength(0.75, 3)(torch.empty(2, 5, 0, dtype=dtype))
    assert beta.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(beta.float(), torch.full((2, 5, 3), 0.75))


def test_one_plus_elu() -> None:
    x = torch.tensor([-50.0, -1.0, 0.0, 2.0])
    torch.testing.assert_close(OnePlusELU()(x), torch.where(x > 0, 1 + x, x.exp()), atol=1e-7, rtol=1e-5)
    assert (OnePlusELU()(x) >= 0).all()
