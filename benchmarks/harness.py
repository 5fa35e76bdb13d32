"""What the measurements on a GPU share: the command line, the result file, times, memory, errors, a table's line.

A benchmark measures parts, all or some of them in a run, and keeps them in one JSON file for each GPU. A run replaces
the parts that it measures; the others stay if they are of the same machine, versions and commit.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.files import require_writable, write_whole
from zoo.machine import describe, slug
from zoo.timing import graph_ms, rounded, spread

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Part:
    """One of the things that a benchmark measures.

    Attributes:
        description: for the help, and above the table.
        measure: prints the table, and returns what the file keeps.
        plot: draws it: from the whole content of the file, into an image.
    """

    description: str
    measure: Callable[[], dict[str, Any]]
    plot: Callable[[dict[str, Any], Path], None] | None = None


@dataclass(frozen=True)
class Benchmark:
    """What a script measures on one CUDA GPU, beside FLA where flash-linear-attention is installed.

    Attributes:
        name: what its files are called, before the name of the GPU.
        kind: what its parts are called.
        parts: by name, in the order in which they are measured.
        fla_module: what it needs of FLA.
        settings: for the header of the file, after the machine and FLA's version.
    """

    name: str
    kind: str
    parts: dict[str, Part]
    fla_module: str
    settings: dict[str, Any]

    def make_parser(self, description: str, out: str) -> argparse.ArgumentParser:
        """The options that every benchmark has.

        Args:
            description: of the benchmark, in a line.
            out: what goes into the folder.
        """
        width = max(map(len, self.parts)) + 2
        listed = "\n".join(f"  {name:<{width}}{part.description.rstrip('.')}" for name, part in self.parts.items())
        parser = argparse.ArgumentParser(
            description=description,
            epilog=f"{self.kind}s:\n{listed}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        wanted = "what to measure, see below; default: everything"
        parser.add_argument("parts", nargs="*", metavar=self.kind.upper(), help=wanted)
        parser.add_argument("--out", type=Path, default=Path("."), help=f"folder of {out} (default: .)")
        return parser

    def parse_args(self, parser: argparse.ArgumentParser) -> argparse.Namespace:
        """The command line, its parts in order; without a GPU the end."""
        args = parser.parse_args()
        if unknown := [name for name in args.parts if name not in self.parts]:
            parser.error(f"unknown {self.kind} {unknown[0]!r}: expected some of {', '.join(self.parts)}")
        args.parts = [name for name in self.parts if name in args.parts or not args.parts]
        try:
            require_writable(args.out)
        except OSError as error:
            parser.error(f"--out: cannot write there: {error}")
        if not torch.cuda.is_available():
            sys.exit(f"{self.name}_gpu needs a CUDA GPU, and torch finds none here.")
        return args

    def run(self, names: list[str], folder: Path) -> None:
        """Measure, print, write after each part."""
        machine = describe(DEVICE)
        path = folder / f"{self.name}_{slug(DEVICE)}.json"
        result = {"machine": machine, "fla": fla_version(self.fla_module)} | self.settings
        result |= self.previous(path, result)
        for name in names:
            part, begin = self.parts[name], time.perf_counter()
            print(f"\n{name}: {part.description}", flush=True)
            result[name] = part.measure()
            write_whole(path, lambda temporary: temporary.write_text(json.dumps(result, indent=2) + "\n"))
            if part.plot:
                part.plot(result, path.with_name(f"{path.stem}_{name}.png"))
            print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        print(path)

    def previous(self, path: Path, header: dict[str, Any]) -> dict[str, Any]:
        """The parts in a file of the same machine, versions and commit."""
        if not path.exists():
            return {}
        result = json.loads(path.read_text())
        same = all(result["machine"][key] == header["machine"][key] for key in ("device", "torch", "triton", "commit"))
        if same and result["fla"] == header["fla"]:
            return {name: part for name, part in result.items() if name in self.parts}
        print(f"{path} is of another machine, version or commit: it will be replaced", file=sys.stderr, flush=True)
        return {}


def fla_version(module: str) -> str | None:
    """The version of flash-linear-attention, or None, and why, where that module of it cannot be imported."""
    try:
        found = version("flash-linear-attention")
        import_module(module)
    except (ImportError, PackageNotFoundError) as error:
        print(f"FLA cannot be imported ({error}): its figures are absent.", flush=True)
        return None
    return found


def start(script: str, function: str, *arguments: Any, environment: dict[str, str]) -> subprocess.Popen[str]:
    """A process that calls a function of a script and prints what it returns as JSON."""
    code = f"import json, runpy; print(json.dumps(runpy.run_path({script!r})[{function!r}](*{arguments!r})))"
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)


def compile_in_parallel(script: str, jobs: Iterable[tuple[Any, ...]]) -> None:
    """Fill Triton's cache of compiled kernels, not that of tuned choices: tuning wants the GPU for itself.

    Args:
        script: whose `compile_ahead` is called, in a process for each job.
        jobs: its arguments.
    """
    children = {job: start(script, "compile_ahead", *job, environment={"FLA_CACHE_RESULTS": "0"}) for job in jobs}
    for job, child in children.items():
        child.communicate()
        print(f"compiled {job}" if child.returncode == 0 else f"{job} failed to compile", file=sys.stderr, flush=True)


def first_calls_s(script: str, function: str) -> list[float | None]:
    """What a function of a script returns, the seconds of its calls, in a fresh process without compiled kernels."""
    with tempfile.TemporaryDirectory() as folder:
        child = start(script, function, environment={"TRITON_CACHE_DIR": folder})
        output, _ = child.communicate()
    if child.returncode:
        raise RuntimeError("the fresh process failed")
    return json.loads(output.splitlines()[-1])


def seconds_of(call: Callable[[], Any], count: int = 2) -> list[float | None]:
    """The seconds that each of so many calls takes."""
    seconds = []
    for _ in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(rounded(time.perf_counter() - begin))
    return seconds


def gpu_times(calls: dict[str, Callable[[], Any]]) -> tuple[str, dict[str, Any]]:
    """How it was measured, and milliseconds of each: CUDA graphs, or the profiler for all if one cannot be captured."""
    times = {}
    for name, call in calls.items():
        marks = graph_ms(call)
        if marks is None:
            return "profiler_sum", {name: {"median": rounded(profiled_ms(call))} for name, call in calls.items()}
        times[name] = spread(marks)
    return "cuda_graph", times


def profiled_ms(call: Callable[[], Any], count: int = 10) -> float:
    """Milliseconds that the kernels of a call take, one after another."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3 / count


