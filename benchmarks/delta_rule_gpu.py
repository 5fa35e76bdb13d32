"""The Triton delta rule on one CUDA GPU, beside FLA's in the same run where flash-linear-attention is installed.

    python benchmarks/delta_rule_gpu.py --out results                          # every section, and two plots
    python benchmarks/delta_rule_gpu.py ops gated --compile-ahead --out results   # these; the file keeps the others

GPU time is that of CUDA graph replays. Eager time is a call's, with what the host takes, after a flush of the L2 cache.

Shapes: B batch, T tokens, H heads, D head dimension of keys and values.
"""

import math
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.delta_rule import recurrent_delta_rule
from zoo.memory import peak_bytes
from zoo.timing import call_ms, copy_bandwidth

sys.path.insert(0, str(Path(__file__).parent))  # not there under PYTHONSAFEPATH, nor in the processes of `start`
from delta_rule_calls import (
    CHUNK,
    STEPS,
    Inputs,
    Rule,
    chunk_rules,
    compare,
    forward,
    forward_backward,
    make_gradients,
    make_inputs,
    make_stateful,
    rules,
)
from delta_rule_plots import plot_lengths, plot_ops
from harness import (
    DEVICE,
    Benchmark,
    Part,
    compile_in_parallel,
    first_calls_s,
    gpu_times,
    rounded,
    saved_for_backward,
    seconds_of,
    show,
    show_errors,
    spread,
    verdict,
)

HARD_SHAPE = 2, 2048, 16  # B, T, H of the section on errors
LENGTHS = [8192, 16384, 32768, 65536, 131072]

# B, T, H, D: how many times as fast as FLA. GPU forward, GPU forward and backward, eager forward and backward.
TARGETS: dict[tuple[int, ...], tuple[float, float, float | None]] = {
    (8, 2048, 16, 128): (2.8, 2.2, 4),
    (2, 8192, 16, 128): (2.2, 2.0, 2.5),
    (1, 32768, 16, 128): (2.2, 2.0, 2.5),
    (8, 4096, 16, 64): (2.2, 2.0, 3),
    (4, 4096, 8, 256): (1.5, 1.5, None),
}
FIRST_SHAPE = next(iter(TARGETS))
MAX_ERROR_RATIO, MAX_FLOAT32_ERROR, MAX_GROWTH, MAX_FIRST_CALL_S = 1.1, 1e-4, 1.1, 30


def measure(both: dict[str, Rule], inputs: Inputs, gradients: list[Tensor], steps: tuple[str, ...]) -> dict[str, Any]:
    """GPU and eager milliseconds of the steps for each side, and how many times as fast as FLA ours is."""
    found: dict[str, Any] = {}
    for step in steps:
        calls = {side: partial(STEPS[step], rule, inputs, gradients) for side, rule in both.items()}
        method, gpu = gpu_times(calls)
        eager = {side: spread(call_ms(call)) for side, call in calls.items()}
        found[step] = {"gpu_method": method, "gpu_ms": gpu, "eager_ms": eager}
        if "fla" in both:
            times = {"gpu": gpu, "eager": eager}
            found[step]["speedup"] = {
                key: rounded(ms["fla"]["median"] / ms["ours"]["median"]) for key, ms in times.items()
            }
    return found


def ops() -> dict[str, Any]:
    """Time and errors, forward and with the backward, at five shapes, beside the floor and FLA."""
    both, bandwidth = chunk_rules(), copy_bandwidth(DEVICE)
    result: dict[str, Any] = {"copy_tb_per_s": rounded(bandwidth / 1e12), "shapes": []}
    show("ms, B T H D", "", *(f"{side} {kind}" for kind in ("GPU", "eager") for side in both), "floor", "speedups")
    for shape, targets in TARGETS.items():
        inputs = make_inputs(shape)
        gradients = make_gradients(inputs)
        row: dict[str, Any] = {"shape": dict(zip("BTHD", shape, strict=True))}
        row |= measure(both, inputs, gradients, tuple(STEPS))
        tensor, strengths = (inputs[name].nbytes for name in ("q", "beta"))
        # q, k, v, o; then, read or written by the backward, q, k, v and the gradients of all four.
        moved = {"forward": 4 * tensor + strengths, "forward_backward": 11 * tensor + 3 * strengths}
        for step in STEPS:
            row[step]["floor_ms"] = rounded(1e3 * moved[step] / bandwidth)
            medians = [row[step][key][side]["median"] for key in ("gpu_ms", "eager_ms") for side in both]
            speedups = row[step].get("speedup", {}).values()
            show(f"{shape}", step.replace("_backward", "+bwd"), *medians, row[step]["floor_ms"], *speedups)
        row["errors"] = compare(both, inputs, gradients, rows=1)
        show_errors("  first row, float64", row["errors"])
        if "fla" in both:
            figures = [("forward", "gpu"), ("forward_backward", "gpu"), ("forward_backward", "eager")]
            row["targets"] = [
                verdict(f"{step} {kind}", row[step]["speedup"][kind], target, least=True)
                for (step, kind), target in zip(figures, targets, strict=True)
                if target is not None
            ]
        result["shapes"].append(row)
        del inputs, gradients
        torch.cuda.empty_cache()
    return result


