"""Where the time of a step goes: a slow mixer is found, and a kernel on a device finds its module."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import zoo
from zoo import registry
from zoo.compilation import Scope
from zoo.decoding import Decoder, Replayed
from zoo.mixers.contract import Mixer
from zoo.mixers.options import NoOptions
from zoo.profiling import profile_step, provenance
from zoo.profiling.attribution import spent
from zoo.profiling.places import KINDS, kind_of, layer_of

CPU = torch.device("cpu")
WIDTH = 8192  # of the slow mixer: about 16 times the work of the MLP beside it
TOKENS = torch.randint(256, (2, 128), generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.usefixtures("fresh_compiler", "slow_mixer")


class Slow(Mixer):
    def __init__(self, options: NoOptions, dim: int) -> None:
        super().__init__()
        self.wide = nn.Linear(dim, WIDTH, bias=False)
        self.out_proj = nn.Linear(WIDTH, dim, bias=False)

    def forward(self, x: Tensor, context: Any, state: Any = None) -> tuple[Tensor, Any]:
        return self.out_proj(self.wide(x)), state

    def init_state(
        self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        return {}


@pytest.fixture
def slow_mixer() -> Iterator[None]:
    zoo.register_mixer("slow")(Slow)
    yield
    del registry._entries()["mixer", "slow"]


def slow_model() -> zoo.LanguageModel:
    return zoo.build("deltanet-swa-tiny", ["num_layers=2", "layers.1.mixer=slow"], seed=0)


def training(model: zoo.LanguageModel, call: Callable[..., Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        call(TOKENS, labels=TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def assert_sound(profile: dict[str, Any], *, known: float) -> None:
    """The parts add up, layers are there, and at least this share of the time is known."""
    kinds, layers = profile["kinds_ms"], profile["layers_ms"]
    assert tuple(kinds) == KINDS
    assert sum(kinds.values()) == pytest.approx(profile["total_ms"])
    assert profile["unattributed_ms"] <= (1 - known) * profile["total_ms"]
    assert [layer["layer"] for layer in layers] == [0, 1]
    assert sum(layer["mixer_ms"] for layer in layers) == pytest.approx(kinds["mixer"])
    assert all(0 < layer["mixer_ms"] < layer["ms"] for layer in layers)
    assert all(kinds[kind] > 0 for kind in ("mixer", "mlp", "norm", "head", "embedding"))


def assert_slow(profile: dict[str, Any]) -> None:
    """The second layer's mixer takes most of the time; without its gradients it would take a third at most."""
    layer = profile["layers_ms"][1]
    assert layer["kind"] == "slow"
    assert layer["mixer_ms"] > 0.5 * profile["total_ms"]


def test_eager_training(tmp_path: Path) -> None:
    model = slow_model()
    profile = profile_step(training(model, model), model, CPU, tmp_path / "train.json.gz", count=2)
    assert_sound(profile, known=0.8)
    assert_slow(profile)
    assert profile["kinds_ms"]["optimizer"] > 0
    assert profile["layers_ms"][0]["kind"] == "delta_net"
    assert profile["trace"] == "train.json.gz"
    with gzip.open(tmp_path / "train.json.gz") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("step") == names.count("module blocks.1.mixer") == 2


@pytest.mark.parametrize("scope", ["model", "block"])
def test_compiled_training(scope: Scope) -> None:
    model = slow_model()
    with provenance():
        step = training(model, zoo.compile(model, scope))
        step()
        graphs = counters["stats"]["unique_graphs"]
        profile = profile_step(step, model, CPU, None)
    assert counters["stats"]["unique_graphs"] == graphs, "profiling compiles nothing"
    assert not counters["inductor"]["fxgraph_cache_hit"] + counters["inductor"]["fxgraph_cache_miss"]
    assert_sound(profile, known=0.8)
    assert_slow(profile)
    assert profile["kinds_ms"]["optimizer"] > 0
    assert profile["trace"] is None


@torch.no_grad()
def test_forward_of_a_graph_that_was_cached() -> None:
    model = slow_model()
    torch.compile(model, fullgraph=True)(TOKENS)
    torch.compiler.reset()
    with provenance():
        compiled = torch.compile(model, fullgraph=True)
        profile = profile_step(lambda: compiled(TOKENS), model, CPU, None)
    assert_sound(profile, known=0.8)
    assert_slow(profile)
    assert not profile["kinds_ms"]["optimizer"]


@torch.no_grad()
def test_compiled_without_provenance() -> None:
    model = slow_model()
    compiled = torch.compile(model, fullgraph=True)
    profile = profile_step(lambda: compiled(TOKENS), model, CPU, None)
    assert profile["kinds_ms"]["other"] >= profile["unattributed_ms"] > 0.5 * profile["total_ms"]
    assert not any(layer["ms"] for layer in profile["layers_ms"])


def test_eager_decoding() -> None:
    model = zoo.build("deltanet-swa-tiny", ["num_layers=2"])
    decoder = Decoder(model, model.init_state(2, 64))
    profile = profile_step(lambda: decoder(TOKENS[:, 0]), model, CPU, None)
    assert_sound(profile, known=0.5)
    assert decoder.left == 64 - 4


def test_replays_are_launched_one_by_one() -> None:
    model, calls = slow_model(), []
    replayed = Replayed(lambda: calls.append(None), CPU)
    replayed.stream = object()  # pyright: ignore[reportAttributeAccessIssue]  # as if it were on CUDA
    with pytest.raises(AttributeError):
        replayed()
    profile_step(replayed, model, CPU, None, count=2)
    assert len(calls) == 3
    with pytest.raises(AttributeError):
        replayed()


