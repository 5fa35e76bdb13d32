"""The Deltaformer's write and read on one CUDA GPU, beside cuDNN's causal attention, and FLA's where it is installed.

    python benchmarks/deltaformer_gpu.py --out results                          # every section, and two plots
    python benchmarks/deltaformer_gpu.py ops model --compile-ahead --out results   # these; the file keeps the others

GPU time is that of CUDA graph replays. Eager time is a call's, with what the host takes, after a flush of the L2 cache:
FLA, which loops over rows and chunks in Python, has this alone. Its write is of queries, and so is ours where they are
compared; elsewhere it is of keys. Our write is the Triton one, with softmax; the read is the mixer's. cuDNN's attention
has the same q, k and v, as [B, H, T, D].

Shapes: B batch, T tokens, H heads, D head dimension of keys and values.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.deltaformer import CHUNK
from zoo.memory import peak_bytes
from zoo.timing import call_ms

sys.path.insert(0, str(Path(__file__).parent))  # not there under PYTHONSAFEPATH, nor in the processes of `start`
from delta_rule_calls import STEPS, Inputs, Rule, forward, forward_backward, make_gradients, make_inputs
from deltaformer_calls import (
    EXACT,
    OURS,
    cudnn_rule,
    cut,
    exact_results,
    fla_rule,
    heads_first,
    make_hard,
    op_rule,
    read_rule,
    results,
    rounding_errors,
    some,
    write_rule,
)
from deltaformer_errors import ERROR_DIMS, KERNELS, errors, over_limits, with_kernel
from deltaformer_plots import plot_lengths, plot_ops
from harness import (
    DEVICE,
    Benchmark,
    Part,
    compile_in_parallel,
    first_calls_s,
    gpu_times,
    ratios,
    relative_errors,
    rounded,
    saved_for_backward,
    seconds_of,
    show,
    show_errors,
    spread,
    verdict,
)
from models_gpu import fla_step, our_step, train_both

# B, T, H, D: GPU time over cuDNN's at most, forward, forward and backward; eager, how many times as fast as FLA.
TARGETS: dict[tuple[int, ...], tuple[float, float, float | None, float | None]] = {
    (4, 4096, 16, 128): (3.2, 3.5, 10, 6),
    (4, 4096, 16, 64): (3.0, 3.5, 20, 6),
    (1, 16384, 16, 128): (3.0, 3.2, 3.5, 3),
    (8, 2048, 16, 64): (3.2, 3.5, None, None),
}
FIRST_SHAPE = next(iter(TARGETS))
WRITE_SHAPE, MAX_WRITE_MS = (2, 8192, 32, 128), 6
CHECKED_HEADS = 2
FLA_REP = 300  # milliseconds: a call takes up to 60

LENGTHS = [2048, 4096, 8192, 16384, 32768, 65536]
MAX_GROWTH, MAX_FIRST_CALL_S = 1.1, 40
PACKED_LENGTH, DOCUMENTS = 32768, (1, 8, 32, 128)

MODEL_SHAPE, MIN_MODEL_SPEEDUP = (4, 2048), 8
KINDS = {
    "fused by Inductor": ("triton_",),  # before the read: what stands behind it is named after it
    "write": ("write_kernel", "solve_kernel", "row_gradients_kernel", "key_gradients_kernel"),
    "read": ("sdpa", "flash", "fmha"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "optimiser": ("multi_tensor_apply",),
}

Case = tuple[Rule, Inputs, list[Tensor]]
"""What a step is called with."""


def make_cases(inputs: Inputs, gradients: list[Tensor]) -> dict[str, Case]:
    """cuDNN's attention, both stages and the op."""
    attended = {name: heads_first(x) for name, x in some(inputs, "q", "k", "v").items()}
    return {
        "cudnn": (cudnn_rule, attended, [heads_first(x) for x in gradients]),
        "write": (write_rule(OURS), some(inputs, "k", "v", "beta"), gradients),
        "read": (read_rule, some(inputs, "q", "k", "v"), gradients),
        "op": (op_rule(OURS), inputs, gradients),
    }


