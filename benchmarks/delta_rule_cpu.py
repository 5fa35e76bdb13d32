"""The chunked delta rule against the token-by-token reference on the CPU, in one run, results compared in that run.

    python benchmarks/delta_rule_cpu.py                  # B2 T2048 H4 D64 float32, writes delta_rule_cpu.json beside it

Shapes: B batch, T tokens, H heads, D head dimension of keys and values.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.files import write_whole
from zoo.kernels.delta_rule import chunk_delta_rule, recurrent_delta_rule
from zoo.machine import describe

HERE = Path(__file__).resolve().parent
FORMS = {"chunked": chunk_delta_rule, "reference": recurrent_delta_rule}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default in {"batch": 2, "seq-len": 2048, "heads": 4, "dim": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="of the inputs")
    parser.add_argument("--rounds", type=int, default=11, help="timed calls of each form, in turn, after a warm-up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--out", type=Path, default=HERE / "delta_rule_cpu.json", help="where the JSON goes")
    return parser.parse_args()


def make_inputs(args: argparse.Namespace) -> list[Tensor]:
    """q, k, v, beta as the layer gives them: unit queries and keys, beta in (0, 1)."""
    generator = torch.Generator().manual_seed(0)
    shape = (args.batch, args.seq_len, args.heads, args.dim)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    beta = torch.rand(shape[:3], generator=generator)
    return [x.requires_grad_() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta)]


def forward(function: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor]) -> None:
    """Without gradients, as in prefill."""
    with torch.no_grad():
        function(*inputs)


def forward_backward(function: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """o and the gradients of q, k, v, beta for a fixed upstream gradient."""
    o, _ = function(*inputs)
    upstream = inputs[2].detach()
    return o.detach(), *torch.autograd.grad(o, inputs, upstream)


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def measure(step: Callable[..., Any], inputs: list[Tensor], rounds: int) -> dict[str, Any]:
    """Median, p20 and p80 of both forms, which take turns so that other load on the machine meets both."""
    times: dict[str, list[float]] = {label: [] for label in FORMS}
    for i in range(rounds + 1):
        for label, function in FORMS.items():
            elapsed = timed(lambda function=function: step(function, inputs))
            if i > 0:
                times[label].append(elapsed)
        print(f"{step.__name__}: round {i} of {rounds}", file=sys.stderr, flush=True)
    row: dict[str, Any] = {}
    for label, values in times.items():
        marks = torch.tensor(values).quantile(torch.tensor([0.5, 0.2, 0.8])).tolist()
        row[label] = {key: round(mark, 2) for key, mark in zip(("median_ms", "p20_ms", "p80_ms"), marks, strict=True)}
    row["speedup"] = round(row["reference"]["median_ms"] / row["chunked"]["median_ms"], 1)
    return row


def relative_errors(inputs: list[Tensor]) -> dict[str, float]:
    """Of the chunked form against the reference, both float32: o and each gradient."""
    actual, expected = (forward_backward(function, inputs) for function in FORMS.values())
    names = ("o", "dq", "dk", "dv", "dbeta")
    return {n: ((a - e).norm() / e.norm()).item() for n, a, e in zip(names, actual, expected, strict=True)}


def main() -> None:
    """Check, measure, print, write."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    inputs = make_inputs(args)
    print("comparing the two ...", file=sys.stderr, flush=True)
    errors = relative_errors(inputs)
    if max(errors.values()) > 1e-5:
        sys.exit(f"the chunked form disagrees with the reference, nothing measured: {errors}")
    times = {step.__name__: measure(step, inputs, args.rounds) for step in (forward, forward_backward)}
    shape = {"B": args.batch, "T": args.seq_len, "H": args.heads, "D": args.dim, "dtype": "float32"}
    result = {
        "machine": describe(torch.device("cpu")),
        "shape": shape,
        "rounds": args.rounds,
        "relative_errors": errors,
        "times": times,
    }

    print(f"{'ms: median (p20 - p80)':<24}{'chunked':>28}{'reference':>28}{'speedup':>10}")
    for name, row in times.items():
        cells = [f"{row[x]['median_ms']} ({row[x]['p20_ms']} - {row[x]['p80_ms']})" for x in FORMS]
        print(f"{name:<24}{cells[0]:>28}{cells[1]:>28}{row['speedup']:>9}x")
    write_whole(args.out, lambda path: path.write_text(json.dumps(result, indent=2) + "\n"))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