def errors() -> dict[str, Any]:
    """Errors against float64 with hard inputs, a state in and out, and gradients through both results."""
    both = chunk_rules()
    cases = [(keys, beta) for keys in ("random", "similar") for beta in (0.0, 1.0, 2.0, None)] + [("zero", None)]
    rows, ratios = [], []
    for head_dim in (128, 64):
        for keys, beta in cases:
            inputs = make_stateful((*HARD_SHAPE, head_dim), keys, beta)
            found = compare(both, inputs, make_gradients(inputs))
            name = "in (0, 2)" if beta is None else beta
            finite = all(error is not None for error in found["ours"].values())
            rows.append({"D": head_dim, "keys": keys, "beta": name, "finite": finite, "errors": found})
            ratios += found.get("ours_over_fla", {}).values()
            show_errors(f"D {head_dim} {keys}, beta {name}", found)
    inputs = make_stateful((*HARD_SHAPE, 128), "random", None, torch.float32)
    float32 = compare({"ours": chunk_rules()["ours"]}, inputs, make_gradients(inputs))["ours"]
    show_errors("D 128 random, float32", {"ours": float32})
    worst = max((math.inf if error is None else error for error in float32.values()), default=0)
    targets = [verdict("float32 error", rounded(worst), MAX_FLOAT32_ERROR, least=False)]
    if ratios:
        targets.append(verdict("error over FLA's", max(ratios), MAX_ERROR_RATIO, least=False))
    targets.append(verdict("finite cases", sum(row["finite"] for row in rows) / len(rows), 1.0, least=True))
    return {"shape": "B {} T {} H {}".format(*HARD_SHAPE), "cases": rows, "float32": float32, "targets": targets}


def lengths() -> dict[str, Any]:
    """Time and memory per token as one sequence grows (B 1 H 16 D 128)."""
    rule, rows = chunk_rules()["ours"], []
    show("T", "fwd ms/1K", "both ms/1K", "peak MiB/1K")
    for length in LENGTHS:
        inputs = make_inputs((1, length, 16, 128))
        gradients = make_gradients(inputs)
        calls = {name: partial(step, rule, inputs, gradients) for name, step in STEPS.items()}
        method, times = gpu_times(calls)
        row: dict[str, Any] = {"T": length, "gpu_method": method}
        row |= {f"{name}_ms_per_1k": rounded((ms["median"] or 0) * 1024 / length) for name, ms in times.items()}
        row["peak_bytes"] = peak_bytes(calls["forward_backward"], DEVICE)
        show(*(x for key, x in row.items() if "T" in key or "1k" in key), row["peak_bytes"] / length / 1024)
        rows.append(row)
        del inputs, gradients, calls
    per_token = [
        (row["forward_ms_per_1k"], row["forward_backward_ms_per_1k"], row["peak_bytes"] / row["T"]) for row in rows
    ]
    growth = [max(b[i] / a[i] for a, b in pairwise(per_token)) for i in range(3)]
    names = ("forward time", "forward_backward time", "peak memory")
    targets = [
        verdict(f"{name} per token, T to 2T", rounded(value), MAX_GROWTH, least=False)
        for name, value in zip(names, growth, strict=True)
    ]
    return {"shape": "B 1 H 16 D 128", "rows": rows, "targets": targets}


def gated() -> dict[str, Any]:
    """The rule with a decay: against itself without one, against FLA's gated rule, errors against float64."""
    both = chunk_rules(gated=True)
    inputs = make_inputs(FIRST_SHAPE, gated=True)
    gradients = make_gradients(inputs)
    plain = {name: x for name, x in inputs.items() if name != "g"}
    result: dict[str, Any] = {"shape": dict(zip("BTHD", FIRST_SHAPE, strict=True))}
    trained = both
    try:
        for rule in both.values():
            forward_backward(rule, inputs, gradients)
    except RuntimeError as error:  # FLA refuses where its backward would be wrong
        print(f"FLA's backward is left out: {error}", flush=True)
        result["fla_backward"] = str(error)
        trained = {"ours": both["ours"]}
    result["with_g"] = {}
    for name, sides in (("forward", both), ("forward_backward", trained)):
        result["with_g"] |= measure(sides, inputs, gradients, (name,))
    result["without_g"] = measure({"ours": both["ours"]}, plain, gradients, tuple(STEPS))
    show(f"{FIRST_SHAPE}", *(f"{side} {kind}" for kind in ("GPU", "eager") for side in both))
    for name, step in ((name, step) for step in STEPS for name in ("with_g", "without_g")):
        row = result[name][step]
        medians = [row[key].get(side, {}).get("median") for key in ("gpu_ms", "eager_ms") for side in both]
        show(f"{step} {name}", *medians)
    result["errors"] = compare(trained, inputs, gradients, rows=1)
    show_errors("first row, float64", result["errors"])
    return result