def test_trace_has_its_ending(tmp_path: Path) -> None:
    model = slow_model()
    with pytest.raises(ValueError, match=r"trace: got .*train.json, allowed: a name that ends in \.json\.gz"):
        profile_step(lambda: None, model, CPU, tmp_path / "train.json")


def event(name: str, start: float, end: float, *, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    spaced = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid, "args": spaced}


def launch(
    number: int, at: float, *, takes: float, tid: int = 1, name: str = "cudaLaunchKernel"
) -> list[dict[str, Any]]:
    return [
        event(name, at, at + 0.5, cat="cuda_runtime", tid=tid, correlation=number),
        event("a_kernel", 1e6 + number, 1e6 + number + takes, cat="kernel", tid=7, correlation=number),
    ]


def device_times(*events: dict[str, Any] | list[dict[str, Any]]) -> tuple[float, dict[str, float]]:
    flat = [single for some in events for single in (some if isinstance(some, list) else [some])]
    total, places = spent(reversed(flat), on_device=True)
    return total, dict(places)


def test_kernels_of_modules_and_of_their_gradients() -> None:
    total, places = device_times(
        event("step", 0, 100),
        event("module model", 1, 40),
        launch(1, 2, takes=1),
        event("aten::embedding", 3, 5, Sequence_number=4),
        launch(2, 4, takes=2),
        event("aten::arange", 7, 8, Sequence_number=5),  # makes no node: the next operation has the same number
        event("module blocks.0.mixer", 10, 20),
        event("aten::mm", 13, 15, Sequence_number=5),
        launch(3, 14, takes=4),
        event("aten::linear", 30, 35),
        launch(4, 31, takes=8),
        event("Optimizer.step#AdamW.step", 80, 90),
        launch(5, 85, takes=16),
        launch(6, 95, takes=32),
        event("autograd::engine::evaluate_function: MmBackward0", 50, 60, tid=2, Sequence_number=5),
        event("aten::mm", 51, 55, tid=2, Sequence_number=4),
        launch(7, 52, takes=64, tid=2),
        event("autograd::engine::evaluate_function: EmbeddingBackward0", 61, 65, tid=2, Sequence_number=4),
        launch(8, 62, takes=128, tid=2),
        event("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 70, 75, tid=2),
        launch(9, 71, takes=256, tid=2),
    )
    assert total == 511
    assert places == {
        "model": 1,
        "embedding": 2 + 128,
        "blocks.0.mixer": 4 + 64,
        "head": 8,
        "optimizer": 16,
    }


def test_kernels_of_a_compiled_model() -> None:
    graph = "## Call CompiledFxGraph abc ##"
    total, places = device_times(
        event("step", 0, 100),
        event(graph, 1, 20),
        launch(1, 2, takes=1),
        event("kernel of 3 blocks.0.mixer, 1 blocks.0.mlp_norm", 3, 4, cat="user_annotation"),
        launch(2, 5, takes=4, name="cuLaunchKernel"),
        event("aten::mm", 6, 8),
        launch(3, 7, takes=8),
        event("kernel of ?", 9, 10, cat="user_annotation"),
        launch(4, 11, takes=16),
        event("kernel of 1 head", 12, 13, cat="user_annotation"),
        launch(5, 14, takes=32),
        launch(6, 30, takes=64),
    )
    assert total == 125
    assert places == {"blocks.0.mixer": 9, "blocks.0.mlp_norm": 3, "head": 32}


def test_kernels_of_compiled_blocks() -> None:
    def block(index: int, at: float, number: int) -> list[dict[str, Any]]:
        return [
            event(f"module blocks.{index}", at, at + 9, cat="user_annotation"),
            event("CompiledFunction", at + 1, at + 8, Sequence_number=number),
            event("## Call CompiledFxGraph abc ##", at + 2, at + 7),
            event("kernel of 1 mixer.conv, 1 model", at + 3, at + 4, cat="user_annotation"),
            *launch(number, at + 5, takes=4),
        ]

    def gradients(at: float, number: int) -> list[dict[str, Any]]:
        return [
            event("autograd::engine::evaluate_function: CompiledFunctionBackward", at, at + 9, Sequence_number=number),
            event("## Call CompiledFxGraph def ##", at + 2, at + 7),
            event("kernel of 2 mlp", at + 3, at + 4, cat="user_annotation"),
            *launch(10 + number, at + 5, takes=8),
        ]

    _, places = device_times(event("step", 0, 100), block(0, 1, 1), block(1, 11, 2), gradients(21, 2), gradients(31, 1))
    assert places == {
        "blocks.0.mixer.conv": 2,
        "blocks.0": 2,
        "blocks.0.mlp": 8,
        "blocks.1.mixer.conv": 2,
        "blocks.1": 2,
        "blocks.1.mlp": 8,
    }


@pytest.mark.parametrize(
    ("place", "kind", "layer"),
    [
        ("blocks.12.mixer.norm", "mixer", 12),
        ("blocks.3.mlp_norm", "norm", 3),
        ("blocks.3.mlp.out_proj", "mlp", 3),
        ("blocks.3", "other", 3),
        ("norm", "norm", None),
        ("cross_entropy", "head", None),
        ("embedding", "embedding", None),
        ("optimizer", "optimizer", None),
        ("model", "other", None),
        ("mixer.conv", "mixer", None),
    ],
)
def test_kind_and_layer_of_a_place(place: str, kind: str, layer: int | None) -> None:
    assert (kind_of(place), layer_of(place)) == (kind, layer)
