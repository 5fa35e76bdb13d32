"""A training step of the DeltaNet of 374M parameters on one CUDA GPU, beside FLA's where it is installed.

    python benchmarks/deltanet_model_gpu.py --out results    # writes deltanet_model_GPU.json

Both have 24 layers of width 1024, 8 heads of 128, a vocabulary of 32,000, weights in bf16 and the fused AdamW, and see
the same 16 rows of 2048 random tokens. Ours is compiled as one graph; FLA's is eager, for compiled it is slower. A step
is the forward, the loss, the backward and the optimiser's, and waits for the device. Then the time on the GPU of a
compiled step, by what its kernels do.
"""

import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zoo

sys.path.insert(0, str(Path(__file__).parent))  # not there under PYTHONSAFEPATH
from harness import DEVICE, Benchmark, Part, rounded, show

BATCH, LENGTH, VOCABULARY = 16, 2048, 32_000
WARMUP, STEPS = 4, 15
KINDS = {
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "delta rule": ("prepare_kernel", "scan_kernel", "gradients_kernel"),
    "convolution": ("forward_kernel", "backward_kernel"),
    "optimiser": ("multi_tensor_apply",),
    "fused by Inductor": ("triton_",),
}

Step = Callable[[], Tensor]


def make_step(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> Step:
    """A training step on one batch; it returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator(DEVICE).manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device=DEVICE, generator=generator)

    def step() -> Tensor:
        value = loss(tokens)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value

    return step


def ours() -> Step:
    """The recipe deltanet-340m, compiled."""
    model = zoo.build("deltanet-340m", device=DEVICE, dtype=torch.bfloat16, seed=0)
    compiled = torch.compile(model, fullgraph=True)
    return make_step(model, lambda tokens: compiled(tokens, labels=tokens))


def fla() -> Step | None:
    """FLA's model of the same sizes, or None where it is not installed."""
    try:
        models: Any = import_module("fla.models")
    except ImportError:
        return None
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 8, "vocab_size": VOCABULARY}
    model = models.DeltaNetForCausalLM(models.DeltaNetConfig(**sizes, tie_word_embeddings=False))
    model = model.to(DEVICE, torch.bfloat16).train()
    return make_step(model, lambda tokens: model(tokens, labels=tokens).loss)


def measure_step(step: Step) -> dict[str, Any]:
    """Milliseconds of a step, tokens a second, peak memory, and the seconds before the first is timed."""
    begin = time.perf_counter()
    for _ in range(WARMUP - 1):
        step()
    loss = step()
    torch.cuda.synchronize()
    warmup = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    marks = []
    for _ in range(STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loss = step()
        end.record()
        torch.cuda.synchronize()
        marks.append(start.elapsed_time(end))
    p20, median, p80 = (statistics.quantiles(marks, n=10)[i] for i in (1, 4, 7))
    return {
        "step_ms": {"median": rounded(median), "p20": rounded(p20), "p80": rounded(p80)},
        "tokens_per_s": rounded(BATCH * LENGTH / median * 1e3),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "warmup_s": rounded(warmup),
        "loss": rounded(loss.item()),
    }


def kind_of(kernel: str) -> str:
    """What a kernel is for, by its name."""
    return next((kind for kind, names in KINDS.items() if any(name in kernel for name in names)), "other")


def profile(step: Step, count: int = 3) -> dict[str, Any]:
    """Milliseconds on the GPU of a step by kind, and of the longest kernels."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    kernels = {x.key: x.self_device_time_total / 1e3 / count for x in profiler.key_averages()}
    kinds = dict.fromkeys((*KINDS, "other"), 0.0)
    for kernel, ms in kernels.items():
        kinds[kind_of(kernel)] += ms
    longest = sorted(kernels, key=lambda kernel: -kernels[kernel])[:20]
    return {
        "total_ms": rounded(sum(kernels.values())),
        "kinds_ms": {kind: rounded(ms) for kind, ms in kinds.items()},
        "longest_ms": {kernel[:100]: rounded(kernels[kernel]) for kernel in longest},
    }


def train() -> dict[str, Any]:
    """A training step of both, and where the time of ours goes."""
    result: dict[str, Any] = {"B": BATCH, "T": LENGTH}
    show("", "ms", "tokens/s", "peak GiB", "warm-up s")
    for name, make in (("fla", fla), ("ours", ours)):
        step = make()
        if step is None:
            continue
        row = measure_step(step)
        show(name, row["step_ms"]["median"], f"{row['tokens_per_s']:,.0f}", row["peak_bytes"] / 2**30, row["warmup_s"])
        result[name] = row
        if name == "ours":
            result["profile"] = profile(step)
            for kind, ms in result["profile"]["kinds_ms"].items():
                show(f"  {kind}", ms)
        del step
        torch.cuda.empty_cache()
    if "fla" in result:
        result["speedup"] = rounded(result["ours"]["tokens_per_s"] / result["fla"]["tokens_per_s"])
        show("times as fast as FLA's", result["speedup"])
    return result


def main() -> None:
    """Measure."""
    benchmark = Benchmark(
        name="deltanet_model",
        kind="section",
        parts={"train": Part(train.__doc__ or "", train)},
        fla_module="fla.models",
        settings={"dtype": "bfloat16"},
    )
    parser = benchmark.make_parser((__doc__ or "").partition("\n")[0], out="the JSON")
    args = benchmark.parse_args(parser)
    benchmark.run(args.parts, args.out)


if __name__ == "__main__":
    main()
