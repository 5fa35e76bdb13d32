"""A chunked operation against its token-by-token reference on the CPU, in one run, results compared in that run.

    python benchmarks/chunked_cpu.py delta_rule       # B2 T2048 H4 D64 float32, writes delta_rule_cpu.json beside it
    python benchmarks/chunked_cpu.py deltaformer      # B1 T1024 H4 D64 float32, writes deltaformer_cpu.json

Shapes: B batch, T tokens, H heads, D head dimension of keys and values.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.files import require_file, write_whole
from zoo.kernels.delta_rule import chunk_delta_rule, recurrent_delta_rule
from zoo.kernels.deltaformer import deltaformer_write
from zoo.machine import describe
from zoo.memory import peak_cpu_bytes

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Operation:
    """What is measured.

    Attributes:
        shape: default B, T, H, D.
        inputs: makes the inputs of a shape.
        gradients: names of theirs.
        forms: the two implementations; a tuple's first entry is the output.
    """

    shape: tuple[int, int, int, int]
    inputs: Callable[[tuple[int, ...]], list[Tensor]]
    gradients: tuple[str, ...]
    forms: dict[str, Callable[..., Any]]


def delta_rule_inputs(shape: tuple[int, ...]) -> list[Tensor]:
    """q, k, v, beta as the layer gives them: unit queries and keys, beta in (0, 1)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    beta = torch.rand(shape[:3], generator=generator)
    return [x.requires_grad_() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta)]


