"""Decoding on one CUDA GPU: how near to the memory's bandwidth, how it grows with the context, and beside FLA's.

    python benchmarks/decoding_gpu.py --out results    # writes decoding_GPU.json, decoding_GPU_SECTION.png

Weights and caches in bf16, memories in float32. A step is one more token of each row: compiled, replayed as a CUDA
graph, its input copied in and its logits copied out. Times are of the host's clock over many steps, as a user has them.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import zoo
from zoo.decoding import Decoder

sys.path.insert(0, str(Path(__file__).parent))  # not there under PYTHONSAFEPATH
from decoding_plots import plot_bandwidth, plot_context, plot_generation
from harness import DEVICE, Benchmark, Part, compile_in_parallel, rounded, show, spread, verdict
from models_gpu import VOCABULARY, fla_model, profile

BANDWIDTH = 4.3e12  # bytes a second that an H200's memory gives
STEPS, WARMUP, REPEATS = 20, 5, 9
PROMPT, NEW_TOKENS, CALLS = 128, 64, 5
CHECKED, WRONG = 8, 0.25  # steps that are compared with a pass, and the relative error in bf16 that is none of rounding
WRONG_CHOICE = 0.5  # standard deviations below the best logit; a token at random is 4 below
Job = tuple[str, int, tuple[int, ...]]  # a recipe, a number of rows, and contexts
KINDS = {
    "matrix products": ("row_linear_kernel", "gemm", "gemv", "nvjet", "cutlass", "splitK"),
    "delta rule": ("delta_step_kernel",),
    "caches": ("cache_read_kernel",),
    "fused by Inductor": ("triton_",),
}


class Steps:
    """Steps of a recipe, and the bytes that one must read: all weights but the embedding's, and the state.

    Args:
        recipe: its name.
        batch_size: rows.
        room: the longest context, for which it is compiled; what is measured may be a shorter one.
    """

    def __init__(self, recipe: str, batch_size: int, room: int) -> None:
        self.recipe, self.batch_size = recipe, batch_size
        self.model = zoo.build(recipe, device=DEVICE, dtype=torch.bfloat16, seed=0)
        generator = torch.Generator(DEVICE).manual_seed(0)
        prompt = torch.randint(VOCABULARY, (batch_size, PROMPT), device=DEVICE, generator=generator)
        _, state = self.model(prompt[:, :-CHECKED], max_length=room, last=True)
        self.decoder = Decoder(self.model, state)
        self.tokens = prompt[:, -1]
        self.error = self.compare(prompt)
        for tensor in state["layers"].values(True, True):
            tensor.normal_(std=0.1, generator=generator)

    @torch.no_grad()
    def compare(self, prompt: Tensor) -> float:
        """|steps - pass| / |pass| of the logits of the prompt's last tokens."""
        stepped = torch.stack([self.decoder(token) for token in prompt[:, -CHECKED:].unbind(1)], 1)
        passed = self.model(prompt)[:, -CHECKED:].float()
        error = float((stepped - passed).norm() / passed.norm())
        if not error < WRONG:
            raise RuntimeError(f"{self.recipe}: steps are {error:.2f} off the pass")
        return error

    def step(self, context: int) -> Tensor:
        """Logits after one more token of each row, the last of so many."""
        self.decoder.pretend(context - 1)
        return self.decoder(self.tokens)

    def measure(self, context: int, *, where: bool = False) -> dict[str, Any]:
        """One line of a table: time, throughput, and the share of what the memory's bandwidth allows."""
        times = time_steps(partial(self.step, context))
        weights = sum(parameter.nbytes for parameter in self.model.parameters()) - self.model.embedding.weight.nbytes
        held = self.batch_size * self.model.config.state_bytes(context, torch.bfloat16)
        limit = (weights + held) / BANDWIDTH * 1e3
        row = {
            "recipe": self.recipe,
            "batch_size": self.batch_size,
            "context": context,
            "step_ms": times,
            "tokens_per_s": rounded(self.batch_size / times["median"] * 1e3),
            "weight_bytes": weights,
            "state_bytes": held,
            "limit_ms": rounded(limit),
            "share_of_limit": rounded(limit / times["median"]),
            "error": rounded(self.error),
        }
        if where:
            row["profile"] = profile(partial(self.step, context), KINDS)
        label = f"{self.recipe} B{self.batch_size} {context}"
        show(label, *times.values(), row["tokens_per_s"], row["share_of_limit"], row["error"])
        return row


def compile_ahead(section: str, *job: Any) -> None:
    """What a section would compile, into the compilers' caches: steps of a recipe, or a call of each `generation`."""
    if section == "generation":
        for call in generating(*job)[1].values():
            call()
    else:
        recipe, batch_size, contexts = job
        Steps(recipe, batch_size, max(contexts)).step(max(contexts))
    torch.cuda.synchronize()


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


