"""Made-up results of a comparison, of the size and the shape of real ones."""

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]

# Microseconds a token at the shortest length, more of them at each doubling, and bytes of state a token of context.
RECIPES = {
    "transformer-340m": (4.9, 1.2, 98304),
    "deltanet-340m": (4.65, 1.0, 0),
    "deltanet-swa-340m": (5.6, 1.05, 0),
    "deltanet-global-340m": (4.8, 1.08, 8192),
    "swa-full-340m": (6.0, 1.1, 24576),
    "deltaformer-340m": (7.0, 1.35, 147456),
    "deltaformer-swa-340m": (6.7, 1.25, 73728),
}
PEERS = {"fla/deltanet-340m": 1.3, "hf/transformer-340m": 1.15, "fla/deltaformer-340m": 2.1}
EAGER = {"none": 1.45, "model": 1.0, "block": 1.04}
PARAMS = 374_263_808


def fake(
    modes: Iterable[str] = ("train", "forward", "prefill", "decode"),
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384),
    compiles: tuple[str, ...] = ("none", "model", "block"),
    recipes: Iterable[str] = (*RECIPES, *PEERS),
) -> dict[str, Any]:
    """Results: seven architectures and their peers; some cells failed, some were skipped, some have a profile."""
    rows = [
        row(recipe, length, batch, mode, how)
        for mode in modes
        for recipe in recipes
        for how in compiles
        if not (recipe in PEERS and how == "block")
        for length in (lengths[-3:] if mode in ("prefill", "decode") else lengths)
        for batch in ((1, 8) if mode in ("prefill", "decode") else (max(1, 32768 // length),))
    ]
    return {
        "machine": {
            "device": "NVIDIA H200",
            "cpu": "Intel(R) Xeon(R) Processor",
            "cores": 16,
            "torch": "2.11.0+cu130",
            "triton": "3.6.0",
            "cuda": "13.0",
            "driver": "580.95.05",
            "python": "3.12.3",
            "zoo": "0.1.0",
            "commit": "b517db0a90e74297004653fc016a5e7aefc5c50f",
            "changed_since_commit": True,
            "peak_tflops": 989.4,
            "matmul_tflops": 742.6,
            "peers": {"fla": "0.6.0", "hf": "5.17.0"},
        },
        "settings": {
            "tokens_per_step": 32768,
            "warmup": 3,
            "steps": 10,
            "seed": 0,
            "text_bytes": 4194304,
            "dynamic_shapes": True,
            "overrides": [],
        },
        "mixed": [],
        "complete": True,
        "missing": [],
        "unwritten": False,
        "rows": rows,
    }


def row(recipe: str, length: int, batch: int, mode: str, how: str) -> Row:
    """One cell with its figures; the longest eager Deltaformers fail, and a peer skips blocks of one row."""
    peer, _, name = recipe.rpartition("/")
    cell: Row = {
        "recipe": recipe,
        "peer": peer or None,
        "length": length,
        "batch_size": batch,
        "mode": mode,
        "compile": how,
        "dtype": "bfloat16",
    }
    if name.startswith("deltaformer") and how == "none" and length == 16384 and mode == "train":
        return cell | {"error": "OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 GiB."}
    if recipe == "fla/deltaformer-340m" and mode == "decode":
        return cell | {"skipped": "fla's Deltaformer has no step of decoding"}
    return cell | figures(recipe, length, batch, mode, how)


def figures(recipe: str, length: int, batch: int, mode: str, how: str) -> Row:
    """Of a cell, for any recipe."""
    name = recipe.rpartition("/")[2]
    micros, growth, state = RECIPES.get(name, (5.0, 1.1, 4096))
    doublings = (length // 2048).bit_length() - 1
    micros *= growth**doublings * EAGER[how] * PEERS.get(recipe, 1.0)
    micros *= {"train": 1.0, "forward": 0.3, "prefill": 0.3 + 1 / batch, "decode": 90 + length / 400 * growth}[mode]
    tokens = batch * (1 if mode == "decode" else length)
    step_ms = micros * (1 if mode == "decode" else tokens) / 1e3 * (1 + batch / 50 if mode == "decode" else 1)
    rate = tokens / step_ms * 1e3
    flops = 7e8 * growth**doublings * (3 if mode == "train" else 1)
    compiled = how != "none"
    return {
        "tokens_per_s": rate,
        "tokens_per_s_p20": rate * 0.97,
        "tokens_per_s_p80": rate * 1.01,
        "step_ms": step_ms,
        "mfu": None if mode == "decode" else rate * flops / 9.894e14,
        "flops_per_token": flops,
        "peak_bytes": (3e9 if mode == "train" else 8e8) + tokens * micros * 2e5 + batch * length * state,
        "state_bytes": batch * (12_582_912 + length * state),
        "compile_cold_s": 55.0 + micros if compiled else None,
        "compile_warm_s": 9.0 + micros / 10 if compiled else None,
        "first_step_s": 12.5 if compiled else 0.8,
        "graphs": 1 if compiled else None,
        "graph_breaks": 0 if compiled else None,
        "recompilations": 0 if compiled else None,
        "params": PARAMS,
        "loss": 3.42 + micros / 100 if mode == "train" else None,
        "profile": profile(step_ms) if mode == "train" and how == "model" and length == 2048 else None,
    }


def profile(total: float) -> Row:
    """Where the time of a step goes, kernel by kernel and layer by layer."""
    shares = {
        "mixer": 0.37,
        "mlp": 0.31,
        "norm": 0.05,
        "head": 0.14,
        "embedding": 0.01,
        "optimizer": 0.08,
        "other": 0.04,
    }
    kinds = ("delta_net", "delta_net", "delta_net", "sliding_window")
    layers = [{"layer": n, "kind": kinds[n % 4], "ms": total / 30 * (1 + n % 4 / 3)} for n in range(24)]
    return {
        "kinds_ms": {kind: total * share for kind, share in shares.items()},
        "layers_ms": layers,
        "total_ms": total,
        "trace": "traces/a model.json.gz",
    }


ODD = ("<script>alert('x')</script>", 'a|b $x_1$ & "c"', "_hidden", "模型-Ω", "long-" * 40, "[bold]not[/bold]")


def cell(recipe: str = "deltanet-340m", compile: str = "none", **changes: Any) -> dict[str, Any]:
    return {"recipe": recipe, "peer": None, "length": 2048, "batch_size": 16, "mode": "train", "compile": compile,
            "dtype": "bfloat16"} | changes  # fmt: skip


def only(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return fake() | {"rows": rows} | changes


def good(**changes: Any) -> dict[str, Any]:
    place = cell(**changes)
    return place | figures(*(place[key] for key in ("recipe", "length", "batch_size", "mode", "compile")))


EDGES = {
    "none": only([]),
    "single": only([good()]),
    "failed": only([cell(error="RuntimeError: it broke"), cell(compile="model", skipped="no room")]),
    "bare": only([good()]) | {"machine": {}, "settings": {}},
    "one length": fake(modes=("train",), lengths=(1000,)),
    "odd names": only([good(recipe=name, compile=how) for name in ODD for how in ("none", "model")]),
    "odd failures": only([cell(recipe=name, error=f"{name}: broke") for name in ODD]),
    "two dtypes": only([good(), good(dtype="float32")]),
    "not finite": only([good() | {"loss": float("nan"), "peak_bytes": 0}, good(length=4096)]),
    "a gap": only([good(length=1 << n) if n != 12 else cell(length=4096, error="no") for n in range(10, 15)]),
    "mixed": only([good()], mixed=["commit: 1a2b and 3c4d"], complete=False, missing=["one", "two", "three"]),
}
