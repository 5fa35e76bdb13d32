"""The Triton delta rule on one CUDA GPU, beside FLA's in the same run where flash-linear-attention is installed.

    python benchmarks/delta_rule_gpu.py --out results                          # every section, and two plots
    python benchmarks/delta_rule_gpu.py ops gated --compile-ahead --out results   # these; the file keeps the others

GPU time is that of CUDA graph replays. Eager time is a call's, with what the host takes, after a flush of the L2 cache.
Both sides get the same tensors, beta in bf16 too, and normalise q and k themselves.

Shapes: B batch, T tokens, H heads, D head dimension of keys and values.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.files import require_writable, write_whole
from zoo.kernels.delta_rule import chunk_delta_rule, recurrent_delta_rule
from zoo.machine import describe

DEVICE = torch.device("cuda")
CHUNK = 64
QUANTILES = (0.5, 0.2, 0.8)
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

Inputs = dict[str, Tensor]
"""A rule's arguments by name: q, k, v, beta, and g and initial_state where there are any."""
Rule = Callable[..., tuple[Tensor, Tensor | None]]


def rules(ours: Rule, operation: str, name: str) -> dict[str, Rule]:
    """Ours, and FLA's function of that operation where FLA can be imported."""
    both: dict[str, Rule] = {"ours": partial(ours, qk_l2norm=True)}
    try:
        theirs = getattr(import_module(f"fla.ops.{operation}"), name)
    except ImportError:
        return both

    def fla(**inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        return theirs(**inputs, output_final_state="initial_state" in inputs, use_qk_l2norm_in_kernel=True)

    return both | {"fla": fla}


def chunk_rules(*, gated: bool = False) -> dict[str, Rule]:
    """The chunked rule of both."""
    operation = "gated_delta_rule" if gated else "delta_rule"
    return rules(chunk_delta_rule, operation, f"chunk_{operation}")


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, *, gated: bool = False) -> Inputs:
    """Normal q, k, v; beta in (0, 1); g a log sigmoid near -0.07."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=DEVICE)
    inputs = {name: draw(shape, dtype=dtype) for name in "qkv"}
    inputs["beta"] = torch.rand(shape[:3], generator=generator, device=DEVICE, dtype=dtype)
    if gated:
        inputs["g"] = F.logsigmoid(3 + draw(shape[:3]))
    return {name: x.requires_grad_() for name, x in inputs.items()}


def make_stateful(head_dim: int, keys: str, beta: float | None, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Hard inputs with an initial state: keys "random", "similar" (cosine 0.99) or "zero"; beta in (0, 2) if None."""
    shape = *HARD_SHAPE, head_dim
    inputs = {name: x.detach() for name, x in make_inputs(shape, dtype).items()}
    generator = torch.Generator(DEVICE).manual_seed(1)
    draw = partial(torch.randn, generator=generator, device=DEVICE)
    if keys == "similar":
        shared = F.normalize(draw(shape[2:]), dim=-1) * head_dim**0.5
        inputs["k"] = (shared + (1 / 0.99 - 1) ** 0.5 * inputs["k"]).to(dtype)
        cosine = F.cosine_similarity(inputs["k"][:, 1:].float(), inputs["k"][:, :-1].float(), dim=-1).mean().item()
        if abs(cosine - 0.99) > 0.002:
            raise RuntimeError(f"keys meant to have cosine 0.99 have {cosine}")
    elif keys == "zero":
        inputs["k"] = torch.zeros_like(inputs["k"])
    inputs["beta"] = 2 * inputs["beta"] if beta is None else torch.full_like(inputs["beta"], beta)
    inputs["initial_state"] = draw(shape[0], shape[2], head_dim, head_dim)
    return {name: x.requires_grad_() for name, x in inputs.items()}


