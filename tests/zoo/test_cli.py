"""The command, as a user runs it."""

import csv
import json
import os
import pty
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from report_cases import fake

import zoo


def run(*arguments: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zoo.cli", *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)


def test_import_is_light() -> None:
    heavy = "torch._inductor torch._dynamo triton tensordict matplotlib rich typer omegaconf"
    code = f"import sys, zoo, zoo.kernels; print([name for name in {heavy.split()} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], ["list", "show", "compare", "generate"]),
        (["generate", "--help"], ["--prompt-file", "--top-p", "--stop", "--no-compile"]),
        (
            ["compare", "--help"],
            ["--lengths", "--text", "--out", "--tokens-per-step", "--resume"],
        ),
        (["report", "--help"], ["RESULTS.json", "--out", "--mixed"]),
        (["list"], ["delta_net", "sliding_window", "swiglu", "deltanet-swa-1.3b", "2406.06484"]),
        (["list", "delta*", "--kind", "mixer"], ["delta_net"]),
        (["--version"], [zoo.__version__]),
    ],
    ids=" ".join,
)
def test_quick_commands(arguments: list[str], shown: list[str]) -> None:
    start = time.perf_counter()
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert [text for text in shown if text not in done.stdout] == []
    assert time.perf_counter() - start < 10  # a second or two on an idle machine


def test_show_prints_what_builds_the_same_model(tmp_path: Path) -> None:
    overrides = ["num_layers=2", "layers.1.mixer={name: sliding_window, window: 8}"]
    done = run("show", "deltanet-tiny", *overrides)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["layers"][1]["mixer"]["window"] == 8
    (tmp_path / "shown.yaml").write_text(done.stdout)
    shown, original = zoo.build(tmp_path / "shown.yaml", seed=0), zoo.build("deltanet-tiny", overrides, seed=0)
    assert shown.config == original.config
    for a, b in zip(shown.parameters(), original.parameters(), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "deltanet-tinny"], "did you mean 'deltanet-tiny'"),
        (["show", "deltanet-tiny", "layers.1.mixer.conv_sise=3"], "override layers.1.mixer.conv_sise: unknown option"),
        (["list", "nothing*"], "nothing is called 'nothing*'"),
        (["list", "--kind", "mixxer"], "did you mean 'mixer'"),
        (["compare", "--lengths", "64,x"], "--lengths: got 'x'"),
        (["compare", "--text", "missing.txt"], "cannot read missing.txt"),
        (["compare", "--dtype", "int8"], "--dtype: got 'int8'"),
        (["compare", "--out", "/proc/zoo"], "--out: cannot write to /proc/zoo"),
        (["compare", "--out", "/dev/null"], "--out: cannot write to /dev/null: File exists"),
        (["report", "missing.json"], "missing.json: cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_one_clear_line(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


def test_compare_shows_a_table_and_ends_in_json(tmp_path: Path) -> None:
    """Eager, in another folder, with a class of that folder."""
    (tmp_path / "my_mixer.py").write_text("from zoo.mixers.full_attention import FullAttention as Mine\n")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    options = {"lengths": "16,32", "tokens-per-step": 64, "steps": 2, "warmup": 1, "text": "text.txt", "out": "a/b"}
    words = [f"--{name}={value}" for name, value in options.items()]
    words += ["--compile", "none", "--override", "layers.0.mixer=my_mixer.Mine", "--override", ""]
    done = run("compare", "transformer-tiny", *words, folder=tmp_path, PYTHONSAFEPATH="1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    results = json.loads(lines[-1])
    out = tmp_path / "a" / "b"
    assert json.loads((out / "results.json").read_text()) == results
    assert any("transformer-tiny" in line and "train" in line for line in lines[:-1])
    files = {"results.json", "results.csv", "table.md", "report.html"}
    files |= {f"{mode}.{ending}" for mode in ("train", "forward") for ending in ("png", "svg")}
    assert {file.name for file in out.iterdir()} == files
    assert {*lines[-2].split()} == {f"a/b/{name}" for name in files}
    named = "recipe peer length batch_size mode compile dtype tokens_per_s step_ms mfu peak_bytes compile_cold_s loss"
    assert {*named.split()} <= results["rows"][0].keys()
    assert {"device", "torch", "python", "commit", "matmul_tflops", "peak_tflops"} <= results["machine"].keys()
    assert (results["complete"], results["missing"], results["mixed"]) == (True, [], [])
    name = "transformer-tiny layers.0.mixer=my_mixer.Mine"
    assert [row["recipe"] for row in results["rows"]] == [name] * 4 + ["transformer-tiny"] * 4
    assert f" [1/8] {name}  train  float32  B 4  T 16  eager\n" in done.stderr
    assert done.stderr.count("tokens/s") == 8
    again = run("compare", "transformer-tiny", *words, "--resume", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[-1])["rows"] == results["rows"]
    assert "tokens/s" not in again.stderr  # nothing was left to do


def test_reports_of_several_runs(tmp_path: Path) -> None:
    first = fake(("forward",), (2048,))
    second = fake(("train",), (2048,)) | {"machine": first["machine"] | {"commit": "abc"}}
    (tmp_path / "a.json").write_text(json.dumps(first))
    (tmp_path / "b.json").write_text(json.dumps(second))
    refused = run("report", "a.json", "b.json", folder=tmp_path)
    assert refused.returncode == 2
    assert f"(commit: {first['machine']['commit']} and abc)" in refused.stderr
    assert refused.stderr.count("\n") == 1
    done = run("report", "a.json", "b.json", "--mixed", "--out", "both", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for file in ("table.md", "report.html"):
        assert "Not all of this was measured alike. What differs: commit:" in (tmp_path / "both" / file).read_text()
    with (tmp_path / "both" / "results.csv").open(newline="") as lines:
        assert len([*csv.DictReader(lines)]) == len(first["rows"]) + len(second["rows"])


def test_progress_in_a_terminal(tmp_path: Path) -> None:
    """Lines that stay, under them one that changes; the JSON is on stdout alone."""
    main, other = pty.openpty()
    words = ["deltanet-tiny", "--mode=forward", "--compile=none", "--lengths=16", "--steps=1", "--warmup=1", "--out=a"]
    command = [sys.executable, "-m", "zoo.cli", "compare", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=other, cwd=tmp_path, text=True) as process:
        os.close(other)
        shown = b""
        with suppress(OSError):  # the end
            while part := os.read(main, 1 << 16):
                shown += part
        assert process.stdout
        results = json.loads(process.stdout.read().splitlines()[-1])
    os.close(main)
    assert process.returncode == 0
    assert results["complete"]
    assert b"[1/1] deltanet-tiny  forward  float32" in shown
    assert b"tokens/s" in shown


def test_a_class_path_may_name_a_module_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "my_mixer.py").write_text("from zoo.mixers.full_attention import FullAttention as Mine\n")
    command = [str(Path(sys.executable).parent / "zoo"), "show", "transformer-tiny", "layers.0.mixer=my_mixer.Mine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "name: my_mixer.Mine" in done.stdout
