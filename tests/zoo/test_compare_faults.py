"""`zoo compare` when something fails: one row or one line says so, and nothing else is lost."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from compare_cases import Command, measured, small, write_faults

from zoo import cli
from zoo.cli import running
from zoo.compare import peers
from zoo.compare.apart import Apart, ApartError
from zoo.compare.measure import measure
from zoo.compare.plan import make_plan

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

QUICK = (
    *("--mode", "train", "--compile", "none", "--lengths", "16"),
    *("--tokens-per-step", "32", "--steps", "2", "--warmup", "1"),
)
REPORT = {"results.json", "results.csv", "table.md", "report.html", "train.png", "train.svg"}


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.syspath_prepend(tmp_path)
    return {**write_faults(tmp_path), "one": small(tmp_path, "one"), "two": small(tmp_path, "two", "delta_net")}


def plan_of(*sources: str, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "modes": ("train",), "compiles": ("none",), "lengths": (16,), "tokens_per_step": 32, "steps": 2, "warmup": 1
    }  # fmt: skip
    return make_plan([*sources], **defaults | options)


def names(folder: Path) -> set[str]:
    """Of its files, but for earlier results that were set aside."""
    return {file.name for file in folder.iterdir() if not file.name.startswith("results-")}


def test_what_fails_is_a_row_and_the_rest_is_complete(faults: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    sources = [f"{name}.yaml" for name in ("one", "Raising", "Hungry", "Greedy", "Killed", "Ending", "Hanging", "two")]
    with Command(*sources, *QUICK, "--timeout", "3", "--out", "out", folder=tmp_path) as command:
        assert command.wait() == 1, command.stderr
        assert command.none_left(5)
    results = json.loads(command.stdout.splitlines()[-1])
    assert (results["complete"], results["missing"]) == (True, [])
    assert results == json.loads((tmp_path / "out" / "results.json").read_text())
    rows = {row["recipe"]: row for row in results["rows"]}
    assert [*rows] == [Path(source).stem for source in sources]
    assert {name for name, row in rows.items() if "error" not in row} == {"one", "two"}
    log = "logs/{}_train_float32_none_B2_T16.txt"
    for name, said in {
        "Raising": "RuntimeError: it broke",
        "Hungry": "MemoryError",
        "Killed": "its process was ended by signal 9 (Killed), as the system does to one when memory runs out",
        "Ending": "its process ended with status 7",
        "Hanging": "killed after 3 s without an end",
    }.items():
        assert rows[name]["error"] == f"{said} ({log.format(name)})"
        assert not {"tokens_per_s", "step_ms", "loss"} & rows[name].keys()
        assert f"  failed: {said} " in command.stderr
    assert "can't allocate memory" in rows["Greedy"]["error"]
    assert names(tmp_path / "out") == {*REPORT, "logs"}
    assert names(tmp_path / "out" / "logs") == {Path(log.format(name)).name for name in rows.keys() - {"one", "two"}}
    assert "and there is more to say" in (tmp_path / "out" / log.format("Raising")).read_text()
    for file in ("table.md", "report.html", "results.csv"):
        text = (tmp_path / "out" / file).read_text()
        assert all(word in text for word in ("it broke", "killed after 3 s", "ended with status 7")), file


def test_a_mixer_that_cannot_decode_is_skipped(faults: dict[str, str], tmp_path: Path) -> None:
    (row,) = measured(plan_of(faults["Fading"], modes=("decode",), batch_sizes=(1,), tokens_per_step=None), tmp_path)[
        "rows"
    ]
    assert row["skipped"] == "layer 0's mixer 'faults.Fading' does not support 'decode'"


def test_failed_cells_are_measured_again_and_no_others(faults: dict[str, str], tmp_path: Path) -> None:
    plan = plan_of(faults["one"], faults["Raising"])
    before = measured(plan, tmp_path / "out")
    (tmp_path / "faults.py").write_text((tmp_path / "faults.py").read_text().replace("raise RuntimeError", "print"))
    after = measured(plan, tmp_path / "out", previous=json.loads(json.dumps(before)))
    assert [row["recipe"] for row in after["rows"]] == ["one", "Raising"]
    assert json.dumps(before["rows"][0]) == json.dumps(after["rows"][0])
    assert "error" in before["rows"][1]
    assert "tokens_per_s" in after["rows"][1]
    assert names(tmp_path / "out") == set()


def test_graphs_that_break_are_counted(faults: dict[str, str], tmp_path: Path) -> None:
    plan = plan_of(faults["Breaking"], modes=("forward",), compiles=("model",))
    with Apart(measure, plan, *plan.cells(), log=tmp_path / "log.txt", environment={}) as call:
        row = call.result(200)
    assert row["graph_breaks"] >= 1  # Dynamo counts one again in each call around it
    assert row["graphs"] > 1


def test_a_profile_that_fails_costs_no_figures(
    faults: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.compare.run.measure.profile", peers.make)  # of other arguments
    plan = plan_of(faults["one"], profile=True)
    (row,) = measured(plan, tmp_path / "out")["rows"]
    assert row["tokens_per_s"] > 0
    assert row["error"].startswith("TypeError: make() takes 2 positional arguments")
    monkeypatch.undo()
    before = {**measured(plan_of(faults["two"]), tmp_path / "out"), "rows": [row]}
    (row,) = measured(plan, tmp_path / "out", previous=before)["rows"]
    assert "error" not in row
    assert (tmp_path / "out" / row["profile"]["trace"]).is_file()


def test_peers_that_are_not_installed_are_skipped_until_they_are(
    faults: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(faults["one"], faults["two"], beside=("fla", "hf"), compiles=("none", "block"))
    monkeypatch.setattr(peers, "installed", lambda peer: None)
    results = measured(plan_of(faults["one"], faults["two"], beside=("fla", "hf")), tmp_path / "out")
    assert [(row["recipe"], row["peer"], row.get("skipped")) for row in results["rows"]] == [
        ("one", None, None),
        ("hf/one", "hf", "transformers is not installed"),
        ("two", None, None),
        ("fla/two", "fla", "flash-linear-attention is not installed"),
    ]
    assert results["machine"]["peers"] == {"fla": None, "hf": None}
    assert [cell.compile for cell in plan.cells() if cell.peer] == ["none", "none"]  # blocks are the zoo's
    monkeypatch.setattr(peers, "installed", lambda peer: "9")
    later = measured(plan_of(faults["one"], faults["two"], beside=("fla", "hf")), tmp_path / "out", previous=results)
    assert later["mixed"] == []
    assert all("error" in row and "skipped" not in row for row in later["rows"] if row["peer"])  # now they are tried


def test_ctrl_c_leaves_a_valid_file_and_resume_goes_on(faults: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    arguments = ("one.yaml", "Hanging.yaml", *QUICK, "--out", str(tmp_path / "out"))
    with Command(*arguments, folder=tmp_path) as command:
        command.wait_for("[2/2] Hanging")
        command.wait_for_program("sleep")
        (tmp_path / "second").mkdir()
        with Command(faults["one"], *arguments[2:], folder=tmp_path / "second") as second:
            assert second.wait() == 2
            assert second.stderr.splitlines()[-1].startswith("zoo: error: --out: another run measures into ")
        command.interrupt()
        assert command.wait(30) == 130
        assert command.none_left(5)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["complete"], len(results["missing"]), len(results["rows"])) == (False, 1, 1)
    assert json.loads(command.stdout.splitlines()[-1]) == results
    assert "Traceback" not in command.stderr
    (tmp_path / "hang").unlink()
    with Command(*arguments, "--resume", folder=tmp_path) as command:
        assert command.wait() == 0, command.stderr
        assert command.none_left(5)
    after = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (after["complete"], after["missing"]) == (True, [])
    assert json.dumps(results["rows"][0]) == json.dumps(after["rows"][0])
    assert [row["recipe"] for row in after["rows"]] == ["one", "Hanging"]
    assert command.stderr.count("tokens/s") == 1  # what was missing
    assert names(tmp_path / "out") == REPORT


def test_ctrl_c_where_cells_are_compiled_ahead(faults: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    arguments = ("Hanging.yaml", "--compile", "model", "--mode", "train,forward", "--jobs", "2", "--lengths", "16")
    with Command(*arguments, "--out", "out", folder=tmp_path) as command:
        command.wait_for_program("sleep")
        command.interrupt()
        assert command.wait(30) == 130
        assert command.none_left(5)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["complete"], len(results["missing"]), results["rows"]) == (False, 2, [])
    assert "Traceback" not in command.stderr
    for file in ("table.md", "report.html"):
        assert "Not complete: 2 cells of the plan not measured: " in (tmp_path / "out" / file).read_text()


def test_a_killed_command_leaves_a_valid_file_and_no_processes(faults: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    with Command("one.yaml", "Hanging.yaml", *QUICK, "--out", "out", folder=tmp_path) as command:
        command.wait_for("[2/2] Hanging")
        command.wait_for_program("sleep")
        os.kill(command.process.pid, signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL
        assert command.none_left(5)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["complete"], len(results["missing"]), len(results["rows"])) == (False, 1, 1)
    (tmp_path / "hang").unlink()
    after = measured(plan_of(faults["one"], faults["Hanging"]), tmp_path / "out", previous=results, mixed=True)
    assert after["complete"]
    assert [row["recipe"] for row in after["rows"]] == ["one", "Hanging"]
    assert "tokens_per_s" in after["rows"][1]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: its exit status, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["zoo", *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()  # pyright: ignore[reportReturnType]

    return call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mode learn", "--mode: got 'learn', allowed: train, forward, prefill, decode"),
        ("--compile yes", "--compile: got 'yes', allowed: none, model, block"),
        ("--dtype float64", "--dtype: got 'float64', allowed: float32, bfloat16, float16"),
        ("--peers x", "--peers: got 'x', allowed: fla, hf"),
        ("--lengths 1m", "--lengths: got '1m', allowed: numbers of tokens, such as 512,2k"),
        ("--batch 0", "--batch: got '0', allowed: numbers of rows, such as 1,8"),
        ("--jobs 0", "--jobs: got 0, allowed: at least 1"),
        ("--mixed", "--mixed: there is nothing to mix with, allowed: with --resume"),
        ("--steps 0", "--steps: got 0, allowed: at least 1"),
        ("--timeout inf", "--timeout: got inf, allowed: 1 to 1000000"),
        ("--device tpu", "--device: got 'tpu', allowed: cpu, cuda"),
        ("--override dimm=8", "did you mean 'dim'"),
        ("--text /proc", "text: cannot read /proc: Is a directory"),
    ],
)
def test_an_option_that_cannot_be_ends_in_one_line(main: Any, arguments: str, message: str) -> None:
    code, stdout, stderr = main("compare", "transformer-tiny", *arguments.split())
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert message in stderr


HEAD = '{"machine": {}, "settings": {}, "complete": true, "rows": '


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "results.json: cannot be read: "),
        ("", "results.json: cannot be read: "),
        ("{", "results.json: cannot be read: "),
        ("\xff", "results.json: cannot be read: "),
        ("[]", "holds no results, allowed: what zoo compare wrote, with machine, settings, complete, rows"),
        (f"{HEAD}null}}", "results.json: holds no results, allowed:"),
        (f'{HEAD}[{{"recipe": "a", "compiled": true}}]}}', "results.json: holds no rows of this version's zoo compare"),
        (f"{HEAD}[7]}}", "results.json: holds no rows of this version's zoo compare"),
    ],
)
def test_what_is_no_result_is_refused(main: Any, tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "results.json"
    if text is None:
        file.mkdir()
    else:
        file.write_text(text, encoding="latin-1")
    for words in (("report", str(file)), ("compare", "transformer-tiny", "--resume", "--out", str(tmp_path))):
        code, stdout, stderr = main(*words)
        assert (code, stdout, stderr.count("\n")) == (2, "", 1)
        assert message in stderr
    assert text is None or file.read_text(encoding="latin-1") == text


@pytest.mark.parametrize("lasting", [False, True])
def test_no_room_for_the_results_so_far(
    faults: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: Any, lasting: bool
) -> None:
    """For the second writing alone, or for all: measuring goes on, and stdout has everything."""
    calls: list[Path] = []
    write = running.write_whole

    def full(path: Path, fill: Any) -> None:
        calls.append(path)
        if lasting or len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, fill)

    monkeypatch.setattr(running, "write_whole", full)
    out = tmp_path / "out"
    code, stdout, stderr = main("compare", faults["one"], faults["two"], *QUICK, "--out", str(out))
    results = json.loads(stdout.splitlines()[-1])
    assert (results["complete"], len(results["rows"])) == (True, 2)
    said = f"cannot write {out}/results.json: No space left on device"
    assert said in stderr.splitlines()
    assert (code, f"zoo: error: {said}" in stderr) == ((1, True) if lasting else (0, False))
    told = "These results could not be written to results.json." in (out / "report.html").read_text()
    assert told == lasting
    if not lasting:
        assert json.loads((out / "results.json").read_text()) == results


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for very little."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        subprocess.run(options, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full(faults: dict[str, str], full_disk: Path, tmp_path: Path, main: Any) -> None:
    filler = full_disk / "filler"
    out = full_disk / "out"
    for size in (60_000, 0):  # no room for results; room for them, but not for the report
        filler.write_bytes(b"x" * size)
        code, stdout, stderr = main("compare", faults["one"], faults["Raising"], *QUICK, "--out", str(out))
        results = json.loads(stdout.splitlines()[-1])
        assert [row["recipe"] for row in results["rows"]] == ["one", "Raising"]
        assert "tokens_per_s" in results["rows"][0]
        assert results["complete"] is True
        assert code == 1
        assert "zoo: error: cannot write the report: No space left on device" in stderr
        assert (f"zoo: error: cannot write {out}/results.json" in stderr) == bool(size)
    assert json.loads((out / "results.json").read_text()) == results
    assert not [file for file in out.rglob("*") if file.name.startswith(".")]


def test_a_call_in_a_process_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with Apart(os.getenv, "ZOO_SAYS", log=log, environment={"ZOO_SAYS": "so"}) as call:
        assert call.result(60) == "so"
    with Apart(os.system, "echo said; echo told >&2", log=log, environment={}) as call:
        assert call.result(60) == 0
    assert log.read_text() == "said\ntold\n"
    with Apart(int, "x", log=log, environment={}) as call, pytest.raises(ApartError, match=r"^ValueError: invalid lit"):
        call.result(60)
    with Apart(signal.pause, log=log, environment={}) as call, pytest.raises(ApartError, match=r"after 0\.5 s"):
        call.result(0.5)
    for number in (signal.SIGSEGV, signal.SIGRTMIN + 1):
        with (
            Apart(signal.raise_signal, number, log=log, environment={}) as call,
            pytest.raises(ApartError, match=rf"^its process was ended by signal {number:d} \(.*\)$"),
        ):
            call.result(60)


def test_many_calls_leave_nothing_open(tmp_path: Path) -> None:
    def call() -> None:
        with Apart(os.getpid, log=tmp_path / "log.txt", environment={}) as apart:
            apart.result(60)

    call()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        call()
    assert len(os.listdir("/proc/self/fd")) <= before