def make_gradients(inputs: Inputs) -> list[Tensor]:
    """The gradient that comes back through o, and through the final state where there is an initial one."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    results = [x for name, x in inputs.items() if name in ("v", "initial_state")]
    return [torch.randn(x.shape, generator=generator, device=DEVICE, dtype=x.dtype) for x in results]


def forward(rule: Rule, inputs: Inputs, _: list[Tensor]) -> Any:
    """Without gradients, as in prefill."""
    with torch.no_grad():
        return rule(**inputs)


def forward_backward(rule: Rule, inputs: Inputs, gradients: list[Tensor]) -> dict[str, Tensor]:
    """The results that have an upstream gradient, and the gradient of every input, by name."""
    results = rule(**inputs)[: len(gradients)]
    found = torch.autograd.grad([x for x in results if x is not None], list(inputs.values()), gradients)
    named = dict(zip(("o", "final_state"), (x.detach() for x in results if x is not None), strict=False))
    return named | {f"d{name}": x for name, x in zip(inputs, found, strict=True)}


STEPS = {"forward": forward, "forward_backward": forward_backward}


def reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The rule by chunks, q and k normalised, in the dtype of its inputs; the gradients are autograd's own."""
    g = torch.zeros_like(beta) if g is None else g
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]) if initial_state is None else initial_state
    outputs = []
    chunks = ((x if x.ndim == 4 else x[..., None]).transpose(1, 2).split(CHUNK, 2) for x in (q, k, v, beta, g))
    for q_c, k_c, v_c, beta_c, g_c in zip(*chunks, strict=True):
        decay = g_c.cumsum(2)
        above = torch.ones(2 * decay.shape[2:3], dtype=torch.bool, device=q.device).triu(1)
        between = (decay - decay.mT).masked_fill(above, -math.inf).exp()
        system = beta_c * (k_c @ k_c.mT * between).tril(-1) + torch.eye(len(above), dtype=q.dtype, device=q.device)
        written = beta_c * (v_c - decay.exp() * (k_c @ state))
        delta = torch.linalg.solve_triangular(system, written, upper=False)
        outputs.append(decay.exp() * (q_c @ state) + (q_c @ k_c.mT * between) @ delta)
        state = decay[:, :, -1:].exp() * state + (k_c * between[:, :, -1:].mT).mT @ delta
    return torch.cat(outputs, 2).transpose(1, 2) * q.shape[-1] ** -0.5, state


def relative_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Any]:
    """|actual - expected| / |expected| of each; the difference itself, as NAME_absolute, where that is zero."""
    errors = {}
    for name, exact in expected.items():
        difference, size = (actual[name].double() - exact).norm().item(), exact.norm().item()
        errors[name if size else f"{name}_absolute"] = rounded(difference / size if size else difference)
    return errors


def compare(both: dict[str, Rule], inputs: Inputs, gradients: list[Tensor], rows: int | None = None) -> dict[str, Any]:
    """The errors of each side, of the first rows of the batch, against the reference in float64; and their ratios."""
    exact = forward_backward(
        reference,
        {name: x.detach()[:rows].double().requires_grad_() for name, x in inputs.items()},
        [x[:rows].double() for x in gradients],
    )
    errors: dict[str, Any] = {}
    for side, rule in both.items():
        found = {name: x[:rows] for name, x in forward_backward(rule, inputs, gradients).items()}
        errors[side] = relative_errors(found, exact)
    if "fla" in errors:
        errors["ours_over_fla"] = {
            name: rounded(error / errors["fla"][name])
            for name, error in errors["ours"].items()
            if error is not None and errors["fla"][name] and not name.endswith("_absolute")
        }
    return errors


