"""Profiling the steps of a model."""

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from zoo.decoding import Replayed
from zoo.files import write_whole
from zoo.model import LanguageModel
from zoo.profiling.attribution import STEP, spent
from zoo.profiling.places import KINDS, MODEL, MODULE, kind_of, layer_of
from zoo.profiling.provenance import replaced

__all__ = ["profile_step"]


def profile_step(
    step: Callable[[], object], model: LanguageModel, device: torch.device, trace: Path | None, *, count: int = 3
) -> dict[str, Any]:
    """Where the time of a step goes.

    On CUDA it is the time of kernels and copies on the device, added up; on a CPU, that of the thread that steps.

    What runs in a module's call is that module's, and so are the gradients of it. Of compiled code a profile knows the
    modules where it was compiled in `provenance`; the time of a kernel that several modules were fused into is divided
    by the number of operations that each of them has in it, so that the shares of norms, residual sums and activations
    are estimates. A step of `zoo.decoding`, which is a replay of a graph on CUDA, launches its kernels one by one here:
    they take as long, the gaps between them do not.

    Args:
        step: is called once, so that nothing compiles in the profile, and then ``count`` times.
        model: that it runs.
        device: where it runs.
        trace: file for a Chrome trace of these steps, its name ending in .json.gz, or None for none.
        count: how many steps are profiled.

    Returns:
        ``total_ms``; ``kinds_ms`` of each of `KINDS`, which add up to the total; ``layers_ms``, for each layer its
        ``layer``, the name of its mixer as ``kind``, ``ms`` of the whole layer and ``mixer_ms`` of its mixer;
        ``unattributed_ms``, the part of "other" of which nothing is known; ``trace``, the file's name, or None. Each
        for one step, in milliseconds.

    Raises:
        ValueError: the trace's name has another ending.
    """
    if trace is not None and not trace.name.endswith(".json.gz"):
        raise ValueError(f"trace: got {trace}, allowed: a name that ends in .json.gz")
    events = _events(step, model, device, trace, count)
    total, places = spent(events, on_device=device.type == "cuda")
    kinds = dict.fromkeys(KINDS, 0.0)
    layers: list[dict[str, Any]] = [
        {"layer": index, "kind": _mixer_name(layer), "ms": 0.0, "mixer_ms": 0.0}
        for index, layer in enumerate(model.config.layers)
    ]
    for place, microseconds in places.items():
        kind, index, ms = kind_of(place), layer_of(place), microseconds / 1e3 / count
        kinds[kind] += ms
        if index is not None:
            layers[index]["ms"] += ms
            layers[index]["mixer_ms"] += ms if kind == "mixer" else 0.0
    total_ms = total / 1e3 / count
    unattributed = max(total_ms - sum(kinds.values()), 0.0)
    kinds["other"] += unattributed
    return {
        "total_ms": total_ms,
        "kinds_ms": kinds,
        "layers_ms": layers,
        "unattributed_ms": unattributed,
        "trace": None if trace is None else trace.name,
    }


def _mixer_name(layer: Any) -> str:
    """Of a layer's block, which may be a user's own."""
    return layer.options.mixer.name if hasattr(layer.options, "mixer") else layer.name


def _events(
    step: Callable[[], object], model: nn.Module, device: torch.device, trace: Path | None, count: int
) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        file = trace or Path(folder) / "trace.json.gz"
        profiler = _profile(step, model, device, count)
        write_whole(file, lambda temporary: profiler.export_chrome_trace(str(temporary)))
        with gzip.open(file) as content:
            return json.load(content)["traceEvents"]


def _profile(step: Callable[[], object], model: nn.Module, device: torch.device, count: int) -> profile:
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with _launched_one_by_one():
        step()
        _finish(device)
        with _named(model), profile(activities=activities) as profiler:
            for _ in range(count):
                with record_function(STEP):
                    step()
            _finish(device)
    return profiler


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _launched_one_by_one() -> Iterator[None]:
    with replaced(Replayed, "__call__", lambda self: self.call()):
        yield


@contextmanager
def _named(model: nn.Module) -> Iterator[None]:
    """A range around each call of the model, of its parts, and of the parts of its blocks.

    Hooks would be compiled into graphs, or make them compile again; graphs do not know of the call of a module.
    """
    names = {module: name or MODEL for name, module in model.named_modules() if _is_part(name)}
    call: Callable[..., Any] = nn.Module.__call__

    def named_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module not in names:
            return call(module, *args, **kwargs)
        with record_function(MODULE + names[module]):
            return call(module, *args, **kwargs)

    with replaced(nn.Module, "__call__", named_call):
        yield


def _is_part(name: str) -> bool:
    return name.count(".") <= (2 if name.startswith("blocks.") else 0)
