"""`zoo bench kernels` on a small scale: figures, floors, files, what is skipped, what fails, what is wrong."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from zoo import cli, timing
from zoo.bench import failures
from zoo.bench.kernels import delta_rule, measure, peers, report
from zoo.bench.kernels.case import Case
from zoo.bench.kernels.ceilings import Ceilings
from zoo.bench.kernels.kernel import REFERENCE_LENGTH, STEPS, Kernel, Shape, Side, Work
from zoo.bench.kernels.measure import run_plan
from zoo.bench.kernels.plan import make_plan
from zoo.bench.kernels.table import KERNELS
from zoo.kernels.delta_rule import chunk_delta_rule

NAMES = tuple(KERNELS)
BOTH = ("chunk_delta_rule", "deltaformer_write", "deltaformer_write_read", "attention", "attention_window",
        "short_convolution")  # fmt: skip
CEILINGS = Ceilings(bytes_per_s=2e9, flops_per_s=1e10)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few repetitions on a CPU, whose ceilings are not measured."""
    monkeypatch.setattr(timing, "_SECONDS", 0.0)
    if not torch.cuda.is_available():
        monkeypatch.setattr(Ceilings, "measure", lambda device, dtype: CEILINGS)


def shape_of(kernel: Kernel, **changes: Any) -> Shape:
    """A small one, no two sizes alike."""
    sizes = Shape(3, 6 if kernel.by_length else 1, 2, 16, window=4, dtype=torch.float32, device=torch.device("cpu"))
    return replace(sizes, **changes)