def gpu_times(calls: dict[str, Callable[[], Any]]) -> tuple[str, dict[str, Any]]:
    """How it was measured, and milliseconds of each: CUDA graphs, or the profiler for all if one cannot be captured."""
    from triton.testing import do_bench_cudagraph

    try:
        return "cuda_graph", {
            name: spread(do_bench_cudagraph(c, rep=50, quantiles=QUANTILES)) for name, c in calls.items()
        }
    except RuntimeError as error:
        print(f"no CUDA graph, so the profiler's sum: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        torch.cuda.synchronize()
        return "profiler_sum", {name: {"median": rounded(profiled_ms(call))} for name, call in calls.items()}


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


def measure(both: dict[str, Rule], inputs: Inputs, gradients: list[Tensor], steps: tuple[str, ...]) -> dict[str, Any]:
    """GPU and eager milliseconds of the steps for each side, and how many times as fast as FLA ours is."""
    from triton.testing import do_bench

    found: dict[str, Any] = {}
    for step in steps:
        calls = {side: partial(STEPS[step], rule, inputs, gradients) for side, rule in both.items()}
        method, gpu = gpu_times(calls)
        eager = {side: spread(do_bench(call, warmup=15, rep=60, quantiles=QUANTILES)) for side, call in calls.items()}
        found[step] = {"gpu_method": method, "gpu_ms": gpu, "eager_ms": eager}
        if "fla" in both:
            times = {"gpu": gpu, "eager": eager}
            found[step]["speedup"] = {
                key: rounded(ms["fla"]["median"] / ms["ours"]["median"]) for key, ms in times.items()
            }
    return found


def spread(marks: Any) -> dict[str, float | None]:
    """The quantiles by name."""
    return {name: rounded(mark) for name, mark in zip(("median", "p20", "p80"), marks, strict=True)}


def rounded(value: float) -> float | None:
    """To four digits; None for what JSON does not know."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def show(*cells: Any) -> None:
    """A line of a table."""
    words = ["-" if cell is None else f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"{words[0]:<34}" + "".join(f"{word:>13}" for word in words[1:]), flush=True)


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


def copy_bandwidth() -> float:
    """Bytes a second that a large copy reads and writes."""
    from triton.testing import do_bench

    source = torch.empty(2**31, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    elapsed: Any = do_bench(lambda: target.copy_(source), return_mode="median")
    return 2e3 * source.numel() / elapsed


def ops() -> dict[str, Any]:
    """Time and errors, forward and with the backward, at five shapes, beside the floor and FLA."""
    both, bandwidth = chunk_rules(), copy_bandwidth()
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
            inputs = make_stateful(head_dim, keys, beta)
            found = compare(both, inputs, make_gradients(inputs))
            name = "in (0, 2)" if beta is None else beta
            finite = all(error is not None for error in found["ours"].values())
            rows.append({"D": head_dim, "keys": keys, "beta": name, "finite": finite, "errors": found})
            ratios += found.get("ours_over_fla", {}).values()
            show_errors(f"D {head_dim} {keys}, beta {name}", found)
    inputs = make_stateful(128, "random", None, torch.float32)
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
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        calls["forward_backward"]()
        row: dict[str, Any] = {"T": length, "gpu_method": method}
        row |= {f"{name}_ms_per_1k": rounded((ms["median"] or 0) * 1024 / length) for name, ms in times.items()}
        row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
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
    result["with_g"] = measure(both, inputs, gradients, tuple(STEPS))
    result["without_g"] = measure({"ours": both["ours"]}, plain, gradients, tuple(STEPS))
    show(f"{FIRST_SHAPE}", *(f"{side} {kind}" for kind in ("GPU", "eager") for side in both))
    for name, step in ((name, step) for step in STEPS for name in ("with_g", "without_g")):
        row = result[name][step]
        medians = [row[key].get(side, {}).get("median") for key in ("gpu_ms", "eager_ms") for side in both]
        show(f"{step} {name}", *medians)
    result["errors"] = compare(both, inputs, gradients, rows=1)
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
    with tempfile.TemporaryDirectory() as folder:
        child = start("first_call", environment={"TRITON_CACHE_DIR": folder})
        output, _ = child.communicate()
    if child.returncode:
        raise RuntimeError("the fresh process failed")
    seconds = json.loads(output.splitlines()[-1])
    target = verdict("first call, s", seconds[0], MAX_FIRST_CALL_S, least=False)
    return {"first_call_s": seconds[0], "second_call_s": seconds[1], "targets": [target]}


def first_call() -> list[float | None]:
    """What `cold` measures, in its process: the first call and the second."""
    inputs = make_inputs(FIRST_SHAPE)
    gradients, rule = make_gradients(inputs), chunk_rules()["ours"]
    seconds = []
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        forward_backward(rule, inputs, gradients)
        torch.cuda.synchronize()
        seconds.append(rounded(time.perf_counter() - begin))
    return seconds


def memory() -> dict[str, Any]:
    """Bytes per token and head that are kept for the backward, counted, and by arithmetic (B 8 T 2048 H 16)."""
    result = {}
    show("D", "kept", "of inputs", "by arithmetic")
    for head_dim in (64, 128, 256):
        shape = 8, 2048, 16, head_dim
        inputs = make_inputs(shape)
        inputs["beta"] = inputs["beta"].detach().float().requires_grad_()  # as a layer gives it: else a copy is kept
        kept: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(partial(keep, kept), lambda x: x):
            outputs = chunk_rules()["ours"](**inputs)
        names = {x.untyped_storage().data_ptr(): name for name, x in inputs.items()}
        cells = math.prod(shape[:3])
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
        of_inputs = sum(part["bytes"] for part in parts if part["input"])
        show(head_dim, total, of_inputs, saved_bytes(head_dim))
        result[f"D {head_dim}"] = {"bytes": rounded(total), "by_arithmetic": saved_bytes(head_dim), "parts": parts}
        del outputs, kept
    return result


def keep(kept: dict[int, Tensor], x: Tensor) -> Tensor:
    """Note a saved tensor under its storage."""
    if x.numel():
        kept[x.untyped_storage().data_ptr()] = x
    return x


def saved_bytes(head_dim: int) -> float:
    """Of a token and head in half precision: q, k, beta; errors; states; inverse and scores; scales of beta, q, k."""
    return float(4 * head_dim + 4 + 2 * head_dim + 2 * head_dim**2 / CHUNK + 2 * 2 * CHUNK + 3 * 4)


SECTIONS = {section.__name__: section for section in (ops, errors, lengths, gated, step, cold, memory)}
COMPILED_AHEAD = {"ops": (64, 128, 256), "errors": (64, 128), "gated": (128,)}


def compile_ahead(section: str, head_dim: int) -> None:
    """Call what a section calls with heads of one size, so that Triton keeps its kernels."""
    both = chunk_rules(gated=section == "gated")
    shapes = [FIRST_SHAPE] if section == "gated" else [shape for shape in TARGETS if shape[3] == head_dim]
    batches = (make_inputs(shape, gated=section == "gated") for shape in shapes)
    for inputs in [make_stateful(head_dim, "random", None)] if section == "errors" else batches:
        for rule in both.values():
            forward(rule, inputs, [])
            forward_backward(rule, inputs, make_gradients(inputs))
    torch.cuda.synchronize()


def start(function: str, *arguments: Any, environment: dict[str, str]) -> subprocess.Popen[str]:
    """A process that calls a function of this file and prints what it returns as JSON."""
    code = f"import json, runpy; print(json.dumps(runpy.run_path({__file__!r})[{function!r}](*{arguments!r})))"
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)


def compile_in_parallel(sections: list[str]) -> None:
    """Fill Triton's cache of compiled kernels, not that of tuned choices: tuning wants the GPU for itself."""
    jobs = [(section, head_dim) for section in sections for head_dim in COMPILED_AHEAD.get(section, ())]
    children = {job: start("compile_ahead", *job, environment={"FLA_CACHE_RESULTS": "0"}) for job in jobs}
    for job, child in children.items():
        child.communicate()
        print(f"compiled {job}" if child.returncode == 0 else f"{job} failed to compile", file=sys.stderr, flush=True)


def plot_ops(result: dict[str, Any], path: Path) -> None:
    """GPU milliseconds of both sides at each shape."""
    from matplotlib.figure import Figure

    rows = result["ops"]["shapes"]
    names = [" ".join(f"{key}{size}" for key, size in row["shape"].items()) for row in rows]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, step in zip(figure.subplots(1, 2, sharey=True), STEPS, strict=True):
        sides = list(rows[0][step]["gpu_ms"])
        height = 0.8 / len(sides)
        for i, side in enumerate(sides):
            places = [position - 0.4 + (i + 0.5) * height for position in range(len(rows))]
            values = [row[step]["gpu_ms"][side]["median"] or 0 for row in rows]
            label = "this repository" if side == "ours" else f"FLA {result['fla']}"
            bars = axes.barh(places, values, height * 0.92, color=("C0", "0.75")[i], label=label)
            axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, fontsize=8)
        floors = [row[step]["floor_ms"] for row in rows]
        tops = [position - 0.4 for position in range(len(rows))]
        axes.vlines(floors, tops, [top + 0.8 for top in tops], colors="k", linewidth=1, label="bytes / bandwidth")
        axes.set_yticks(range(len(rows)), names)
        axes.set_title(f"{step.replace('_', ' + ')}, GPU ms", loc="left", fontsize=11)
        finish(axes)
    figure.axes[0].invert_yaxis()
    save(figure, f"Chunked delta rule, bf16, {title(result)}", path)