def step() -> dict[str, Any]:
    """A decoding step: every state read and written once (B 64 T 1 H 16 D 128)."""
    shape = 64, 1, 16, 128
    both = rules(recurrent_delta_rule, "delta_rule", "fused_recurrent_delta_rule")
    inputs = make_inputs(shape)
    inputs["initial_state"] = torch.randn(shape[0], shape[2], shape[3], shape[3], device=DEVICE)
    moved = sum(x.nbytes for x in inputs.values()) + inputs["v"].nbytes + inputs["initial_state"].nbytes
    result = {"shape": dict(zip("BTHD", shape, strict=True)), "bytes": moved}
    result |= measure(both, inputs, [], ("forward",))
    times = {kind: result["forward"][f"{kind}_ms"] for kind in ("gpu", "eager")}
    result["tb_per_s"] = {
        kind: {side: rounded(moved / x["median"] / 1e9) for side, x in ms.items()} for kind, ms in times.items()
    }
    show(f"{shape}", "GPU ms", "eager ms", "TB/s GPU", "TB/s eager")
    for side in both:
        show(side, *(x[side]["median"] for x in times.values()), *(x[side] for x in result["tb_per_s"].values()))
    return result


def cold() -> dict[str, Any]:
    """Seconds of the first call, forward and backward, in a fresh process without compiled kernels."""
    first, second = first_calls_s(__file__, "first_call")
    target = verdict("first call, s", first, MAX_FIRST_CALL_S, least=False)
    return {"first_call_s": first, "second_call_s": second, "targets": [target]}


def first_call() -> list[float | None]:
    """What `cold` measures, in its process: the first call and the second."""
    inputs = make_inputs(FIRST_SHAPE)
    return seconds_of(partial(forward_backward, chunk_rules()["ours"], inputs, make_gradients(inputs)))


def memory() -> dict[str, Any]:
    """Bytes per token and head that are kept for the backward, counted, and by arithmetic (B 8 T 2048 H 16)."""
    result: dict[str, Any] = {}
    show("D", "kept", "of inputs", "by arithmetic")
    for head_dim in (64, 128, 256):
        shape = 8, 2048, 16, head_dim
        inputs = make_inputs(shape)
        inputs["beta"] = inputs["beta"].detach().float().requires_grad_()  # as a layer gives it: else a copy is kept
        found = saved_for_backward(partial(chunk_rules()["ours"], **inputs), inputs, math.prod(shape[:3]))
        of_inputs = sum(part["bytes"] for part in found["parts"] if part["input"])
        show(head_dim, found["bytes"], of_inputs, saved_bytes(head_dim))
        result[f"D {head_dim}"] = found | {"by_arithmetic": saved_bytes(head_dim)}
    return result


def saved_bytes(head_dim: int) -> float:
    """Of a token and head in half precision: q, k, beta; errors; states; inverse and scores; scales of beta, q, k."""
    return float(4 * head_dim + 4 + 2 * head_dim + 2 * head_dim**2 / CHUNK + 2 * 2 * CHUNK + 3 * 4)


COMPILED_AHEAD = {"ops": (64, 128, 256), "errors": (64, 128), "gated": (128,)}


def compile_ahead(section: str, head_dim: int) -> None:
    """Call what a section calls with heads of one size, so that Triton keeps its kernels."""
    both = chunk_rules(gated=section == "gated")
    shapes = [FIRST_SHAPE] if section == "gated" else [shape for shape in TARGETS if shape[3] == head_dim]
    batches = (make_inputs(shape, gated=section == "gated") for shape in shapes)
    for inputs in [make_stateful((*HARD_SHAPE, head_dim), "random", None)] if section == "errors" else batches:
        for rule in both.values():
            forward(rule, inputs, [])
            forward_backward(rule, inputs, make_gradients(inputs))
    torch.cuda.synchronize()


SECTIONS = (ops, errors, lengths, gated, step, cold, memory)
PLOTS = {ops: plot_ops, lengths: plot_lengths}


def main() -> None:
    """Measure and plot what the command line asks for."""
    benchmark = Benchmark(
        name="delta_rule",
        kind="section",
        parts={section.__name__: Part(section.__doc__ or "", section, PLOTS.get(section)) for section in SECTIONS},
        fla_module="fla.ops.delta_rule",
        settings={"dtype": "bfloat16"},
    )
    parser = benchmark.make_parser((__doc__ or "").partition("\n")[0], out="the JSON and the plots")
    parser.add_argument(
        "--compile-ahead",
        action="store_true",
        help="first compile what the sections need in several processes: FLA tunes, and one process takes minutes",
    )
    args = benchmark.parse_args(parser)
    if args.compile_ahead:
        jobs = [(section, head_dim) for section in args.parts for head_dim in COMPILED_AHEAD.get(section, ())]
        compile_in_parallel(__file__, jobs)
    benchmark.run(args.parts, args.out)


if __name__ == "__main__":
    main()
