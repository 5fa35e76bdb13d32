"""What the measurements of a model on a GPU share: a training step of a recipe, FLA's beside it, and its profile.

Both have a vocabulary of 32,000, weights in bf16 and the fused AdamW, and see the same rows of random tokens. Ours is
compiled as one graph; FLA's is eager. Both learn the next token. A step is the forward, the loss, the backward and the
optimiser's, and waits for the device.
"""

import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from harness import DEVICE, rounded, show, spread

VOCABULARY = 32_000
WARMUP, STEPS = 4, 15

Step = Callable[[], Tensor]
Shape = tuple[int, int]
"""Rows and tokens of a batch."""
Kinds = dict[str, tuple[str, ...]]
"""What kernels are for, with parts of their names; the first that fits counts."""


def make_step(model: nn.Module, loss: Callable[[Tensor], Tensor], shape: Shape) -> Step:
    """A training step on one batch; it returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator(DEVICE).manual_seed(0)
    tokens = torch.randint(VOCABULARY, shape, device=DEVICE, generator=generator)

    def step() -> Tensor:
        value = loss(tokens)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value

    return step


def our_step(recipe: str, shape: Shape) -> Step:
    """Of a recipe, compiled."""
    model = zoo.build(recipe, device=DEVICE, dtype=torch.bfloat16, seed=0)
    compiled = torch.compile(model, fullgraph=True)
    return make_step(model, lambda tokens: compiled(tokens, labels=tokens.roll(-1, 1)), shape)


def fla_model(architecture: str, num_heads: int) -> nn.Module | None:
    """FLA's model of 24 layers of width 1024, or None where it is not installed."""
    try:
        models: Any = import_module("fla.models")
    except ImportError:
        return None
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": num_heads, "vocab_size": VOCABULARY}
    config = getattr(models, f"{architecture}Config")(**sizes, tie_word_embeddings=False)
    return getattr(models, f"{architecture}ForCausalLM")(config).to(DEVICE, torch.bfloat16)


def fla_step(architecture: str, num_heads: int, shape: Shape) -> Step | None:
    """A training step of `fla_model`, or None."""
    model: Any = fla_model(architecture, num_heads)
    if model is None:
        return None
    model.train()
    return make_step(model, lambda tokens: model(tokens, labels=tokens).loss, shape)  # which it shifts itself


def warm_up(step: Step, held: int) -> dict[str, Any]:
    """Seconds of the first steps, and the most bytes in use in one more, without those held before."""
    begin = time.perf_counter()
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    step()
    return {"peak_bytes": torch.cuda.max_memory_allocated() - held, "warmup_s": rounded(seconds)}


def measure_steps(steps: dict[str, Step], shape: Shape) -> dict[str, dict[str, Any]]:
    """Milliseconds of a step of each, in turns, tokens a second, and the last loss."""
    marks: dict[str, list[float]] = {name: [] for name in steps}
    losses = {}
    for _ in range(STEPS):
        for name, step in steps.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            losses[name] = step().detach()
            end.record()
            torch.cuda.synchronize()
            marks[name].append(start.elapsed_time(end))
    found = {}
    for name, times in marks.items():
        p20, median, p80 = (statistics.quantiles(times, n=10)[i] for i in (1, 4, 7))
        found[name] = {
            "step_ms": spread([median, p20, p80]),
            "tokens_per_s": rounded(shape[0] * shape[1] / median * 1e3),
            "loss": rounded(losses[name].item()),
        }
    return found


def kind_of(kernel: str, kinds: Kinds) -> str:
    """What a kernel is for, by its name."""
    return next((kind for kind, names in kinds.items() if any(name in kernel for name in names)), "other")


def profile(step: Step, kinds: Kinds, count: int = 3) -> dict[str, Any]:
    """Milliseconds on the GPU of a step by kind, and of the longest kernels."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    kernels = {x.key: x.self_device_time_total / 1e3 / count for x in profiler.key_averages()}
    by_kind = dict.fromkeys((*kinds, "other"), 0.0)
    for kernel, ms in kernels.items():
        by_kind[kind_of(kernel, kinds)] += ms
    longest = sorted(kernels, key=lambda kernel: -kernels[kernel])[:20]
    return {
        "total_ms": rounded(sum(kernels.values())),
        "kinds_ms": {kind: rounded(ms) for kind, ms in by_kind.items()},
        "longest_ms": {kernel[:100]: rounded(kernels[kernel]) for kernel in longest},
    }


def train_both(ours: Callable[[], Step], fla: Callable[[], Step | None], shape: Shape, kinds: Kinds) -> dict[str, Any]:
    """Measure a training step of both, in turns, and where the time of ours goes."""
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, make in (("fla", fla), ("ours", ours)):
        held = torch.cuda.memory_allocated()
        step = make()
        if step is not None:
            steps[name], rows[name] = step, warm_up(step, held)
    show("", "ms", "p20", "p80", "tokens/s", "peak GiB", "warm-up s")
    for name, row in measure_steps(steps, shape).items():
        rows[name] |= row
        memory, seconds = rows[name]["peak_bytes"] / 2**30, rows[name]["warmup_s"]
        show(name, *row["step_ms"].values(), f"{row['tokens_per_s']:,.0f}", memory, seconds)
    result = {"B": shape[0], "T": shape[1], **rows, "profile": profile(steps["ours"], kinds)}
    for kind, ms in result["profile"]["kinds_ms"].items():
        show(f"  {kind}", ms)
    if "fla" in rows:
        result["speedup"] = rounded(rows["ours"]["tokens_per_s"] / rows["fla"]["tokens_per_s"])
        show("times as fast as FLA's", result["speedup"])
    return result
