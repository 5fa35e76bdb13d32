"""Decoding on one CUDA GPU: how near to the memory's bandwidth, how it grows with the context, and beside FLA's.

    python benchmarks/decoding_gpu.py --out results    # writes decoding_GPU.json

Weights and caches in bf16, memories in float32. A step is one more token of each row: compiled, replayed as a CUDA
graph, its input copied in and its logits copied out. Times are of the host's clock over many steps, as a user has them.
"""

import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import torch

import zoo
from zoo.decoding import Decoder

sys.path.insert(0, str(Path(__file__).parent))  # not there under PYTHONSAFEPATH
from harness import DEVICE, Benchmark, Part, rounded, show, spread, verdict
from models_gpu import VOCABULARY, fla_model, profile

BANDWIDTH = 4.3e12  # bytes a second that an H200's memory gives
STEPS, WARMUP, REPEATS = 20, 5, 9
PROMPT, NEW_TOKENS = 128, 64
KINDS = {
    "matrix products": ("gemm", "gemv", "nvjet", "cutlass", "splitK", "triton_red_fused_mm", "triton_tem"),
    "delta rule": ("recurrent_kernel",),
    "caches": ("read_kernel",),
    "fused by Inductor": ("triton_",),
}


def step_of(recipe: str, batch_size: int, context: int) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A step after as many tokens, and the bytes that it must read: all weights but the embedding's, and the state."""
    model = zoo.build(recipe, device=DEVICE, dtype=torch.bfloat16, seed=0)
    state = model.init_state(batch_size, context)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for tensor in state["layers"].values(True, True):
        tensor.normal_(std=0.1, generator=generator)
    tokens = torch.randint(VOCABULARY, (batch_size,), device=DEVICE, generator=generator)
    decoder = Decoder(model, state)

    def step() -> Any:
        decoder.pretend(context - 1)
        return decoder(tokens)

    weights = sum(parameter.nbytes for parameter in model.parameters()) - model.embedding.weight.nbytes
    held = sum(tensor.nbytes for tensor in state["layers"].values(True, True))
    return step, {"weight_bytes": weights, "state_bytes": held}


