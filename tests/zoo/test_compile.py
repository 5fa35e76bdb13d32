"""torch.compile of whole models: one graph, the numbers of eager mode, no recompilation, any mixer in any layer.

Shapes: B batch, T sequence length, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from zoo import registry

TINY = zoo.list("*-tiny", kind="recipe")
MIXERS = [entry.name for entry in registry.entries("mixer")]
V = 256
FOUR_MIXERS = ["layers.2.mixer=full_attention", "layers.3.mixer=deltaformer"]

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def batch(length: int, rows: int = 3) -> tuple[Tensor, Tensor]:
    tokens, labels = torch.randint(V, (2, rows, length))
    labels[:, ::5] = -100
    return tokens, labels


def assert_same_step(model: zoo.LanguageModel, compiled: Callable[..., Any], *args: Tensor, **kwargs: Tensor) -> None:
    """The loss (of logits: their mean square) and every gradient equal those of eager mode."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    results = []
    for run in (model, compiled):
        loss = run(*args, **kwargs).square().mean()
        results.append([loss, *torch.autograd.grad(loss, parameters)])
    for name, expected, actual in zip(("loss", *names), *results, strict=True):
        error = (actual - expected).norm() / expected.norm().clamp_min(1e-6)
        assert error <= 2e-5, f"{name}: relative error {error:.1e}"


def assert_one_graph() -> None:
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("recipe", TINY)
def test_trains_in_one_graph_at_all_lengths(recipe: str) -> None:
    model = zoo.build(recipe, seed=0)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for index, length in enumerate((61, 97, 128, 200, 333)):
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            assert_same_step(model, compiled, *batch(length))
    assert_one_graph()


def test_packed_trains_in_one_graph_for_all_packings() -> None:
    model = zoo.build("deltanet-swa-tiny", FOUR_MIXERS, seed=0)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    packings = ((5, 1, 61), (64, 2, 30, 1, 0, 7), (100, 33), (1, 1, 1, 1, 90))
    for index, pieces in enumerate(packings):
        bounds = torch.tensor([0, *pieces]).cumsum(0).int()
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            assert_same_step(model, compiled, *batch(sum(pieces), 1), cu_seqlens=bounds)
    assert_one_graph()


@torch.no_grad()
def test_decodes_in_one_graph_each_for_prefill_and_steps() -> None:
    model = zoo.build("deltanet-swa-tiny", FOUR_MIXERS, seed=0)
    tokens, _ = batch(90)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    state, logits, graphs = model.init_state(3, 90), [], []
    for piece in tokens.split((61, 1, 1, 1, 17, 1, 1, 7), 1):
        y, state = compiled(piece, state=state)
        logits.append(y)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens), rtol=1e-4, atol=1e-5)
    assert graphs == [1] + [2] * 7
    assert not torch._dynamo.utils.counters["graph_break"]


@torch.no_grad()
def test_a_prefill_is_one_graph_over_lengths() -> None:
    model = zoo.build("deltanet-swa-tiny", FOUR_MIXERS, seed=0)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for index, length in enumerate((61, 70, 90)):
        tokens, _ = batch(length)
        lengths = torch.tensor([length, 5, 40])
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            logits, state = compiled(tokens, max_length=length + 9, lengths=lengths, last=True)
        expected, other = model(tokens, max_length=length + 9, lengths=lengths, last=True)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        for key, value in other.items(True, True):
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)
    assert_one_graph()


@torch.no_grad()
def test_a_thousand_steps_are_one_graph() -> None:
    """The windows of 32 go round their rings thirty times."""
    model = zoo.build("deltanet-swa-tiny", ["layers.2.mixer=deltaformer", "layers.3.mixer=full_attention"], seed=0)
    tokens, _ = batch(1010, rows=2)
    _, state = model(tokens[:, :10], max_length=1010)
    compiled = torch.compile(model, fullgraph=True)
    steps = []
    for place in range(10, 1010):
        with torch._dynamo.config.patch(error_on_recompile=place > 10):
            logits, state = compiled(tokens[:, place : place + 1], state=state)
        steps.append(logits)
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens)[:, 10:], rtol=1e-4, atol=1e-4)
    assert_one_graph()


def test_activation_checkpointing_compiles() -> None:
    overrides = ["num_layers=2", "activation_checkpointing=true"]
    model = zoo.build("deltanet-swa-tiny", overrides, seed=0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_step(model, compiled, *batch(61))
    assert_one_graph()


def test_autocast_compiles() -> None:
    model = zoo.build("deltanet-swa-tiny", ["num_layers=2"], seed=0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens, labels = batch(61)
    results = []
    for run in (model, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(tokens, labels)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for expected, actual in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        assert (actual - expected).norm() <= 2e-2 * expected.norm()
    assert_one_graph()


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("recipe", TINY)
def test_any_mixer_trains_in_any_layer(recipe: str, mixer: str, layer: int) -> None:
    model = zoo.build(recipe, [f"layers.{layer}.mixer={mixer}"], seed=0)
    assert model.mixers()[layer].__class__ is registry.find("mixer", mixer).load()
    loss = model(*batch(40))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("recipe", TINY)
def test_any_swap_compiles(recipe: str, mixer: str) -> None:
    """Logits alone: the loss is half of the compile time, and the same for all."""
    original = zoo.build(recipe, device="meta").mixers()
    layers = [i for i, other in enumerate(original) if type(other) is not registry.find("mixer", mixer).load()]
    if not layers:
        pytest.skip(f"all layers of {recipe} are {mixer}")
    model = zoo.build(recipe, [f"layers.{layers[0]}.mixer={mixer}"], seed=0)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    assert_same_step(model, compiled, batch(61)[0])
    assert_one_graph()