def probe_fla(inputs: Inputs, gradients: list[Tensor]) -> Rule | None:
    """FLA's rule, compiled and tuned, where it is installed and runs at this shape."""
    rule = fla_rule()
    if rule is None:
        return None
    try:
        forward(rule, inputs, [])
        forward_backward(rule, inputs, gradients)
        torch.cuda.synchronize()
    except Exception as error:  # of its compiler, of memory
        print(f"FLA's is left out: {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
        return None
    return rule


def measure(cases: dict[str, Case], fla: Rule | None) -> dict[str, Any]:
    """GPU milliseconds of the cases, eager ones of the op, of queries too, and of FLA, and ratios, for both steps."""
    _, inputs, gradients = cases["op"]
    eager_rules = {"op": op_rule(OURS), "op, queries": op_rule(OURS, by_query=True)}
    found: dict[str, Any] = {}
    for name, step in STEPS.items():
        calls = {side: partial(step, *case) for side, case in cases.items()}
        method, gpu = gpu_times(calls)
        eager = {side: spread(call_ms(partial(step, rule, inputs, gradients))) for side, rule in eager_rules.items()}
        row: dict[str, Any] = {"gpu_method": method, "gpu_ms": gpu, "eager_ms": eager}
        row["gpu_over_cudnn"] = rounded(gpu["op"]["median"] / gpu["cudnn"]["median"])
        if fla is not None:
            eager["fla"] = spread(call_ms(partial(step, fla, inputs, gradients), rep=FLA_REP))
            row["eager_speedup"] = rounded((eager["fla"]["median"] or 0) / (eager["op, queries"]["median"] or math.inf))
        found[name] = row
    return found


def compare(inputs: Inputs, gradients: list[Tensor], fla: Rule | None) -> dict[str, Any]:
    """Errors with queries, of the first heads of the first row against float64, beside those of rounding, and FLA's."""
    exact = exact_results(EXACT, inputs, gradients, CHECKED_HEADS, by_query=True)
    errors = {"ours": relative_errors(cut(results(OURS, inputs, gradients, by_query=True), CHECKED_HEADS), exact)}
    errors["rounding"] = rounding_errors(exact)
    errors["over_rounding"] = ratios(errors["ours"], errors["rounding"])
    if fla is not None:
        found = cut(forward_backward(fla, inputs, gradients), CHECKED_HEADS)
        errors["fla"] = relative_errors(found, {name: exact[name] for name in found})
    return errors


def ops() -> dict[str, Any]:
    """Time and errors, forward and with the backward, at four shapes, beside cuDNN's attention and FLA; the write."""
    shapes = []
    sides = ("cudnn", "write", "read", "op")
    heads = *(f"{side} GPU" for side in sides), "over cudnn", "op eager", "of queries", "fla eager", "speedup"
    show("ms, B T H D", "", *heads)
    for shape, targets in TARGETS.items():
        inputs = make_inputs(shape)
        gradients = make_gradients(inputs)
        fla = probe_fla(inputs, gradients)
        row: dict[str, Any] = {"shape": dict(zip("BTHD", shape, strict=True))}
        row |= measure(make_cases(inputs, gradients), fla)
        for step in STEPS:
            figures = row[step]
            gpu = [figures["gpu_ms"][side]["median"] for side in sides]
            eager = [figures["eager_ms"].get(side, {}).get("median") for side in ("op", "op, queries", "fla")]
            label = step.replace("_backward", "+bwd")
            show(f"{shape}", label, *gpu, figures["gpu_over_cudnn"], *eager, figures.get("eager_speedup"))
        row["errors"] = compare(inputs, gradients, fla)
        show_errors("  first heads, float64", row["errors"])
        row["targets"] = (
            [verdict("errors over their limits", over_limits(row["errors"]["over_rounding"]), 1, least=False)]
            + [
                verdict(f"{step} over cuDNN", row[step]["gpu_over_cudnn"], target, least=False)
                for step, target in zip(STEPS, targets[:2], strict=True)
            ]
            + [
                verdict(f"{step} over FLA", row[step]["eager_speedup"], target, least=True)
                for step, target in zip(STEPS, targets[2:], strict=True)
                if fla is not None and target is not None
            ]
        )
        shapes.append(row)
        del inputs, gradients, fla
        torch.cuda.empty_cache()
    return {"shapes": shapes, "write": write_alone()}


def write_alone() -> dict[str, Any]:
    """The write, forward, at a shape of the paper's, arXiv 2505.19488."""
    inputs = some(make_inputs(WRITE_SHAPE), "k", "v", "beta")
    method, times = gpu_times({"write": partial(forward, write_rule(OURS), inputs, [])})
    row: dict[str, Any] = {"shape": dict(zip("BTHD", WRITE_SHAPE, strict=True)), "gpu_method": method, "gpu_ms": times}
    show(f"{WRITE_SHAPE}, the write", "forward", "", times["write"]["median"])
    found = cut({"u": OURS(inputs["k"], inputs["k"], inputs["v"], None, inputs["beta"]).detach()}, CHECKED_HEADS)
    k, v, beta = (cut(inputs, CHECKED_HEADS)[name].detach().double() for name in ("k", "v", "beta"))
    exact = {"u": EXACT(k, k, v, None, beta)}
    row["errors"] = {"ours": relative_errors(found, exact), "rounding": rounding_errors(exact)}
    row["errors"]["over_rounding"] = ratios(row["errors"]["ours"], row["errors"]["rounding"])
    row["targets"] = [
        verdict("errors over their limits", over_limits(row["errors"]["over_rounding"]), 1, least=False),
        verdict("write, ms", times["write"]["median"], MAX_WRITE_MS, least=False),
    ]
    return row


def lengths() -> dict[str, Any]:
    """Time and memory per token of the write as one sequence grows (B 1 H 16 D 128)."""
    rows: list[dict[str, Any]] = []
    show("T", "fwd ms/1K", "both ms/1K", "fwd MiB/1K", "both MiB/1K")
    for length in LENGTHS:
        inputs = make_inputs((1, length, 16, 128))
        case = write_rule(OURS), some(inputs, "k", "v", "beta"), make_gradients(inputs)
        calls = {name: partial(step, *case) for name, step in STEPS.items()}
        method, times = gpu_times(calls)
        row: dict[str, Any] = {"T": length, "gpu_method": method}
        for name, call in calls.items():
            per_1k = rounded((times[name]["median"] or 0) * 1024 / length)
            row[name] = {"ms_per_1k": per_1k, "peak_bytes": peak_bytes(call, DEVICE)}
        peaks = [row[name]["peak_bytes"] / length / 1024 for name in STEPS]
        show(length, *(row[name]["ms_per_1k"] for name in STEPS), *peaks)
        rows.append(row)
        del inputs, case, calls
    targets = []
    for name in STEPS:
        per_token = [row[name]["peak_bytes"] / row["T"] for row in rows]
        growth = max(after / before for before, after in pairwise(per_token))
        targets.append(verdict(f"{name} peak, T to 2T", rounded(growth), MAX_GROWTH, least=False))
    return {"shape": "B 1 H 16 D 128", "rows": rows, "targets": targets}


def packed() -> dict[str, Any]:
    """GPU time of the write of one document, and of as many tokens in more of them (B 1 T 32768 H 16 D 128)."""
    inputs = make_inputs((1, PACKED_LENGTH, 16, 128))
    gradients = make_gradients(inputs)
    rows = []
    show("documents", "forward", "fwd+bwd")
    for documents in DOCUMENTS:
        ends = torch.linspace(0, PACKED_LENGTH, documents + 1, device=DEVICE, dtype=torch.int32)
        case = write_rule(partial(OURS, cu_seqlens=ends)), some(inputs, "k", "v", "beta"), gradients
        method, times = gpu_times({name: partial(step, *case) for name, step in STEPS.items()})
        rows.append({"documents": documents, "gpu_method": method, "gpu_ms": times})
        show(documents, *(times[name]["median"] for name in STEPS))
    return {"shape": f"B 1 T {PACKED_LENGTH} H 16 D 128", "rows": rows}


def cold() -> dict[str, Any]:
    """Seconds of the first call, forward and backward, in a fresh process without compiled kernels."""
    first, second = first_calls_s(__file__, "first_call")
    target = verdict("first call, s", first, MAX_FIRST_CALL_S, least=False)
    return {"first_call_s": first, "second_call_s": second, "targets": [target]}


def first_call() -> list[float | None]:
    """What `cold` measures, in its process: the first call and the second."""
    inputs = make_inputs(FIRST_SHAPE)
    return seconds_of(partial(forward_backward, op_rule(OURS), inputs, make_gradients(inputs)))


def memory() -> dict[str, Any]:
    """Bytes per token and head that are kept for the backward, counted, and by arithmetic (B 8 T 2048 H 16)."""
    result: dict[str, Any] = {}
    show("", "kept", "of inputs", "arithmetic")
    for head_dim in (64, 128):
        inputs = make_inputs((8, 2048, 16, head_dim))
        for name in ("alpha", "beta"):  # as a layer gives them: else copies are kept
            inputs[name] = inputs["beta"].detach().float().requires_grad_()
        stages: dict[str, Callable[[], Any]] = {
            "write": partial(write_rule(OURS), **some(inputs, "k", "v", "beta", "alpha")),
            "write and read": partial(op_rule(OURS), **inputs),
        }
        for stage, call in stages.items():
            found = saved_for_backward(call, inputs, inputs["beta"].numel())
            found["by_arithmetic"] = saved_bytes(head_dim, read=stage != "write")
            of_inputs = sum(part["bytes"] for part in found["parts"] if part["input"])
            show(f"D {head_dim}, {stage}", found["bytes"], of_inputs, found["by_arithmetic"])
            result[f"D {head_dim}, {stage}"] = found
    return result


def saved_bytes(head_dim: int, *, read: bool) -> int:
    """Of a token and head in bf16: k, v, alpha, beta; u and its rest, log-sum-exp, inverses; for the read q, o, lse."""
    written = 2 * 2 * head_dim + 2 * 4 + 2 * 2 * head_dim + 4 + 2 * CHUNK
    return written + read * (2 * 2 * head_dim + 4)


def model() -> dict[str, Any]:
    """A training step of deltaformer-340m (B 4 T 2048), compiled, beside FLA's, eager; where the time of ours goes."""
    result = train_both(partial(our_step, "deltaformer-340m", MODEL_SHAPE), fla_model, MODEL_SHAPE, KINDS)
    if "speedup" in result:
        result["targets"] = [verdict("tokens/s over FLA's", result["speedup"], MIN_MODEL_SPEEDUP, least=True)]
    return result


def fla_model() -> Callable[[], Tensor] | None:
    """A step of FLA's model of the same sizes."""
    return None if fla_rule() is None else fla_step("DeltaFormer", 16, MODEL_SHAPE)  # `fla_rule` gives it a read


JOBS: dict[str, list[tuple[str, int]]] = {
    "ops": [("ops", 64), ("ops", 128), ("write", 128)],
    "errors": [(kernel, head_dim) for kernel in KERNELS for head_dim in ERROR_DIMS],
    "model": [("model", 64)],
}


def compile_ahead(job: str, head_dim: int) -> None:
    """Call what a section calls with heads of one size, so that Triton and Inductor keep what they compile."""
    if job == "model":
        our_step("deltaformer-340m", MODEL_SHAPE)()
    elif job == "write":
        forward(write_rule(OURS), some(make_inputs(WRITE_SHAPE), "k", "v", "beta"), [])
    elif job == "ops":
        for inputs in (make_inputs(shape) for shape in TARGETS if shape[3] == head_dim):
            results(OURS, inputs, make_gradients(inputs))
            probe_fla(inputs, make_gradients(inputs))
    else:
        inputs = make_hard("unit keys", 1024, head_dim)
        results(with_kernel(OURS, job), inputs, make_gradients(inputs))
    torch.cuda.synchronize()


SECTIONS = (ops, errors, lengths, packed, memory, cold, model)
PLOTS = {ops: plot_ops, lengths: plot_lengths}


def main() -> None:
    """Measure and plot what the command line asks for."""
    benchmark = Benchmark(
        name="deltaformer",
        kind="section",
        parts={section.__name__: Part(section.__doc__ or "", section, PLOTS.get(section)) for section in SECTIONS},
        fla_module="fla.ops.deltaformer",
        settings={"dtype": "bfloat16", "fla_reads_with": "flash-attn" if find_spec("flash_attn") else "ours"},
    )
    parser = benchmark.make_parser((__doc__ or "").partition("\n")[0], out="the JSON and the plots")
    parser.add_argument(
        "--compile-ahead",
        action="store_true",
        help="first compile what the sections need in several processes: in one it takes minutes, above all FLA's",
    )
    args = benchmark.parse_args(parser)
    if args.compile_ahead:
        compile_in_parallel(__file__, [job for section in args.parts for job in JOBS.get(section, ())])
    benchmark.run(args.parts, args.out)


if __name__ == "__main__":
    main()