def plot_lengths(result: dict[str, Any], path: Path) -> None:
    """Milliseconds and memory per 1024 tokens over T."""
    from matplotlib.figure import Figure

    rows = result["lengths"]["rows"]
    ticks = range(len(rows))
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    times, peaks = figure.subplots(1, 2)
    for name in STEPS:
        times.plot(ticks, [row[f"{name}_ms_per_1k"] for row in rows], "o-", label=name.replace("_", " + "))
    times.set_title("GPU ms per 1024 tokens", loc="left", fontsize=11)
    peaks.plot(ticks, [row["peak_bytes"] / row["T"] / 1024 for row in rows], "o-", color="C1")
    peaks.set_title("peak MiB per 1024 tokens, beside the inputs", loc="left", fontsize=11)
    for axes in (times, peaks):
        axes.set_xticks(ticks, [f"{row['T'] // 1024}K" for row in rows])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("T")
        finish(axes)
    save(figure, f"Chunked delta rule, bf16, {result['lengths']['shape']}, {title(result)}", path)


def finish(axes: Any) -> None:
    """Light, with room for labels."""
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, heading: str, path: Path) -> None:
    """Put a legend and a heading on it, and write it."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11)
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=100))


def title(result: dict[str, Any]) -> str:
    """The device and the versions."""
    return f"{result['machine']['device']}, torch {result['machine']['torch']}, Triton {result['machine']['triton']}"


PLOTS = {"ops": plot_ops, "lengths": plot_lengths}


def previous(path: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """The sections in a file of the same machine, versions and commit."""
    if not path.exists():
        return {}
    result = json.loads(path.read_text())
    if all(result["machine"][key] == machine[key] for key in ("device", "torch", "triton", "commit")):
        return {name: section for name, section in result.items() if name in SECTIONS}
    print(f"{path} is of another machine, version or commit: it will be replaced", file=sys.stderr, flush=True)
    return {}


def slug(device: str) -> str:
    """The name of a GPU for a file: h200 for NVIDIA H200."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower().removeprefix("nvidia").strip()).strip("_")


