"""What the measurements on a GPU share: the command line, the result file, times, errors, a table's line.

A benchmark measures parts, all or some of them in a run, and keeps them in one JSON file for each GPU. A run replaces
the parts that it measures; the others stay if they are of the same machine, versions and commit.
"""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.files import require_writable, write_whole
from zoo.machine import describe

DEVICE = torch.device("cuda")
QUANTILES = (0.5, 0.2, 0.8)


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
        listed = "\n".join(f"  {name:<9}{part.description.rstrip('.')}" for name, part in self.parts.items())
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
        path = folder / f"{self.name}_{slug(machine['device'])}.json"
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


def slug(device: str) -> str:
    """The name of a GPU for a file: h200 for NVIDIA H200."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower().removeprefix("nvidia").strip()).strip("_")


def fla_version(module: str) -> str | None:
    """The version of flash-linear-attention, or None, and why, where that module of it cannot be imported."""
    try:
        found = version("flash-linear-attention")
        import_module(module)
    except (ImportError, PackageNotFoundError) as error:
        print(f"FLA cannot be imported ({error}): its figures are absent.", flush=True)
        return None
    return found


def call_ms(call: Callable[[], Any]) -> list[float]:
    """Milliseconds of a call with what the host takes, after a flush of the L2 cache: the `QUANTILES`."""
    from triton.testing import do_bench

    marks: Any = do_bench(call, warmup=15, rep=60, quantiles=QUANTILES)
    return marks


def graph_ms(call: Callable[[], Any]) -> list[float] | None:
    """Milliseconds of a call replayed as a CUDA graph: the `QUANTILES`, or None where it cannot be captured."""
    from triton.testing import do_bench_cudagraph

    try:
        marks: Any = do_bench_cudagraph(call, rep=50, quantiles=QUANTILES)
    except RuntimeError as error:
        print(f"no CUDA graph: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        torch.cuda.synchronize()
        return None
    return marks


def relative_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float | None]:
    """|actual - expected| / |expected| of each; the difference itself, as NAME_absolute, where that is zero."""
    errors = {}
    for name, exact in expected.items():
        exact = exact.double()
        difference, size = (actual[name].double() - exact).norm().item(), exact.norm().item()
        errors[name if size else f"{name}_absolute"] = rounded(difference / size if size else difference)
    return errors


def rounded(value: float) -> float | None:
    """To four digits; None for what JSON does not know."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def show(*cells: Any) -> None:
    """A line of a table."""
    words = ["-" if cell is None else f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"{words[0]:<34}" + "".join(f"{word:>13}" for word in words[1:]), flush=True)