def time_steps(step: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of a step, over the repeats."""
    for _ in range(WARMUP):
        step()
    marks = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        marks.append((perf_counter() - begin) / STEPS * 1e3)
    p20, median, p80 = (quantiles(marks, n=10)[place] for place in (1, 4, 7))
    return spread([median, p20, p80])


def measure(recipe: str, batch_size: int, context: int, *, where: bool = False) -> dict[str, Any]:
    """One line of a table: time, throughput, and the share of what the memory's bandwidth allows."""
    begin = perf_counter()
    step, sizes = step_of(recipe, batch_size, context)
    step()
    torch.cuda.synchronize()
    first = perf_counter() - begin
    times = time_steps(step)
    limit = sum(sizes.values()) / BANDWIDTH * 1e3
    row = {
        "recipe": recipe,
        "batch_size": batch_size,
        "context": context,
        "step_ms": times,
        "tokens_per_s": rounded(batch_size / times["median"] * 1e3),
        **sizes,
        "limit_ms": rounded(limit),
        "share_of_limit": rounded(limit / times["median"]),
        "first_s": rounded(first),
    }
    if where:
        row["profile"] = profile(step, KINDS)
    label = f"{recipe} B{batch_size} {context}"
    show(label, times["median"], times["p20"], times["p80"], row["tokens_per_s"], row["share_of_limit"], first)
    del step
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    return row


def heading() -> None:
    """Above the lines of `measure`."""
    show("", "ms", "p20", "p80", "tokens/s", "of the limit", "first s")


def bandwidth() -> dict[str, Any]:
    """DeltaNet at a context of 1024, by size and batch, against reading its weights and its state."""
    heading()
    sizes = ("deltanet-340m", "deltanet-1.3b")
    rows = [measure(name, batch, 1024, where=batch == 1) for name in sizes for batch in (1, 8, 64)]
    share = {(row["recipe"], row["batch_size"]): row["share_of_limit"] for row in rows}
    targets = [
        verdict("deltanet-340m, batch 1", share["deltanet-340m", 1], 0.35, least=True),
        verdict("deltanet-1.3b, batch 1", share["deltanet-1.3b", 1], 0.55, least=True),
    ]
    return {"rows": rows, "targets": targets}


def context() -> dict[str, Any]:
    """How a step grows with the context, batch 1; the Deltaformer against full attention, batch 1 and 8."""
    heading()
    rows = [measure("deltanet-340m", 1, length) for length in (1024, 8192, 32768, 131072)]
    rows += [measure("swa-full-340m", 1, length) for length in (1024, 32768)]
    pairs = [measure(name, batch, 8192) for batch in (1, 8) for name in ("transformer-340m", "deltaformer-340m")]
    full, ours = ({row["batch_size"]: row["step_ms"]["median"] for row in pairs[i::2]} for i in (0, 1))
    flat = [row["step_ms"]["median"] for row in rows if row["recipe"] == "deltanet-340m"]
    targets = [verdict(f"Deltaformer / full, batch {size}", ours[size] / full[size], 1.3, least=False) for size in full]
    targets.append(verdict("delta rule, longest / shortest", max(flat) / min(flat), 1.05, least=False))
    return {"rows": rows + pairs, "targets": targets}


def generation() -> dict[str, Any]:
    """Whole calls of generate, greedy, a prompt of 128 tokens and 64 new ones: ours and FLA's DeltaNet, in turns."""
    ours = zoo.build("deltanet-340m", device=DEVICE, dtype=torch.bfloat16, seed=0).eval()
    fla: Any = fla_model("DeltaNet", 8)
    rows, targets = [], []
    show("", "s", "p20", "p80", "tokens/s")
    for batch_size, target in ((1, 4.0), (64, 2.0)):
        prompt = torch.randint(VOCABULARY, (batch_size, PROMPT), device=DEVICE)
        calls: dict[str, Callable[[], Any]] = {"ours": partial(ours.generate, prompt, NEW_TOKENS)}
        if fla is not None:
            fixed = {"do_sample": False, "use_cache": True, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
            calls["fla"] = partial(fla.eval().generate, prompt, max_new_tokens=NEW_TOKENS, **fixed)
        marks: dict[str, list[float]] = {name: [] for name in calls}
        for repeat in range(6):
            for name, call in calls.items():
                torch.cuda.synchronize()
                begin = perf_counter()
                ids = call()
                torch.cuda.synchronize()
                assert ids.shape == (batch_size, PROMPT + NEW_TOKENS), f"{name}: {list(ids.shape)}"
                if repeat:  # the first compiles
                    marks[name].append(perf_counter() - begin)
        row: dict[str, Any] = {"batch_size": batch_size}
        for name, seconds in marks.items():
            p20, median, p80 = (quantiles(seconds, n=10)[place] for place in (1, 4, 7))
            rate = rounded(batch_size * NEW_TOKENS / median)
            row[name] = {"seconds": spread([median, p20, p80]), "tokens_per_s": rate}
            show(f"{name} B{batch_size}", median, p20, p80, rate)
        rows.append(row)
        if "fla" in row:
            ratio = row["ours"]["tokens_per_s"] / row["fla"]["tokens_per_s"]
            targets.append(verdict(f"times FLA, batch {batch_size}", ratio, target, least=True))
    return {"rows": rows, "targets": targets}


def main() -> None:
    """Measure."""
    parts = {each.__name__: Part(each.__doc__ or "", each) for each in (bandwidth, context, generation)}
    benchmark = Benchmark(
        name="decoding",
        kind="section",
        parts=parts,
        fla_module="fla.models",
        settings={"dtype": "bfloat16", "bandwidth": BANDWIDTH, "prompt": PROMPT, "new_tokens": NEW_TOKENS},
    )
    parser = benchmark.make_parser((__doc__ or "").partition("\n")[0], out="the JSON")
    args = benchmark.parse_args(parser)
    benchmark.run(args.parts, args.out)


if __name__ == "__main__":
    main()
