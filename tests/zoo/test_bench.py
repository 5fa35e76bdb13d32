"""`zoo bench attention` on a small scale: figures, files, what is skipped, what fails, what is wrong."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend
from typer.testing import CliRunner

from zoo import cli, machine, timing
from zoo.bench import measure, report
from zoo.bench.measure import run_plan
from zoo.bench.plan import BACKENDS, Plan, make_plan, visible_pairs
from zoo.bench.ranking import rank
from zoo.kernels.attention import attention, visible

TINY: dict[str, Any] = {"lengths": (12,), "windows": (None, 5), "head_dims": (8,), "num_heads": 2, "tokens": 24}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few repetitions on a CPU."""
    monkeypatch.setattr(timing, "_SECONDS", 0.0)


def run(plan: Plan) -> list[dict[str, Any]]:
    return run_plan(plan, lambda line: None, lambda results: None)["rows"]


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """The exit status of the command, in this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["zoo", "bench", "attention", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_the_command_shows_a_table_and_ends_in_json(tmp_path: Path) -> None:
    options = {"backends": "auto,cudnn,sdpa-flash,triton", "lengths": "24,40", "windows": "full,7,30", "head-dims": 8,
               "heads": 4, "kv-heads": 2, "tokens": 80, "device": "cpu", "out": tmp_path}  # fmt: skip
    command = [sys.executable, "-m", "zoo.cli", "bench", "attention", *(f"--{k}={v}" for k, v in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *shown, last = done.stdout.splitlines()
    results = json.loads(last)
    assert json.loads((tmp_path / "attention_cpu_float32_d8.json").read_text()) == results
    assert {file.name for file in tmp_path.iterdir()} == {
        f"attention_cpu_float32_d8.{end}" for end in ("json", "md", "png")
    }
    assert any("sdpa-flash" in line and "window" in line for line in shown)
    assert results["settings"] == {"dtype": "float32", "tokens": 80, "seed": 0, "largest_error": 1e-4}
    assert results["complete"] is True
    assert any(line.endswith(" [1/40] auto  T 24  window full  D 8  dense") for line in done.stderr.splitlines())
    rows = {tuple(row[key] for key in ("length", "window", "layout", "backend")): row for row in results["rows"]}
    cells = [(24, None), (24, 7), (40, None), (40, 7), (40, 30)]
    assert list(rows) == [(*cell, *kind) for cell in cells
                          for kind in product(("dense", "packed"), options["backends"].split(","))]  # fmt: skip
    for (length, window, layout, backend), row in rows.items():
        if backend == "triton":
            assert row["skipped"].startswith("impl: 'triton' needs ")
            assert "forward_ms" not in row
        elif backend == "cudnn" or (backend == "sdpa-flash" and (window or layout == "packed")):
            full = window is None and layout == "dense"
            reason = "needs CUDA tensors, got cpu" if full else "needs a full dense call"
            assert row["skipped"].startswith(f"impl: {backend!r} {reason}")
        else:
            assert (row["batch_size"], row["num_heads"], row["num_kv_heads"]) == (80 // length, 4, 2)
            assert row["visible_pairs"] == 80 // length * visible_pairs(length, window)
            for step, factor in (("forward", 4), ("forward_backward", 14)):
                assert row[f"{step}_ms"]["p20"] <= row[f"{step}_ms"]["median"] <= row[f"{step}_ms"]["p80"]
                flops = factor * 4 * 8 * row["visible_pairs"]
                assert row[f"{step}_tflops"] == pytest.approx(flops / row[f"{step}_ms"]["median"] / 1e9, rel=1e-3)
            made = 4 * 8 * (80 // length * length) * (4 + 4 + 2 + 2)  # o, dq, dk and dv, at least
            assert made <= row["peak_bytes"] < 100 * made
            assert row["errors"].keys() == {"o", "dq", "dk", "dv"}
            assert row["correct"]
            assert 0 < max(row["errors"].values()) < 1e-5


def scaled_output(*tensors: Tensor, **options: Any) -> Tensor:
    return 1.001 * attention(*tensors, **options)


def doubled_gradient_of_k(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, 2 * k - k.detach(), v, **options)


def blind_to_documents(*tensors: Tensor, **options: Any) -> Tensor:
    return attention(*tensors, **options | {"cu_seqlens": None})


def last_head_unknown(*tensors: Tensor, **options: Any) -> Tensor:
    o = attention(*tensors, **options)
    return torch.cat([o[:, :, :-1], 0 * o[:, :, -1:]], 2)


def not_a_number_in_between(*tensors: Tensor, **options: Any) -> Tensor:
    o = attention(*tensors, **options)
    hole = torch.zeros_like(o)
    hole[0, 1, -1] = float("nan")
    return o + hole


def blind_to_windows(*tensors: Tensor, **options: Any) -> Tensor:
    return attention(*tensors, **options | {"window": None})


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("wrong", "where", "tensors"),
    [
        (scaled_output, {"dense", "packed", "window 5 dense", "window 5 packed"}, {"o", "dq", "dk", "dv"}),
        (doubled_gradient_of_k, {"dense", "packed", "window 5 dense", "window 5 packed"}, {"dk"}),
        (blind_to_documents, {"packed", "window 5 packed"}, {"o", "dq", "dk", "dv"}),
        (last_head_unknown, {"dense", "packed", "window 5 dense", "window 5 packed"}, {"o", "dq", "dk", "dv"}),
        (not_a_number_in_between, {"dense", "packed", "window 5 dense", "window 5 packed"}, {"o"}),
        (blind_to_windows, {"window 5 dense", "window 5 packed"}, {"o", "dq", "dk", "dv"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_backend_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: Callable[..., Tensor], where: set[str], tensors: set[str]
) -> None:
    def some_wrong(*tensors: Tensor, impl: str, **options: Any) -> Tensor:
        return (wrong if impl == "auto" else attention)(*tensors, impl=impl, **options)

    monkeypatch.setattr(measure, "attention", some_wrong)
    options = {"backends": "auto,sdpa", "lengths": 12, "windows": "full,5", "head-dims": 8, "kv-heads": 2, "tokens": 24,
               "device": "cpu", "out": tmp_path}  # fmt: skip
    done = CliRunner().invoke(cli.app, ["bench", "attention", *(f"--{k}={v}" for k, v in options.items())])
    assert done.exit_code == 1
    rows = json.loads((tmp_path / "attention_cpu_float32_d8.json").read_text())["rows"]
    assert all(row["correct"] for row in rows if row["backend"] == "sdpa")
    found = {" ".join([f"window {row['window']}"] * bool(row["window"]) + [row["layout"]]): row
             for row in rows if row["backend"] == "auto" and not row["correct"]}  # fmt: skip
    assert found.keys() == where
    for row in found.values():
        assert {name for name, error in row["errors"].items() if error is None or error > 1e-4} == tensors
    assert (tmp_path / "attention_cpu_float32_d8.md").read_text().count("| wrong |") == len(where)


@pytest.mark.usefixtures("quick")
def test_a_failure_loses_nothing_else_and_what_no_kernel_takes_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def some_broken(*tensors: Tensor, impl: str, **options: Any) -> Tensor:
        if impl == "flash":
            raise ValueError("sizes differ\nin a second line")
        return attention(*tensors, impl=impl, **options)

    monkeypatch.setattr(measure, "attention", some_broken)
    monkeypatch.setitem(measure.FORCED, "sdpa-flash", SDPBackend.CUDNN_ATTENTION)  # which a CPU does not have
    options: dict[str, Any] = TINY | {"windows": (None,), "layouts": ("dense",)}
    flash, sdpa, forced = run(make_plan(backends=("flash", "sdpa", "sdpa-flash"), device="cpu", **options))
    assert flash["error"] == "ValueError: sizes differ"
    assert sdpa["correct"]
    assert forced["skipped"] == "impl: 'sdpa-flash' does not take head dim 8 in float32 on this device"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float32, 1e-4)])
def test_errors_are_those_of_the_dtype(dtype: torch.dtype, bound: float) -> None:
    rows = run(make_plan(backends=("sdpa",), device="cpu", dtype=dtype, num_kv_heads=1, **TINY))
    assert len(rows) == 4
    for row in rows:
        assert row["correct"]
        assert bound / 1e4 < max(row["errors"].values()) < bound


@pytest.mark.usefixtures("quick")
def test_one_visible_key_has_no_gradient_to_divide_by() -> None:
    rows = run(make_plan(backends=("sdpa",), device="cpu", **TINY | {"lengths": (1, 4), "windows": (None, 1)}))
    assert [(row["length"], row["window"]) for row in rows] == [(1, None)] * 2 + [(4, None)] * 2 + [(4, 1)] * 2
    assert all(row["correct"] for row in rows)


def test_visible_pairs_are_those_of_the_mask() -> None:
    for length, window in product(range(1, 12), (None, *range(1, 14))):
        order = torch.arange(length)
        assert visible_pairs(length, window) == int(visible(order, order, window=window).sum())


def test_cells_share_tensors_and_leave_out_windows_that_hide_nothing() -> None:
    plan = make_plan(device="cpu", backends=("auto", "flex"), lengths=(64, 256), windows=(64, None), head_dims=(16, 32))
    assert [str(cell) for cell in plan.cells()][:6] == [
        "auto  T 64  window full  D 16  dense",
        "flex  T 64  window full  D 16  dense",
        "auto  T 64  window full  D 16  packed",
        "flex  T 64  window full  D 16  packed",
        "auto  T 256  window 64  D 16  dense",
        "flex  T 256  window 64  D 16  dense",
    ]
    assert len(plan.cells()) == 2 * 3 * 2 * 2
    assert plan.shape(plan.cells()[0]) == (8, 4, 4)
    assert plan.shape(plan.cells()[-1]) == (2, 4, 4)


def test_default_plan() -> None:
    plan = make_plan(device="cpu")
    assert (plan.lengths, plan.windows, plan.head_dims, plan.tokens) == ((256, 512), (None, 64), (32,), 512)
    assert len(plan.cells()) == 8 * len(BACKENDS)
    long = make_plan(device="cpu", lengths=(1024,))
    assert long.shape(long.cells()[0])[0] == 1  # a sequence is not cut to the tokens of a call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backends", "auto,flsh"], f"--backends: got 'flsh', allowed: {', '.join(BACKENDS)}"),
        (["--lengths", "64,x"], "--lengths: got 'x', allowed: numbers of tokens, such as 512,2k"),
        (["--windows", "full,0"], "--windows: got '0', allowed: full and numbers of keys, such as full,256,1k"),
        (["--windows", "64,128", "--lengths", "64"],
         "--windows: got 64,128, allowed: full, or below the longest sequence, which has 64"),
        (["--head-dims", "-8"], "--head-dims: got '-8', allowed: numbers of channels, such as 64,128"),
        (["--layout", "ragged"], "--layout: got 'ragged', allowed: dense, packed"),
        (["--heads", "0"], "--heads: got 0, allowed: from 1 to 1048576"),
        (["--kv-heads", "-1"], "--kv-heads: got -1, allowed: from 1 to 1048576"),
        (["--heads", "4", "--kv-heads", "3"], "--kv-heads: got 3, allowed: divisors of the 4 query heads"),
        (["--tokens", "0"], "--tokens: got 0, allowed: from 1 to 1048576"),
        (["--dtype", "int8"], "--dtype: got 'int8', allowed: float32, bfloat16, float16"),
        (["--device", "tpu"], "--device: got 'tpu', allowed: cpu, cuda"),
        (["--out", "/proc/zoo"], "--out: cannot write to /proc/zoo: No such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_ends_in_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(monkeypatch, *arguments) == 2
    assert capsys.readouterr() == ("", f"zoo: error: {message}\n")


def test_help_names_every_backend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert [name for name in (*BACKENDS, "--windows", "packed", "[default: results/bench]") if name not in shown] == []


def made_up(backends: tuple[str, ...]) -> dict[str, Any]:
    """Results of two lengths in two windows: the first backend fast, the second slow, then skipped, failed, wrong."""
    rows = []
    for length, window, backend in product((1024, 2048), (None, 256), backends):
        index = backends.index(backend)
        figures: dict[str, Any] = {
            "forward_ms": {"median": 1.5 * length + index},
            "forward_backward_ms": {"median": 9.0},
            "forward_backward_tflops": 300.0 - index,
            "errors": {"o": 0.5},
            "correct": index != 4,
        }
        figures = {2: {"skipped": "impl: no"}, 3: {"error": "RuntimeError: no"}}.get(index, figures)
        rows.append(
            {"backend": backend, "length": length, "window": window, "head_dim": 64, "layout": "dense"} | figures
        )
    return {
        "machine": {"device": "GPU [1]", "torch": "2"},
        "settings": {"dtype": "bfloat16", "tokens": 8},
        "rows": rows,
        "ranking": rank(rows),
    }


def test_a_ranking_is_by_the_worst_case() -> None:
    def row(backend: str, window: int | None, forward: float, both: float, **options: Any) -> dict[str, Any]:
        times = {"forward_ms": {"median": forward}, "forward_backward_ms": {"median": both}, "correct": True}
        return {"backend": backend, "length": 8, "window": window, "head_dim": 64, "layout": "dense"} | times | options

    rows = [
        row("auto", None, 0.1, 0.1),
        row("sdpa", None, 2.0, 4.0),
        row("cudnn", None, 1.0, 4.0),
        row("flex", None, 1.5, 6.0),
        row("sdpa", 2, 1.0, 9.0),
        row("flex", 2, 3.0, 3.0),
        row("flex", 4, 3.0, 3.0),
        row("triton", 2, 1.0, 3.0),
        row("triton", 4, 1.0, 3.3),
        row("flash", 2, 0.1, 0.1, correct=False),
        row("sdpa", 4, 1.0, 2.0, length=16),
        row("flex", 4, 1.0, 2.0, length=16),
    ]
    kind = {"head_dim": 64, "layout": "dense"}
    assert rank(rows) == [
        kind | {"windowed": False, "slowdowns": {"flex": 1.5, "sdpa": 2.0}},
        kind | {"windowed": True, "slowdowns": {"flex": 3.0}},
    ]
    assert list(rank(rows[:4])[0]["slowdowns"]) == ["flex", "sdpa"]
    assert rank(rows[6:7] + rows[8:9]) == [kind | {"windowed": True, "slowdowns": {"flex": 1.0, "triton": 1.1}}]
    assert rank(rows[7:9]) == [kind | {"windowed": True, "slowdowns": {"triton": 1.0}}]  # without PyTorch's


def test_a_ranking_is_relative_to_what_pytorch_brings() -> None:
    times = {"sdpa": (2.0, 2.0), "cudnn": (1.0, 2.2), "triton": (0.5, 2.1), "xformers": (0.1, 2.6)}
    rows = [
        {"backend": backend, "length": 8, "window": None, "head_dim": 64, "layout": "dense", "correct": True}
        | {"forward_ms": {"median": forward}, "forward_backward_ms": {"median": both}}
        for backend, (forward, both) in times.items()
    ]
    assert rank(rows)[0]["slowdowns"] == {"triton": 1.05, "xformers": 1.3, "sdpa": 2.0}


def test_reports_show_the_fastest_and_what_has_no_figures(tmp_path: Path) -> None:
    results = made_up(("auto", "sdpa", "cudnn", "flex", "triton"))
    lines = report.markdown(results).splitlines()
    assert lines[0] == "Attention: GPU [1], torch 2, bfloat16, 8 tokens:"
    assert lines[2] == "| T | window | D | layout | auto | sdpa | cudnn | flex | triton |"
    fast = "**1,536.000** / **9.000** | 1,537.000 / **9.000**"
    assert lines[4] == f"| 1024 | full | 64 | dense | {fast} | - | failed | wrong |"
    assert lines[5] == f"| 1024 | 256 | 64 | dense | {fast} | - | failed | wrong |"
    assert [report.outcome(row) for row in results["rows"][:5]] == [
        "forward 1,536.000 ms, with backward 9.000 ms, 300.0 TFLOP/s",
        "forward 1,537.000 ms, with backward 9.000 ms, 299.0 TFLOP/s",
        "skipped: impl: no",
        "RuntimeError: no",
        "wrong: relative errors o 0.5",
    ]
    assert "| 64 | dense | full | sdpa 1.00 |" in lines
    for width, tables in ((50, 5), (80, 2), (200, 1)):
        console = Console(width=width, file=StringIO(), record=True)
        console.print(report.table(results, width))
        shown = console.export_text()
        assert "…" not in shown, shown
        assert shown.count("layout") == tables + 1
        assert "auto" not in shown.partition("PyTorch's fastest")[2].partition("At the length")[0]
        assert all(f"{text} / 9.000" in shown for text in ("1,536.000", "1,537.000", "3,072.000", "3,073.000"))
    report.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_figures(tmp_path: Path) -> None:
    results = made_up(("cudnn", "flex", "flash", "triton"))
    results["rows"] = [row for row in results["rows"] if "correct" not in row]
    report.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_milliseconds_on_a_cpu() -> None:
    calls = []
    marks = timing.milliseconds(lambda: calls.append(time.sleep(0.01)), torch.device("cpu"))
    assert marks.keys() == {"median", "p20", "p80"}
    low, middle, high = (marks[name] or 0 for name in ("p20", "median", "p80"))
    assert 10 <= low <= middle <= high
    assert 4 <= len(calls) <= 22  # one to warm up, then for 0.2 s
    calls.clear()
    timing.milliseconds(lambda: calls.append(time.sleep(0.15)), torch.device("cpu"))
    assert len(calls) == 4


def test_slugs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.slug(torch.device("cpu")) == "cpu"
    for name, slug in {"NVIDIA H200": "h200", "NVIDIA A100-SXM4-80GB": "a100_sxm4_80gb"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert machine.slug(torch.device("cuda")) == slug


@needs_cuda
@pytest.mark.usefixtures("give_memory_back")
def test_cuda_has_figures_or_a_reason() -> None:
    rows = run(make_plan(device="cuda", lengths=(256,), windows=(None, 100), head_dims=(64,), tokens=512))
    assert {row["backend"] for row in rows if row.get("correct")} >= {"auto", "sdpa", "triton"}
    assert [row for row in rows if "skipped" not in row and not row.get("correct")] == []


@needs_cuda
@pytest.mark.usefixtures("give_memory_back")
def test_milliseconds_on_cuda() -> None:
    x = torch.ones(1 << 20, device="cuda", requires_grad=True)
    device = torch.device("cuda")

    def captured() -> Tensor:
        return torch.autograd.grad((x * x).sum(), x)[0]

    def read() -> float:
        return captured().sum().item()  # waits for the device, which a capture does not allow

    marks = timing.milliseconds(captured, device)
    low, middle, high = (marks[name] or 0 for name in ("p20", "median", "p80"))
    assert 0 < low <= middle <= high < 10
    with pytest.raises(RuntimeError):
        timing.milliseconds(read, device)