def saved_for_backward(call: Callable[[], Any], inputs: dict[str, Tensor], cells: int) -> dict[str, Any]:
    """The bytes that a call keeps for its backward, in all and of each storage.

    Args:
        call: which computes with gradients.
        inputs: of the call, by name.
        cells: what the bytes are divided by.
    """
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(partial(_keep, kept), lambda x: x):
        outputs = call()
    names = {x.untyped_storage().data_ptr(): name for name, x in inputs.items()}
    parts = [
        {
            "input": names.get(place),
            "shape": list(x.shape),
            "dtype": str(x.dtype).removeprefix("torch."),
            "bytes": rounded(x.untyped_storage().nbytes() / cells),
        }
        for place, x in kept.items()
    ]
    total = sum(x.untyped_storage().nbytes() for x in kept.values()) / cells
    del outputs
    return {"bytes": rounded(total), "parts": parts}


def _keep(kept: dict[int, Tensor], x: Tensor) -> Tensor:
    """Note a saved tensor under its storage."""
    if x.numel():
        kept[x.untyped_storage().data_ptr()] = x
    return x


def relative_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float | None]:
    """|actual - expected| / |expected| of each; the difference itself, as NAME_absolute, where that is zero."""
    errors = {}
    for name, exact in expected.items():
        exact = exact.double()
        difference, size = (actual[name].double() - exact).norm().item(), exact.norm().item()
        errors[name if size else f"{name}_absolute"] = rounded(difference / size if size else difference)
    return errors


def ratios(errors: dict[str, float | None], base: dict[str, float | None]) -> dict[str, float | None]:
    """The first over the second, of the relative ones that are not 0 there."""
    return {
        name: None if error is None else rounded(error / below)
        for name, error in errors.items()
        if not name.endswith("_absolute") and (below := base.get(name))
    }


def show_errors(label: str, errors: dict[str, Any]) -> None:
    """Errors of each side, and their ratio; * marks an absolute one."""
    for side, row in errors.items():
        cells = [f"{name.removesuffix('_absolute')} {value:.1e}" + "*" * name.endswith("_absolute")
                 if value is not None else f"{name} -" for name, value in row.items()]  # fmt: skip
        print(f"{label:<30}{side:<14}" + "  ".join(cells), flush=True)


def verdict(name: str, value: float | None, target: float, *, least: bool) -> dict[str, Any]:
    """Whether a figure is at least, or at most, its target."""
    met = value is not None and (value >= target if least else value <= target)
    show(f"  target {name}", value, f"{'>=' if least else '<='} {target}", "met" if met else "MISSED")
    return {"name": name, "value": value, "target": target, "met": met}


def show(*cells: Any) -> None:
    """A line of a table."""
    words = ["-" if cell is None else f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"{words[0]:<34}" + "".join(f"{word:>13}" for word in words[1:]), flush=True)
