"""`zoo compare` on a small scale: figures, files, failures."""

import json
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import zoo
from zoo import registry
from zoo.compare import report
from zoo.compare.plan import make_plan
from zoo.compare.run import run_plan
from zoo.mixers.context import Context
from zoo.mixers.contract import State
from zoo.mixers.full_attention import FullAttention

SMALL = ("num_layers: 1\ndim: 32\nvocab_size: 256\nblock: {mlp: {name: swiglu, hidden_dim: 64}}\n"
         "layers: {pattern: [{mixer: MIXER}]}\nname: NAME\n")  # fmt: skip


def small(folder: Path, name: str, mixer: str) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(SMALL.replace("MIXER", mixer).replace("NAME", name))
    return str(path)


def run(plan: Any) -> list[dict[str, Any]]:
    return run_plan(plan, lambda number, cell: None, lambda results: None)["rows"]


def test_rows_hold_true_figures(tmp_path: Path) -> None:
    plan = make_plan(
        [small(tmp_path, "one", "full_attention")], lengths=(32, 64), tokens_per_step=128, steps=3, warmup=2
    )
    rows = run(plan)
    assert [(row["length"], row["mode"], row["compiled"]) for row in rows] == [
        (length, mode, compiled) for mode in ("train", "forward") for compiled in (False, True) for length in (32, 64)
    ]
    model = zoo.build(str(tmp_path / "one.yaml"), device="meta")
    for row in rows:
        assert row["params"] == sum(parameter.numel() for parameter in model.parameters())
        assert row["tokens_per_s"] == pytest.approx(128 / row["step_ms"] * 1e3)
        assert row["tokens_per_s_p20"] <= row["tokens_per_s"] <= row["tokens_per_s_p80"]
        assert (row["graphs"], row["graph_breaks"]) == ((1, 0) if row["compiled"] else (None, None))
        weights = 4 * row["params"]
        logits = 4 * 128 * 256 if row["mode"] == "forward" else 2 * weights  # Adam's two moments
        assert weights + logits < row["peak_bytes"] < 10 * (weights + logits)
    by_key = {(row["length"], row["mode"], row["compiled"]): row for row in rows}
    assert by_key[32, "train", True]["compile_s"] > by_key[64, "train", True]["compile_s"]
    assert by_key[64, "train", True]["loss"] == pytest.approx(by_key[64, "train", False]["loss"], abs=1e-3)
    assert by_key[64, "train", True]["flops_per_token"] == 3 * by_key[64, "forward", True]["flops_per_token"]