def deltaformer_inputs(shape: tuple[int, ...]) -> list[Tensor]:
    """w, k, v, alpha, beta as the layer gives them: keys of root mean square 1, compared with themselves; a copy of
    their own, so that each has a gradient."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    k = F.rms_norm(k, k.shape[-1:])
    alpha, beta = (torch.rand(shape[:3], generator=generator) for _ in range(2))
    return [x.requires_grad_() for x in (k.clone(), k, v, alpha, beta)]


OPERATIONS = {
    "delta_rule": Operation(
        shape=(2, 2048, 4, 64),
        inputs=delta_rule_inputs,
        gradients=("dq", "dk", "dv", "dbeta"),
        forms={"chunked": chunk_delta_rule, "reference": recurrent_delta_rule},
    ),
    "deltaformer": Operation(
        shape=(1, 1024, 4, 64),
        inputs=deltaformer_inputs,
        gradients=("dw", "dk", "dv", "dalpha", "dbeta"),
        forms={
            "chunked": partial(deltaformer_write, impl="torch"),
            "reference": partial(deltaformer_write, impl="reference"),
        },
    ),
}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("operation", choices=OPERATIONS, help="what to measure")
    for i, name in enumerate(("batch", "seq-len", "heads", "dim")):
        defaults = " or ".join(f"{operation.shape[i]} ({key})" for key, operation in OPERATIONS.items())
        parser.add_argument(f"--{name}", type=int, help=f"of the inputs; default: {defaults}")
    parser.add_argument("--rounds", type=int, default=11, help="timed calls of each form, in turn (default: 11)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads (default: all)")
    parser.add_argument("--out", type=Path, help="where the JSON goes; default: OPERATION_cpu.json beside this file")
    args = parser.parse_args()
    for name in ("batch", "seq_len", "heads", "dim", "rounds", "threads"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    args.out = args.out or HERE / f"{args.operation}_cpu.json"
    try:
        require_file(args.out)
    except OSError as error:
        parser.error(f"--out: cannot write there: {error}")
    return args


def forward(form: Callable[..., Any], inputs: list[Tensor]) -> Tensor:
    """Without gradients, as in prefill."""
    with torch.no_grad():
        return _output(form(*inputs))


def forward_backward(form: Callable[..., Any], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """The output and the gradients of all inputs for a fixed upstream gradient."""
    o = _output(form(*inputs))
    return o.detach(), *torch.autograd.grad(o, inputs, inputs[2].detach())


def _output(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def measure(step: Callable[..., Any], forms: dict[str, Any], inputs: list[Tensor], rounds: int) -> dict[str, Any]:
    """Median, p20 and p80 of both forms, which take turns so that other load on the machine meets both."""
    times: dict[str, list[float]] = {label: [] for label in forms}
    for i in range(rounds + 1):
        for label, form in forms.items():
            elapsed = timed(partial(step, form, inputs))
            if i > 0:
                times[label].append(elapsed)
        print(f"{step.__name__}: round {i} of {rounds}", file=sys.stderr, flush=True)
    row: dict[str, Any] = {}
    for label, values in times.items():
        marks = torch.tensor(values).quantile(torch.tensor([0.5, 0.2, 0.8])).tolist()
        row[label] = {key: round(mark, 2) for key, mark in zip(("median_ms", "p20_ms", "p80_ms"), marks, strict=True)}
    row["speedup"] = round(row["reference"]["median_ms"] / row["chunked"]["median_ms"], 1)
    return row


def peak_memory(operation: Operation, shape: tuple[int, ...]) -> list[dict[str, int]]:
    """The most bytes that the chunked form holds beside its inputs, at T, 2T and 4T."""
    batch, seq_len, *rest = shape
    rows = []
    for length in (seq_len, 2 * seq_len, 4 * seq_len):
        inputs = operation.inputs((batch, length, *rest))
        chunked = operation.forms["chunked"]
        peaks = {step.__name__: peak_cpu_bytes(partial(step, chunked, inputs)) for step in (forward, forward_backward)}
        rows.append({"T": length, **peaks})
        print(f"memory at T = {length} measured", file=sys.stderr, flush=True)
    return rows


def relative_errors(operation: Operation, inputs: list[Tensor]) -> dict[str, float]:
    """Of the chunked form against the reference, both float32: the output and each gradient."""
    actual, expected = (forward_backward(form, inputs) for form in operation.forms.values())
    names = ("output", *operation.gradients)
    return {n: ((a - e).norm() / e.norm()).item() for n, a, e in zip(names, actual, expected, strict=True)}


def main() -> None:
    """Check, measure, print, write."""
    args = parse_args()
    operation = OPERATIONS[args.operation]
    torch.set_num_threads(args.threads)
    given = (args.batch, args.seq_len, args.heads, args.dim)
    shape = tuple(default if size is None else size for size, default in zip(given, operation.shape, strict=True))
    inputs = operation.inputs(shape)
    print("comparing the two ...", file=sys.stderr, flush=True)
    errors = relative_errors(operation, inputs)
    if max(errors.values()) > 1e-5:
        sys.exit(f"the chunked form disagrees with the reference, nothing measured: {errors}")
    result = {
        "machine": describe(torch.device("cpu")),
        "operation": args.operation,
        "shape": {**dict(zip("BTHD", shape, strict=True)), "dtype": "float32"},
        "rounds": args.rounds,
        "relative_errors": errors,
        "times": {
            step.__name__: measure(step, operation.forms, inputs, args.rounds) for step in (forward, forward_backward)
        },
        "peak_bytes": peak_memory(operation, shape),
    }

    print(f"{'ms: median (p20 - p80)':<24}{'chunked':>28}{'reference':>28}{'speedup':>10}")
    for name, row in result["times"].items():
        cells = [f"{row[x]['median_ms']} ({row[x]['p20_ms']} - {row[x]['p80_ms']})" for x in operation.forms]
        print(f"{name:<24}{cells[0]:>28}{cells[1]:>28}{row['speedup']:>9}x")
    print(f"{'peak MiB, chunked':<24}{'forward':>28}{'forward_backward':>28}")
    for row in result["peak_bytes"]:
        print(f"T = {row['T']:<20}{row['forward'] / 2**20:>28.1f}{row['forward_backward'] / 2**20:>28.1f}")
    write_whole(args.out, lambda path: path.write_text(json.dumps(result, indent=2) + "\n"))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
