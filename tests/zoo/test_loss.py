"""The chunked cross-entropy against torch's, and how many logits it holds.

Shapes: N tokens, D model width, V vocabulary.
"""

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zoo import loss
from zoo.loss import IGNORED, NUM_CHUNKS, linear_cross_entropy

D, V = 5, 23


def inputs(length: int, ignored: float = 0.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(length, D).to(dtype).requires_grad_()
    weight = torch.randn(V, D).to(dtype).requires_grad_()
    labels = torch.randint(V, (length,))
    labels[torch.rand(length) < ignored] = IGNORED
    return hidden, weight, labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), labels, ignore_index=IGNORED)


def with_gradients(function: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    loss = function(hidden, weight, labels)
    return [loss, *torch.autograd.grad(3 * loss, [hidden, weight])]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 100])
@pytest.mark.parametrize("ignored", [0.0, 0.4])
def test_equals_cross_entropy(length: int, ignored: float) -> None:
    x = inputs(length, ignored)
    x[2][0] = 3  # at least one counts
    for actual, expected in zip(with_gradients(linear_cross_entropy, *x), with_gradients(plain, *x), strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(*x), plain(*x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [1, 9])
def test_nothing_to_predict_is_zero_with_zero_gradients(length: int) -> None:
    for value in with_gradients(linear_cross_entropy, *inputs(length, ignored=2.0)):
        assert not value.any()
    with torch.no_grad():
        assert linear_cross_entropy(*inputs(length, ignored=2.0)) == 0


def test_a_loss_scale_saves_small_fp16_gradients() -> None:
    hidden, weight, labels = inputs(4096, dtype=torch.float16)
    scale = 2.0**14
    actual = torch.autograd.grad(scale * linear_cross_entropy(hidden, weight, labels), [hidden, weight])
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = torch.autograd.grad(scale * F.cross_entropy(wide[0] @ wide[1].t(), labels), wide)
    for a, e in zip(actual, expected, strict=True):
        assert (a.double() - e).norm() / e.norm() < 2e-3  # fp16 rounds to 5e-4; unscaled, most would round to zero


@pytest.mark.parametrize("inlined", [False, True], ids=["as on the CPU", "as on CUDA"])
def test_compiled_equals_eager(inlined: bool, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> None:
    if inlined:
        monkeypatch.setattr(loss, "_compiled_once", loss._gradients)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, dynamic=True)
    for length in (61, 100):
        x = inputs(length, 0.3)
        for a, e in zip(with_gradients(compiled, *x), with_gradients(plain, *x), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


def test_extreme_logits() -> None:
    hidden, weight, labels = inputs(20, 0.3)
    x = (1e4 * hidden).detach().requires_grad_(), weight, labels
    for actual, expected in zip(with_gradients(linear_cross_entropy, *x), with_gradients(plain, *x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16() -> None:
    x = inputs(100, 0.3, torch.bfloat16)
    exact = [y.detach().double().requires_grad_(y.is_floating_point()) if y.is_floating_point() else y for y in x]
    for actual, expected, dtype in zip(
        with_gradients(linear_cross_entropy, *x),
        with_gradients(plain, *exact),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        strict=True,
    ):
        assert actual.dtype == dtype
        assert (actual.double() - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_one_side_may_be_frozen(frozen: str) -> None:
    hidden, weight, labels = inputs(9)
    if frozen == "hidden":
        hidden, free = hidden.detach(), weight
    else:
        weight, free = weight.detach(), hidden
    (actual,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), free)
    torch.testing.assert_close(actual, torch.autograd.grad(plain(hidden, weight, labels), free)[0])


def test_tied_weight_gathers_both_gradients() -> None:
    ids, labels = torch.randint(V, (2, 30))
    weight = torch.randn(V, D, requires_grad=True)
    actual, expected = (
        torch.autograd.grad(function(weight[ids], weight, labels), weight)[0]
        for function in (linear_cross_entropy, plain)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("cache", [True, False])
def test_under_autocast(cache: bool) -> None:
    x = inputs(50, 0.3)
    expected = with_gradients(plain, *x)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        loss = linear_cross_entropy(*x)
    actual = [loss, *torch.autograd.grad(3 * loss, x[:2])]
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 0.02 * b.norm()


def test_second_derivatives_are_refused_not_wrong() -> None:
    hidden, weight, labels = inputs(9)
    loss = linear_cross_entropy(hidden, weight, labels)
    (gradient,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


class LogitCounter(TorchDispatchMode):
    """Rows of the largest tensor with V columns, and the most rows of logits that were alive when more were made."""

    def __init__(self, head: Tensor) -> None:
        super().__init__()
        self.head, self.most, self.alive, self.most_alive = head.data_ptr(), 0, weakref.WeakSet(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for y in result if isinstance(result, tuple | list) else [result]:
            if isinstance(y, Tensor) and y.shape[-1:] == (V,) and y.data_ptr() != self.head:
                self.most = max(self.most, y.numel() // V)
                if func is torch.ops.aten.mm.default:
                    self.most_alive = max(self.most_alive, sum(other.numel() // V for other in self.alive))
                    self.alive.add(y)
                elif func not in (torch.ops.aten.t.default, torch.ops.aten.transpose.int):
                    self.alive.add(y)
        return result


@pytest.mark.parametrize("length", [1, 8, 100, 801])
@pytest.mark.parametrize("train", [True, False])
def test_at_most_an_eighth_of_the_logits_exist(length: int, train: bool) -> None:
    hidden, weight, labels = inputs(length)
    with LogitCounter(weight) as counter, torch.set_grad_enabled(train):
        loss = linear_cross_entropy(hidden, weight, labels)
        if train:
            loss.backward()
    assert counter.most == -(-length // NUM_CHUNKS)
    assert counter.most_alive == 0, "logits of one chunk are alive when the next one's are made"


def test_counter_notices_too_many_logits() -> None:
    hidden, weight, labels = inputs(100)
    with LogitCounter(weight) as counter:
        plain(hidden, weight, labels)
    assert counter.most == 100
    with LogitCounter(weight) as counter:
        kept = [piece @ weight.t() for piece in hidden.split(50)]
    assert (counter.most, counter.most_alive, len(kept)) == (50, 50, 2)


def test_compiles_to_one_graph_for_all_lengths(fresh_compiler: None) -> None:
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, dynamic=True, backend="aot_eager")
    for index, length in enumerate((61, 97, 9, 203)):
        x = inputs(length, 0.3)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            pairs = zip(with_gradients(compiled, *x), with_gradients(linear_cross_entropy, *x), strict=True)
        for actual, expected in pairs:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