def test_decoding_by_batch_and_context(tmp_path: Path) -> None:
    sources = [small(tmp_path, "one", "full_attention"), small(tmp_path, "two", "delta_net")]
    plan = make_plan(sources, modes=("prefill", "decode"), lengths=(32, 64), batch_sizes=(3,), steps=3, warmup=2)
    rows = run(plan)
    for name in ("one", "two"):
        kinds = [(row["mode"], row["compiled"], row["length"], row["batch_size"]) for row in rows
                 if row["recipe"] == name]  # fmt: skip
        assert kinds == [*product(("prefill", "decode"), (False, True), (32, 64), (3,))]
    for row in rows:
        tokens = row["batch_size"] * (row["length"] if row["mode"] == "prefill" else 1)
        assert row["tokens_per_s"] == pytest.approx(tokens / row["step_ms"] * 1e3)
        config = plan.configs[row["recipe"]]
        assert row["state_bytes"] == row["batch_size"] * config.state_bytes(row["length"], torch.float32)
        assert row["peak_bytes"] > 4 * row["params"] + row["state_bytes"]
        assert row["graph_breaks"] == (0 if row["compiled"] else None)
        if row["mode"] == "decode":
            assert row["graphs"] == (1 if row["compiled"] else None)
    states = {(row["recipe"], row["length"]): row["state_bytes"] for row in rows}
    assert states["one", 64] == 2 * states["one", 32]
    assert states["two", 64] == states["two", 32]
    results: dict[str, Any] = {
        "machine": {"device": "GPU", "torch": "2"},
        "settings": {"dtype": "float32", "tokens_per_step": 64, "steps": 3},
        "rows": rows,
    }
    lines = report.markdown(results).splitlines()
    assert lines[0] == "GPU, torch 2, float32, medians of 3 steps:"
    assert lines[2].startswith("| recipe | length | batch | mode | eager tok/s |")
    assert len(lines) == 4 + len(rows) / 2
    report.plot(results | {"rows": [*rows, {**KIND, "error": "OutOfMemoryError"}]}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


KIND = {"recipe": "three", "length": 64, "batch_size": 3, "mode": "decode", "compiled": True}


def test_a_state_that_does_not_fit_is_not_tried(tmp_path: Path) -> None:
    sources = [small(tmp_path, "one", "full_attention")]
    plan = make_plan(sources, modes=("decode",), lengths=(1 << 40,), batch_sizes=(1,), steps=1, warmup=1)
    rows = run(plan)
    assert len(rows) == 2
    assert all("does not fit into memory of" in row["skipped"] for row in rows)
    results = {"machine": {"device": "GPU", "torch": "2"}, "settings": {"dtype": "float32", "steps": 3}, "rows": rows}
    assert "| decode | - | - | - |" in report.markdown(results)


class Broken(FullAttention):
    def forward(self, x: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, State | None]:
        raise RuntimeError("it broke")


class Breaking(FullAttention):
    def forward(self, x: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, State | None]:
        torch._dynamo.graph_break()
        return super().forward(x, context, state)


def test_a_broken_architecture_loses_nothing_else_and_breaks_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = dict(registry._entries())
    monkeypatch.setattr(registry, "_entries", lambda: entries)
    zoo.register_mixer("broken")(Broken)
    zoo.register_mixer("breaking")(Breaking)
    sources = [small(tmp_path, name, name) for name in ("broken", "breaking")]
    plan = make_plan(sources, lengths=(16,), tokens_per_step=16, steps=1, warmup=1)
    rows = run(plan)
    assert {row["error"] for row in rows if row["recipe"] == "broken"} == {"RuntimeError: it broke"}
    compiled = [row for row in rows if row["recipe"] == "breaking" and row["compiled"]]
    assert all(row["graph_breaks"] >= 1 and row["graphs"] > 1 for row in compiled)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": (64,), "tokens_per_step": 0}, "--tokens-per-step: got 0, allowed: at least 64"),
        ({"lengths": (64,), "tokens_per_step": 32}, "--tokens-per-step: got 32, allowed: at least 64"),
        ({"steps": 0}, "--steps: got 0, allowed: at least 1"),
        ({"warmup": 0}, "--warmup: got 0, allowed: at least 1"),
        ({"batch_sizes": (0,)}, "--batch: got 0, allowed: at least 1"),
        ({"modes": ("train", "decode")}, "--mode: got train,decode, allowed: prefill and decode together, or train"),
        ({"device": "tpu"}, "--device: got 'tpu', allowed: cpu, cuda"),
        ({"device": "meta"}, "--device: got 'meta', allowed: cpu, cuda"),
        ({"sources": ["deltanet-tiny", "deltanet-tiny"]}, "another model is called 'deltanet-tiny'"),
        ({"lengths": (1 << 23,)}, "too few for sequences of 8388608"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(arguments.pop("sources", ["deltanet-tiny"]), **arguments)


def test_a_vocabulary_without_room_for_bytes(tmp_path: Path) -> None:
    path = tmp_path / "letters.yaml"
    path.write_text(SMALL.replace("MIXER", "full_attention").replace("vocab_size: 256", "vocab_size: 26"))
    with pytest.raises(ValueError, match="vocab_size is 26, allowed: at least 256"):
        make_plan([str(path)])


def test_default_plan_is_every_tiny_recipe() -> None:
    plan = make_plan([], device="cpu")
    assert set(plan.configs) == {
        "transformer-tiny",
        "deltanet-tiny",
        "deltanet-swa-tiny",
        "deltanet-global-tiny",
        "deltaformer-tiny",
        "deltaformer-swa-tiny",
        "swa-full-tiny",
    }


def test_table_and_plot_show_failures_beside_figures(tmp_path: Path) -> None:
    figures = {"tokens_per_s": 1e5, "tokens_per_s_p20": 9e4, "tokens_per_s_p80": 1.1e5, "step_ms": 2.5,
               "peak_bytes": 3 << 20, "compile_s": 4.5, "graphs": 1, "graph_breaks": 0, "params": 1_000_000,
               "flops_per_token": 6e6, "loss": 2.5}  # fmt: skip
    place = {"recipe": "deltanet-[global]-tiny", "length": 64, "mode": "train"}
    results = {
        "machine": {"device": "GPU", "torch": "2"},
        "settings": {"dtype": "float32", "tokens_per_step": 64, "steps": 3},
        "rows": [place | {"compiled": False, "error": "OutOfMemoryError"}, place | {"compiled": True} | figures],
    }
    line = report.markdown(results).splitlines()[-1].removeprefix("| deltanet-[global]-tiny ")
    assert line == "| 64 | train | failed | 100,000 ±10% | - | 2.5 | 3 | 4.5 | 1 | 0 | 1.00M | 6.0 | 2.500 |"
    for width in (80, 100, 120, 200):
        console = Console(width=width, file=StringIO(), record=True)
        console.print(report.table(results, width))
        shown = console.export_text()
        assert "…" not in shown, shown
        assert "failed" in shown
        assert "100,000 ±10%" in shown
        assert ("2.500" in shown) == (width == 200)
    report.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(json.dumps(results)) == results
