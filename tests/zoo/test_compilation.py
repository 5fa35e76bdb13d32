"""Compiling a model whole or by block, and starting from what another process compiled."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch.fx.experimental._config as shapes_config
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from variants import build

import zoo
import zoo.compilation
from zoo.decoding import Decoder
from zoo.mixers.full_attention import FullAttention

pytestmark = pytest.mark.usefixtures("fresh_compiler")

FEW = ["num_layers=3", "dim=64", "block.mlp.hidden_dim=96"]
SHAPES = ((2, 128), (3, 25))  # some sizes are also sizes of what does not change: the width, a pair of angles


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs as for Inductor, forward and backward, but run by PyTorch: no waiting for C++."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """What `compile` sets for the whole process is as it was afterwards."""
    shapes: Any = shapes_config
    limit = dynamo_config.recompile_limit
    with dynamo_config.patch(recompile_limit=limit), shapes.patch(use_duck_shape=shapes.use_duck_shape):
        yield


def step(call: Any, model: zoo.LanguageModel, shape: tuple[int, int]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients, which the model does not keep."""
    tokens = torch.randint(256, shape, generator=torch.Generator().manual_seed(1))
    loss = call(tokens, labels=tokens.roll(-1, 1))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return loss.detach(), gradients


def same(found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("recipe", ["deltaformer-swa-tiny", "deltanet-global-tiny"])
def test_blocks_equal_eager(recipe: str) -> None:
    model = build(recipe, seed=0)
    wanted = [step(model, model, shape) for shape in SHAPES]
    with torch.no_grad():
        logits = model(torch.arange(40)[None])
    names = [*model.state_dict()]
    compiled = zoo.compilation.compile(model, "block", dynamic=True)
    assert compiled is model
    for shape, of in zip(SHAPES, wanted, strict=True):
        same(step(compiled, model, shape), of)
    kinds = len(set(model.config.layers))
    assert counters["stats"]["unique_graphs"] == kinds + 2  # the norm, and a chunk of the cross-entropy
    assert not counters["graph_break"]
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.arange(40)[None]), logits, atol=1e-5, rtol=1e-5)
    assert [*model.state_dict()] == names


@pytest.mark.usefixtures("traced_only")
def test_graphs_do_not_grow_with_depth() -> None:
    for depth in (2, 6):
        torch._dynamo.reset()
        counters.clear()
        model = zoo.build("deltanet-tiny", [*FEW, f"num_layers={depth}"], seed=0)
        step(zoo.compilation.compile(model, "block", dynamic=True), model, (2, 20))
        assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.usefixtures("traced_only")
@torch.no_grad()
def test_nine_kinds_of_blocks_are_not_too_many() -> None:
    """Dynamo gives up after eight graphs of one piece of code, unless it is told."""
    windows = [f"layers.{index}.mixer={{name: sliding_window, window: {index + 4}}}" for index in range(9)]
    model = zoo.build("swa-full-tiny", [*FEW, "num_layers=9", *windows], seed=0)
    tokens = torch.arange(20)[None]
    wanted = model(tokens)
    found = zoo.compilation.compile(model, "block", dynamic=True)(tokens)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == 9 + 1


@pytest.mark.usefixtures("traced_only")
def test_a_copy_is_a_plain_model() -> None:
    model = zoo.build("transformer-tiny", FEW, seed=0)
    wanted = step(model, model, (2, 20))
    zoo.compilation.compile(model, "block")
    same(step(model, model, (2, 20)), wanted)
    before = counters["stats"]["unique_graphs"]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [*twin.state_dict()] == [*model.state_dict()]
        same(step(twin, twin, (2, 20)), wanted)
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.usefixtures("traced_only")
def test_decoding_with_compiled_blocks() -> None:
    model = zoo.build("deltanet-swa-tiny", FEW, seed=0)
    prompt, tokens = torch.arange(20).view(2, 10), torch.tensor([3, 4])
    logits, state = model(prompt, max_length=12)
    after = model(tokens[:, None], state=state)[0][:, 0]
    zoo.compilation.compile(model, "block", dynamic=True)
    found, state = model(prompt, max_length=12)
    torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(Decoder(model, state, compile=False)(tokens), after, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("traced_only")
def test_a_break_is_an_error_unless_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("transformer-tiny", FEW, seed=0)
    wanted = step(model, model, (2, 20))
    monkeypatch.setattr(FullAttention, "forward", torch._dynamo.disable(FullAttention.forward))
    for scope in zoo.compilation.SCOPES:
        torch._dynamo.reset()
        with pytest.raises(Unsupported):
            step(zoo.compilation.compile(copy.deepcopy(model), scope), model, (2, 20))
        same(step(zoo.compilation.compile(model, scope, fullgraph=False), model, (2, 20)), wanted)


@pytest.mark.parametrize("scope", ["layer", "", None])
def test_another_scope_is_refused(scope: Any) -> None:
    with pytest.raises(ValueError, match=f"^scope: got {scope!r}, allowed: model, block$"):
        zoo.compilation.compile(zoo.build("transformer-tiny", FEW), scope)


SCRIPT = """
import sys, torch
from torch._dynamo.utils import counters
from zoo.compilation import compile_cache

@torch.compile
def double(x):
    return (x * 2).sin()

try:
    with compile_cache(sys.argv[1]):
        double(torch.arange(8.0))
        if "fail" in sys.argv:
            raise RuntimeError("it broke")
finally:
    print(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
"""


def run(script: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a process that finds nothing compiled but what it is given."""
    environment = {"PATH": "/usr/bin:/bin", "TORCHINDUCTOR_CACHE_DIR": str(folder), "HOME": str(folder)}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_another_process_starts_from_what_one_compiled(tmp_path: Path) -> None:
    file = tmp_path / "made" / "compiled.bin"
    first = run(SCRIPT, str(file), "fail", folder=tmp_path / "a")
    assert first.stderr.splitlines()[-1] == "RuntimeError: it broke"
    assert first.stdout.split() == ["0", "0"]
    assert [path.name for path in file.parent.iterdir()] == ["compiled.bin"]  # also after an error
    second = run(SCRIPT, str(file), folder=tmp_path / "b")
    assert second.returncode == 0, second.stderr
    assert int(second.stdout.split()[0]) > 0
    assert int(second.stdout.split()[1]) == 1
    assert file.stat().st_size > 1000  # what was only loaded is kept too


def test_a_cache_that_is_of_no_use_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "compiled.bin"
    file.write_bytes(b"of another kind")
    with zoo.compilation.compile_cache(file):
        assert torch.compile(torch.sin, backend="eager")(torch.zeros(2)).tolist() == [0, 0]


def test_a_cache_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "compiled.bin", tmp_path, "/proc/zoo/compiled.bin"):
        with pytest.raises(OSError, match=r"file|folder|proc"), zoo.compilation.compile_cache(path):
            raise AssertionError("the block has begun")