def parse_args() -> argparse.Namespace:
    """The command line."""
    listed = "\n".join(f"  {name:<9}{(section.__doc__ or '').rstrip('.')}" for name, section in SECTIONS.items())
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog=f"sections:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help="what to measure, see below; default: everything"
    )
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the JSON and the plots (default: .)")
    parser.add_argument(
        "--compile-ahead",
        action="store_true",
        help="first compile what the sections need in several processes: FLA tunes, and one process takes minutes",
    )
    args = parser.parse_args()
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        parser.error(f"unknown section {unknown[0]!r}: expected some of {', '.join(SECTIONS)}")
    args.sections = [name for name in SECTIONS if name in args.sections or not args.sections]
    try:
        require_writable(args.out)
    except OSError as error:
        parser.error(f"--out: cannot write there: {error}")
    return args


def main() -> None:
    """Measure, print, write after each section."""
    args = parse_args()
    if not torch.cuda.is_available():
        sys.exit("delta_rule_gpu needs a CUDA GPU, and torch finds none here.")
    machine = describe(DEVICE)
    path = args.out / f"delta_rule_{slug(machine['device'])}.json"
    try:
        fla = version("flash-linear-attention")
        import_module("fla.ops.delta_rule")
    except (ImportError, PackageNotFoundError) as error:
        fla = None
        print(f"FLA cannot be imported ({error}): its columns are absent.", flush=True)
    result = {"machine": machine, "fla": fla, "dtype": "bfloat16"} | previous(path, machine)
    if args.compile_ahead:
        compile_in_parallel(args.sections)
    for name in args.sections:
        begin = time.perf_counter()
        print(f"\n{name}: {SECTIONS[name].__doc__}", flush=True)
        result[name] = SECTIONS[name]()
        write_whole(path, lambda temporary: temporary.write_text(json.dumps(result, indent=2) + "\n"))
        if name in PLOTS:
            PLOTS[name](result, path.with_name(f"{path.stem}_{name}.png"))
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    print(path)


if __name__ == "__main__":
    main()
