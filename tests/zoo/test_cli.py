"""The command, as a user runs it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import zoo


def run(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zoo.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


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
        (["compare", "--help"], ["--lengths", "--text", "--out", "--tokens-per-step"]),
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
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    out = tmp_path / "out"
    options = {"lengths": 32, "tokens-per-step": 64, "steps": 2, "warmup": 1, "text": text, "out": out}
    done = run("compare", "deltanet-tiny", *(f"--{name}={value}" for name, value in options.items()))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    results = json.loads(lines[-1])
    assert json.loads((out / "results.json").read_text()) == results
    assert any("deltanet-tiny" in line and "train" in line for line in lines[:-1])
    assert {file.name for file in out.iterdir()} == {"results.json", "table.md", "plot.png"}
    assert {"recipe", "length", "mode", "compiled", "tokens_per_s", "step_ms", "peak_bytes", "compile_s", "graphs",
            "graph_breaks", "params", "flops_per_token", "loss"} <= results["rows"][0].keys()  # fmt: skip
    assert {"device", "torch", "python", "commit"} <= results["machine"].keys()
    assert results["complete"] is True
    assert "\n[1/4] deltanet-tiny  B 2  T 32  train  eager" in f"\n{done.stderr}"


def test_a_class_path_may_name_a_module_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "my_mixer.py").write_text("from zoo.mixers.full_attention import FullAttention as Mine\n")
    command = [str(Path(sys.executable).parent / "zoo"), "show", "transformer-tiny", "layers.0.mixer=my_mixer.Mine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "name: my_mixer.Mine" in done.stdout
