"""Prompts and continuations as text, and `zoo generate`."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zoo
from zoo.cli import main
from zoo.prompt import Prompt, read

IDS = {"vocab_size": 300, "dim": 16, "num_layers": 1, "layers": {"pattern": [{"mixer": "full_attention"}]}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    zoo.save(zoo.build("deltanet-tiny", ["num_layers=1"], seed=0), tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def ids_folder(tmp_path: Path) -> Path:
    zoo.save(zoo.build(IDS, seed=0), tmp_path / "ids")
    return tmp_path / "ids"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The command in this process: its exit status."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["zoo", *map(str, arguments)])
    with pytest.raises(SystemExit) as done:
        main()
    return int(done.value.code or 0)


def test_bytes_are_shown_when_their_character_is_complete() -> None:
    prompt = Prompt("né", 256)
    assert prompt.ids == [*"né".encode()]
    shown = [prompt.show(byte) for byte in [*"a€".encode(), 0xFF, 0xE2]]
    assert shown == ["a", "", "", "€", "�", ""]
    assert prompt.finish() == "�"


def test_a_character_may_begin_in_the_prompt() -> None:
    prompt = Prompt(b"caf\xc3".decode(errors="surrogateescape"), 256)
    assert (prompt.ids, prompt.text) == ([*b"caf\xc3"], "caf")
    assert (prompt.show(0xA9), prompt.finish()) == ("\u00e9", "")


def test_a_prompt_file_may_hold_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"a\r\n\xff\xc3\xa9")
    assert Prompt(read(None, tmp_path / "prompt.txt"), 256).ids == [*b"a\r\n\xff\xc3\xa9"]


def test_other_vocabularies_are_ids() -> None:
    prompt = Prompt(" 1,2  299,\n", 300)
    assert (prompt.ids, prompt.text, prompt.show(7), prompt.finish()) == ([1, 2, 299], "1 2 299", " 7", "")


def test_generate_prints_the_prompt_and_its_continuation(folder: Path) -> None:
    command = [sys.executable, "-m", "zoo.cli", "generate", str(folder), "--prompt", "Tö be", "--max-new-tokens", "30"]
    done = subprocess.run([*command, "--seed", "3", "--top-p", "0.9"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens = torch.tensor([[*"Tö be".encode()]])
    ids = zoo.load(folder).generate(tokens, 30, temperature=0.8, top_p=0.9, seed=3)
    assert done.stdout.decode() == bytes(ids[0].tolist()).decode(errors="replace") + "\n"
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("30 tokens in ")
    assert line.endswith(" tokens/s")


def test_generate_prints_ids_up_to_the_stop(
    ids_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = zoo.load(ids_folder).generate(torch.tensor([[5, 6]]), 20, temperature=2.0, seed=0)[0].tolist()
    stop = next(i for i in range(6, 22) if ids[i] not in ids[2:i])
    settings = ["--temperature", 2, "--seed", 0, "--max-new-tokens", 100, "--stop", ids[stop]]
    assert run(monkeypatch, "generate", ids_folder, "--prompt", "5,6", *settings) == 0
    shown = capsys.readouterr()
    assert shown.out == " ".join(map(str, ids[:stop])) + "\n"
    assert shown.err.startswith(f"{stop - 1} tokens in ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--prompt, --prompt-file: got neither, allowed: one of them"),
        (["--prompt", "a", "--prompt-file", "b"], "--prompt, --prompt-file: got both"),
        (["--prompt-file", "nowhere.txt"], "--prompt-file: cannot read nowhere.txt"),
        (["--prompt", ""], "--prompt: it is empty"),
        (["--prompt", "1", "--temperature", "-1"], "temperature: expected a finite number from 0, got -1.0"),
        (["--prompt", "1", "--temperature", "0", "--top-k", "5"], "top_k, top_p: expected only with a temperature"),
        (["--prompt", "1", "--stop", "300"], "stop_token: expected an id from 0 to"),
        (
            ["--prompt", "1", "--max-new-tokens", "0"],
            "max_new_tokens: expected a whole number from 1 to 2147483646, got 0",
        ),
        (["--prompt", "1", "--dtype", "int8"], "--dtype: got 'int8'"),
        (["--prompt", "1", "--device", "gpu"], "--device: got 'gpu'"),
    ],
)
def test_a_mistake_ends_in_one_clear_line(
    arguments: list[str],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "generate", folder, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert message in shown.err


@pytest.mark.parametrize("prompt", ["1 x", "1,300", "-1", "1.5"])
def test_ids_that_are_none(
    prompt: str, ids_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", ids_folder, f"--prompt={prompt}") == 2
    assert "allowed: token ids from 0 to 299, such as 1,2,3" in capsys.readouterr().err


def test_a_folder_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", tmp_path, "--prompt", "a") == 2
    assert "no saved model: config.yaml is missing" in capsys.readouterr().err