def bench(out: Path, *arguments: str, **options: Any) -> tuple[int, dict[str, Any]]:
    """The command's exit status and results."""
    options = {"lengths": "12,20", "head-dims": 8, "heads": 2, "window": 5, "tokens": 40, "device": "cpu"} | options
    words = ["bench", "kernels", *arguments, *(f"--{key}={value}" for key, value in options.items()), f"--out={out}"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code in (0, 1), done.output
    results = json.loads(done.stdout.splitlines()[-1])
    (kept,) = out.glob("*.json")
    assert json.loads(kept.read_text()) == results
    return done.exit_code, results


def test_every_kernel_has_true_figures_or_a_reason(tmp_path: Path) -> None:
    status, results = bench(tmp_path)
    assert status == 0
    assert {file.name for file in tmp_path.iterdir()} == {
        f"kernels_cpu_float32_d8.{end}" for end in ("json", "md", "png")
    }
    assert (tmp_path / "kernels_cpu_float32_d8.png").read_bytes().startswith(b"\x89PNG")
    assert results["complete"]
    assert results["settings"] == {"dtype": "float32", "tokens": 40, "window": 5, "seed": 0, "largest_error": 1e-4,
                                   "reference_length": REFERENCE_LENGTH, "copy_tb_per_s": 0.002,
                                   "matmul_tflops": 0.01}  # fmt: skip
    measured: dict[str, set[str]] = {}
    for row in results["rows"]:
        kernel = KERNELS[row["kernel"]]
        assert row["length"] in ((12, 20) if kernel.by_length else (1,))
        if "skipped" in row:
            continue
        measured.setdefault(kernel.name, set()).add(row["side"])
        assert row["batch_size"] == (40 // row["length"] if kernel.by_length else kernel.batch_size)
        assert row["correct"]
        gradients = {f"d{name}" for name in kernel.layouts if name not in kernel.outputs}
        assert row["errors"].keys() - set(kernel.outputs) == (gradients if kernel.has_backward else set())
        assert 0 < max(row["errors"].values()) < 1e-5
        shape = shape_of(kernel, batch_size=row["batch_size"], length=row["length"], head_dim=8, window=5)
        for step in STEPS if kernel.has_backward else STEPS[:1]:
            low, middle, high = (row[f"{step}_ms"][name] for name in ("p20", "median", "p80"))
            assert 0 < low <= middle <= high
            floor, bound = CEILINGS.floor(*kernel.work(shape).of(step))
            assert row[f"{step}_floor_ms"] == pytest.approx(floor, rel=1e-3)
            assert (row[f"{step}_bound"], row[f"{step}_method"]) == (bound, "cpu")
            assert row[f"{step}_share"] == pytest.approx(floor / middle, rel=2e-3)
        assert ("forward_backward_ms" in row) == kernel.has_backward
    assert measured == {
        "chunk_delta_rule": {"reference", "torch"},
        "recurrent_delta_rule": {"reference"},
        "deltaformer_write": {"reference", "torch"},
        "deltaformer_write_read": {"reference", "torch"},
        "attention": {"sdpa", "sdpa-flash", "reference"},
        "attention_window": {"sdpa", "reference"},
        "short_convolution": {"conv1d", "reference"},
        "read_cache": {"sdpa", "reference", "torch"},
        "row_linear": {"addmv", "reference"},
        "delta_step": {"reference"},
    }
    reasons = {row["side"]: row["skipped"] for row in results["rows"] if "skipped" in row}
    assert reasons["triton"].startswith("impl: 'triton' needs ")
    assert {name for name, kernel in KERNELS.items() if kernel.has_backward} == set(BOTH)


def test_missing_libraries_and_a_slow_reference_are_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    status, results = bench(tmp_path, "chunk_delta_rule", lengths=f"{REFERENCE_LENGTH},{REFERENCE_LENGTH + 1}", heads=1)
    assert status == 0
    rows = {(row["side"], row["length"]): row for row in results["rows"]}
    assert rows["fla", 512]["skipped"] == "flash-linear-attention is not installed"
    assert rows["reference", 513]["skipped"] == "the reference is measured up to T 512, got 513"
    assert rows["reference", 512]["correct"]
    assert rows["torch", 513]["correct"]
    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    with pytest.raises(failures.Skipped, match="flash-linear-attention needs CUDA tensors, got cpu"):
        peers.fla_module("ops.delta_rule", torch.device("cpu"))


def scaled(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    o, state = chunk_delta_rule(q, k, v, beta, **options)
    return 1.001 * o, state


def doubled_gradient_of_beta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return chunk_delta_rule(q, k, v, 2 * beta - beta.detach(), **options)


def last_head_unknown(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    o, state = chunk_delta_rule(*tensors, **options)
    return torch.cat([o[:, :, :-1], 0 * o[:, :, -1:]], 2), state


def not_a_number(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    o, state = chunk_delta_rule(*tensors, **options)
    hole = torch.zeros_like(o)
    hole[1, 3, 0] = float("nan")  # in a row that is not compared
    return o + hole, state


@pytest.mark.parametrize(
    ("wrong", "tensors"),
    [
        (scaled, {"o", "dq", "dk", "dv", "dbeta"}),
        (doubled_gradient_of_beta, {"dbeta"}),
        (last_head_unknown, {"o", "dq", "dk", "dv", "dbeta"}),
        (not_a_number, {"o"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_kernel_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any], tensors: set[str]
) -> None:
    def some_wrong(*inputs: Tensor, impl: str, **options: Any) -> Any:
        return (wrong if impl == "torch" else chunk_delta_rule)(*inputs, impl=impl, **options)

    monkeypatch.setattr(delta_rule, "chunk_delta_rule", some_wrong)
    status, results = bench(tmp_path, "chunk_delta_rule", lengths="12")
    assert status == 1
    rows = {row["side"]: row for row in results["rows"]}
    assert rows["reference"]["correct"]
    assert rows["torch"]["correct"] is False
    assert {name for name, error in rows["torch"]["errors"].items() if error is None or error > 1e-4} == tensors
    assert report.outcome(rows["torch"]).startswith("wrong: relative errors o ")
    assert "| wrong |" in (tmp_path / "kernels_cpu_float32_d8.md").read_text()


def test_a_failure_loses_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def some_broken(*inputs: Tensor, impl: str, **options: Any) -> Any:
        if impl == "torch":
            raise RuntimeError("sizes differ\nin a second line")
        return chunk_delta_rule(*inputs, impl=impl, **options)

    monkeypatch.setattr(delta_rule, "chunk_delta_rule", some_broken)
    status, results = bench(tmp_path, "chunk_delta_rule", "row_linear", lengths="12")
    assert status == 1
    rows = {(row["kernel"], row["side"]): row for row in results["rows"]}
    assert rows["chunk_delta_rule", "torch"]["error"] == "RuntimeError: sizes differ"
    assert rows["chunk_delta_rule", "reference"]["correct"]
    assert rows["row_linear", "addmv"]["correct"]
    assert "| failed |" in (tmp_path / "kernels_cpu_float32_d8.md").read_text()


def test_a_reference_that_does_not_fit_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(*inputs: Tensor, impl: str, **options: Any) -> Any:
        if impl == "reference" and inputs[0].dtype == torch.float32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return chunk_delta_rule(*inputs, impl=impl, **options)

    monkeypatch.setattr(delta_rule, "chunk_delta_rule", hungry)
    status, results = bench(tmp_path, "chunk_delta_rule", lengths="12")
    rows = {row["side"]: row for row in results["rows"]}
    assert rows["reference"]["skipped"] == "the reference takes more memory than there is"
    assert rows["torch"]["correct"]
    assert status == 0


def test_speedups_are_over_the_fastest_right_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(factor: float) -> Any:
        return lambda _: lambda x: (factor * x,)

    kernel = Kernel(
        name="copy",
        summary="a copy",
        inputs=lambda shape, draw: {"x": draw.normal(shape.batch_size, shape.length, shape.num_heads, shape.head_dim)},
        layouts={"x": "BTHD", "y": "BTHD"},
        outputs=("y",),
        work=lambda shape: Work(shape.tensor_bytes, shape.tensor_bytes, 0),
        sides=(Side("slow", "peer", copied(1)), Side("fast", "peer", copied(1)), Side("cheat", "peer", copied(2)),
               Side("reference", "reference", copied(1)), Side("triton", "ours", copied(1))),
        reference=copied(1),
    )  # fmt: skip
    times = iter([9.0, 6.0, 0.1, 50.0, 2.0])
    monkeypatch.setitem(KERNELS, "copy", kernel)
    monkeypatch.setattr(
        measure, "_time", lambda call, device, captured: ("cpu", dict.fromkeys(("median", "p20", "p80"), next(times)))
    )
    plan = make_plan(kernels=("copy",), lengths=(4,), head_dims=(8,), device="cpu")
    *_, reference, ours = run_plan(plan, lambda line: None, lambda results: None)["rows"]
    assert ours["forward_speedup"] == 3
    assert "forward_speedup" not in reference
    moved = 2 * 4 * 64 * 4 * 2 * 8  # read and written: float32, 64 rows, T, H, D
    assert ours["forward_floor_ms"] == pytest.approx(1e3 * moved / 2e9, rel=1e-3)
    assert ours["forward_share"] == pytest.approx(1e3 * moved / 2e9 / 2, rel=1e-3)


def test_the_floor_is_the_larger_of_both() -> None:
    assert CEILINGS.floor(4_000_000, 10_000_000) == (2.0, "bytes")
    assert CEILINGS.floor(4_000_000, 50_000_000) == (5.0, "FLOPs")
    work = Work(read=10, written=3, flops=100, backward_flops=250)
    assert work.of("forward") == (13, 100)
    assert work.of("forward_backward") == (13 + 10 + 3 + 10, 350)  # also the inputs, gradient of outputs, of inputs


def test_work_by_hand() -> None:
    """B 2, T 8, H 4, D 16, in bf16: 1024 numbers of 2 bytes in a tensor, 64 strengths."""
    shape = Shape(2, 8, 4, 16, window=3, dtype=torch.bfloat16, device=torch.device("cpu"))
    full, windowed, before = 36, 8 * 3 - 3, 28  # visible pairs of a head
    expected = {
        "chunk_delta_rule": Work(3 * 2048 + 128, 2048, 64 * (6 * 256 + 64 * 16), 2 * 64 * (6 * 256 + 64 * 16)),
        "deltaformer_write": Work(2 * 2048 + 128, 2048, 8 * 64 * before, 8 * 160 * before),
        "deltaformer_write_read": Work(3 * 2048 + 128, 2048, 8 * 64 * (before + full), 8 * 160 * (before + full)),
        "attention": Work(3 * 2048, 2048, 8 * 64 * full, 8 * 160 * full),
        "attention_window": Work(3 * 2048, 2048, 8 * 64 * windowed, 8 * 160 * windowed),
        "short_convolution": Work(2048 + 2 * 4 * 64, 2048, 8 * 1024, 16 * 1024),
        "read_cache": Work(2 * 2048 + 2 * 128 + 4 * 2, 4 * (128 + 8), 4 * 1024),
        "row_linear": Work(2 * (64 * 64 + 3 * 64), 2 * 64, 2 * 64 * 64),
    }
    assert {name: KERNELS[name].work(shape) for name in expected} == expected
    token = replace(shape, length=1)
    state = 4 * 2 * 4 * 256
    assert KERNELS["recurrent_delta_rule"].work(token) == Work(3 * 256 + 16 + state, 256 + state, 8 * 6 * 256)
    channels = 3 * 64
    read = 2 * (2 * channels + 4 * channels + 2 * 3 * channels + 8) + 2 * 8 + state
    assert KERNELS["delta_step"].work(token) == Work(
        read, 2 * (128 + 2 * channels) + state, 8 * 6 * 256 + 8 * 2 * channels
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_are_those_of_inputs_and_outputs(name: str, dtype: torch.dtype) -> None:
    kernel = KERNELS[name]
    case = Case(kernel, shape_of(kernel, dtype=dtype), seed=0)
    assert [x.dim() for x in case.inputs.values()] == [len(kernel.layouts[key]) for key in case.inputs]
    outputs = case.results(kernel.reference(case.shape), case.inputs, case.gradient)
    unused = 3 * 96 * dtype.itemsize if name == "delta_step" else 0  # the slot of each row that the token replaces
    work = kernel.work(case.shape)
    assert work.read == sum(x.nbytes for x in case.inputs.values()) - unused
    assert work.written == sum(outputs[key].nbytes for key in kernel.outputs)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_exact_is_so_in_part_and_for_long_sequences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first and the last row and head, in float64, as of the whole; and by the form for long sequences."""
    kernel = KERNELS[name]
    case = Case(kernel, shape_of(kernel, dtype=torch.float64), seed=0)
    assert max(case.errors(kernel.reference(case.shape)).values()) < 1e-12
    if kernel.exact is not None:
        assert max(case.errors(kernel.exact(case.shape)).values()) < 1e-12
        monkeypatch.setattr("zoo.bench.kernels.case.REFERENCE_LENGTH", 1)
        assert max(Case(kernel, case.shape, seed=0).errors(kernel.reference(case.shape)).values()) < 1e-12


def test_a_case_keeps_its_inputs() -> None:
    kernel = KERNELS["delta_step"]  # which writes to them
    case = Case(kernel, shape_of(kernel), seed=0)
    before = {key: x.clone() for key, x in case.inputs.items()}
    call = kernel.reference(case.shape)
    first, second = (case.errors(call) for _ in range(2))
    assert first == second
    measure._timed(case, call, "forward")()
    assert all(torch.equal(x, case.inputs[key]) for key, x in before.items())


def test_cells_share_tensors_and_leave_out_what_a_window_covers() -> None:
    plan = make_plan(kernels=("attention_window", "row_linear"), lengths=(4, 8), heads=(1, 2), head_dims=(8, 16),
                     window=4, tokens=20, device="cpu")  # fmt: skip
    cells = plan.cells()
    assert [str(cell) for cell in cells[:6]] == [
        *(f"attention_window  {side}  T 8  H 1  D 8" for side in ("sdpa", "flex", "xformers", "reference", "triton")),
        "attention_window  sdpa  T 8  H 2  D 8",
    ]
    assert len(cells) == 5 * 2 * 2 + 3 * 2 * 2
    assert plan.shape(cells[0]).batch_size == 2
    assert {cell.length for cell in cells if cell.kernel == "row_linear"} == {1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["delta"], f"NAMES: got 'delta', allowed: {', '.join(NAMES)}"),
        (["--lengths", "64,x"], "--lengths: got 'x', allowed: numbers of tokens, such as 512,2k"),
        (["--head-dims", "0"], "--head-dims: got '0', allowed: numbers of channels, such as 64,128"),
        (["--heads", "2,-1"], "--heads: got '-1', allowed: numbers of heads, such as 8,16"),
        (["--heads", "2048k"], "--heads: got 2097152, allowed: from 1 to 1048576"),
        (["--window", "0"], "--window: got 0, allowed: from 1 to 1048576"),
        (["--tokens", "-4"], "--tokens: got -4, allowed: from 1 to 1048576"),
        (["--seed", "-1"], "--seed: got -1, allowed: from 0 to 1048576"),
        (["attention_window", "--lengths", "16", "--window", "16"],
         "--window: got 16, allowed: below the longest sequence, which has 16"),
        (["--dtype", "int8"], "--dtype: got 'int8', allowed: float32, bfloat16, float16"),
        (["--device", "tpu"], "--device: got 'tpu', allowed: cpu, cuda"),
        (["--out", "/proc/zoo"], "--out: cannot write to /proc/zoo: No such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_ends_in_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["zoo", "bench", "kernels", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr() == ("", f"zoo: error: {message}\n")


def test_help_names_every_kernel() -> None:
    shown = CliRunner().invoke(cli.app, ["bench", "kernels", "--help"], env={"COLUMNS": "200"}).output
    assert [name for name in (*NAMES, "--window") if name not in shown] == []


def made_up() -> dict[str, Any]:
    """Results of one kernel at one shape: a peer, a reference without a graph, ours, and what has no figures."""

    def row(side: str, role: str, forward: float, both: float, method: str = "cuda_graph") -> dict[str, Any]:
        figures: dict[str, Any] = {"side": side, "role": role, "batch_size": 8, "errors": {"o": 2e-3}, "correct": True}
        for step, time, floor in (("forward", forward, 0.25), ("forward_backward", both, 1.0)):
            figures |= {f"{step}_ms": {"median": time}, f"{step}_method": method, f"{step}_floor_ms": floor,
                        f"{step}_bound": "bytes" if step == "forward" else "FLOPs",
                        f"{step}_share": floor / time}  # fmt: skip
            if role == "ours":
                figures[f"{step}_speedup"] = 1 / time
        return figures

    rows = [
        row("fla", "peer", 1.0, 1.5),
        row("reference", "reference", 1000.0, 4000.0, "calls"),
        row("torch", "ours", 2.0, 8.0),
        row("triton", "ours", 0.5, 2.0),
    ]
    place = {"kernel": "chunk_delta_rule", "length": 2048, "num_heads": 16, "head_dim": 64}
    longer = [{"side": "fla", "skipped": "not installed"}, {"side": "reference", "skipped": "too slow"},
              {"side": "torch", "error": "RuntimeError: no"}, {"side": "triton", "correct": False, "errors": {"o": 1},
                                                               "batch_size": 1, "role": "ours"}]  # fmt: skip
    return {
        "machine": {"device": "GPU [1]", "torch": "2"},
        "settings": {"dtype": "bfloat16", "tokens": 16384, "copy_tb_per_s": 4.281, "matmul_tflops": 750.4},
        "rows": [place | row for row in rows] + [place | {"length": 4096} | row for row in longer],
    }


def test_reports_show_times_floor_share_and_speedup(tmp_path: Path) -> None:
    results = made_up()
    lines = report.markdown(results).splitlines()
    assert lines[0] == ("Kernels: GPU [1], torch 2, bfloat16, 16,384 tokens; a copy 4.28 TB/s, a product 750 TFLOP/s:")
    assert lines[2].startswith("### chunk_delta_rule: the delta rule over sequences")
    assert lines[2].endswith("errors up to 2.0e-03")
    assert lines[4] == "| T | B | H | D | fla | reference | torch | triton | floor | share | over peer |"
    times = "1 / **1.5** | 1,000* / 4,000* | 2 / 8 | **0.5** / 2"
    assert lines[6] == f"| 2048 | 8 | 16 | 64 | {times} | 0.25b / 1f | 50% / 50% | 2.00 / 0.50 |"
    assert lines[7] == "| 4096 | 1 | 16 | 64 | - | - | failed | wrong | - | - | - |"
    assert [report.outcome(row) for row in results["rows"][3:]] == [
        "forward 0.5 ms (50% of it the floor), forward and backward 2 ms (50% of it the floor)",
        "skipped: not installed",
        "skipped: too slow",
        "RuntimeError: no",
        "wrong: relative errors o 1",
    ]
    for width in (60, 200):
        console = Console(width=width, file=StringIO(), record=True)
        console.print(report.table(results, width))
        shown = console.export_text()
        assert "…" not in shown, shown
        assert all(text in shown for text in ("0.5 / 2", "0.25b / 1f", "1,000* / 4,000*", "2.00 / 0.50"))
    report.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_figures(tmp_path: Path) -> None:
    results = made_up()
    results["rows"] = results["rows"][4:]
    report.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_ceilings_are_measured() -> None:
    cpu = torch.device("cpu")
    assert 1e8 < timing.copy_bandwidth(cpu) < 1e13
    assert 1e8 < timing.matmul_rate(cpu, torch.float32) < 1e15


@needs_cuda
@pytest.mark.usefixtures("give_memory_back")
def test_cuda_has_figures_or_a_reason(tmp_path: Path) -> None:
    status, results = bench(tmp_path, lengths="512", window=100, tokens=1024, device="cuda", **{"head-dims": 64})
    assert [row for row in results["rows"] if "skipped" not in row and not row.get("correct")] == []
    assert status == 0
    ours = {row["kernel"]: row for row in results["rows"] if row["side"] == "triton"}
    assert ours.keys() == KERNELS.keys()
    for name, row in ours.items():
        for step in STEPS if KERNELS[name].has_backward else STEPS[:1]:
            assert row[f"{step}_method"] == "cuda_graph"
            assert 0 < row[f"{step}_share"] < 1.2, (name, row)
    assert 1e11 < results["settings"]["copy_tb_per_s"] * 1e12 < 1e14