def measure_all(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Each recipe, number of rows, and its contexts, the longest of which it is compiled for."""
    show("", "ms", "p20", "p80", "tokens/s", "of the limit", "error")
    rows = []
    for recipe, batch_size, contexts in jobs:
        steps = Steps(recipe, batch_size, max(contexts))
        rows += [steps.measure(context, where=batch_size == 1 and context == contexts[0]) for context in contexts]
        del steps
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    return rows


GENERATION_TARGETS = {1: 4.0, 64: 2.0}  # times FLA's tokens a second, by batch
BANDWIDTH_JOBS: tuple[Job, ...] = (
    ("deltanet-340m", 1, (1024, 8192, 32768, 131072)),
    ("deltanet-340m", 8, (1024,)),
    ("deltanet-340m", 64, (1024,)),
    ("deltanet-1.3b", 1, (1024,)),
    ("deltanet-1.3b", 64, (1024,)),
)
CONTEXT_JOBS: tuple[Job, ...] = (
    ("swa-full-340m", 1, (1024, 8192, 32768)),
    ("transformer-340m", 1, (1024, 8192, 32768)),
    ("deltaformer-340m", 1, (1024, 8192, 32768)),
    ("transformer-340m", 8, (8192,)),
    ("deltaformer-340m", 8, (8192,)),
)


def bandwidth() -> dict[str, Any]:
    """DeltaNet by size, batch and context, against reading its weights and its state."""
    rows = measure_all(BANDWIDTH_JOBS)
    share = {(row["recipe"], row["batch_size"], row["context"]): row["share_of_limit"] for row in rows}
    lengths = [row["step_ms"]["median"] for row in rows if row["recipe"] == "deltanet-340m" and row["batch_size"] == 1]
    targets = [
        verdict("deltanet-340m, batch 1", share["deltanet-340m", 1, 1024], 0.35, least=True),
        verdict("deltanet-1.3b, batch 1", share["deltanet-1.3b", 1, 1024], 0.55, least=True),
        verdict("longest context / shortest", lengths[-1] / lengths[0], 1.05, least=False),
    ]
    return {"rows": rows, "targets": targets}


def context() -> dict[str, Any]:
    """How a step grows with the context where tokens are kept, and the Deltaformer against full attention."""
    rows = measure_all(CONTEXT_JOBS)
    at_8k = {(row["recipe"], row["batch_size"]): row["step_ms"]["median"] for row in rows if row["context"] == 8192}
    targets = [
        verdict(
            f"Deltaformer / full attention, batch {size}",
            at_8k["deltaformer-340m", size] / at_8k["transformer-340m", size],
            1.3,
            least=False,
        )
        for size in (1, 8)
    ]
    return {"rows": rows, "targets": targets}


def generating(batch_size: int) -> tuple[zoo.LanguageModel, dict[str, Callable[[], Tensor]]]:
    """Our model, and calls of generate on prompts of random tokens, greedy: ours, and FLA's where that is installed."""
    prompt = torch.randint(VOCABULARY, (batch_size, PROMPT), device=DEVICE)
    ours = zoo.build("deltanet-340m", device=DEVICE, dtype=torch.bfloat16, seed=0)
    calls: dict[str, Callable[[], Tensor]] = {"ours": partial(ours.generate, prompt, NEW_TOKENS)}
    fla: Any = fla_model("DeltaNet", 8)
    if fla is not None:
        fixed = {"do_sample": False, "use_cache": True, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
        calls["fla"] = partial(fla.eval().generate, prompt, max_new_tokens=NEW_TOKENS, **fixed)
    return ours, calls


@torch.no_grad()
def worst_choice(model: zoo.LanguageModel, ids: Tensor) -> float:
    """How far below the highest logit of a pass the chosen tokens' are at most, in standard deviations."""
    logits = torch.cat([model(row[None])[:, PROMPT - 1 : -1] for row in ids[:8]]).float()
    chosen = logits.gather(-1, ids[:8, PROMPT:, None])[..., 0]
    gap = float((logits.amax(-1) - chosen).max() / logits.std())
    if not gap < WRONG_CHOICE:
        raise RuntimeError(f"greedy tokens are {gap:.2f} standard deviations below the best")
    return gap


def generation() -> dict[str, Any]:
    """Whole calls of generate, greedy, a prompt of 128 tokens and 64 new ones: ours and FLA's DeltaNet, in turns."""
    rows, targets = [], []
    show("", "s", "p20", "p80", "tokens/s")
    for batch_size, target in GENERATION_TARGETS.items():
        ours, calls = generating(batch_size)
        marks: dict[str, list[float]] = {name: [] for name in calls}
        for repeat in range(1 + CALLS):
            for name, call in calls.items():
                torch.cuda.synchronize()
                begin = perf_counter()
                ids = call()
                torch.cuda.synchronize()
                assert ids.shape == (batch_size, PROMPT + NEW_TOKENS), f"{name}: {list(ids.shape)}"
                if repeat:  # the first compiles
                    marks[name].append(perf_counter() - begin)
        row: dict[str, Any] = {"batch_size": batch_size, "worst_choice": rounded(worst_choice(ours, calls["ours"]()))}
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
    plots = {bandwidth: plot_bandwidth, context: plot_context, generation: plot_generation}
    parts = {each.__name__: Part(each.__doc__ or "", each, plot) for each, plot in plots.items()}
    benchmark = Benchmark(
        name="decoding",
        kind="section",
        parts=parts,
        fla_module="fla.models",
        settings={"dtype": "bfloat16", "bytes_per_s": BANDWIDTH, "prompt": PROMPT, "new_tokens": NEW_TOKENS},
    )
    parser = benchmark.make_parser((__doc__ or "").partition("\n")[0], out="the JSON and the plots")
    parser.add_argument("--compile-ahead", action="store_true", help="compile all steps at once first, in processes")
    args = benchmark.parse_args(parser)
    if args.compile_ahead:
        sections: dict[str, list[tuple[Any, ...]]] = {
            "bandwidth": [*BANDWIDTH_JOBS],
            "context": [*CONTEXT_JOBS],
            "generation": [(batch_size,) for batch_size in GENERATION_TARGETS],
        }
        compile_in_parallel(__file__, [(part, *job) for part in args.parts for job in sections[part]])
    benchmark.run(args.parts, args.out)


if __name__ == "__main__":
    main()
