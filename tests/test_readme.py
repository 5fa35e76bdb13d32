"""Every snippet of the README runs, and its table is what was measured."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tables
import zoo

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (example,) = blocks("yaml")
    assert example.startswith("# mine.yaml\n")
    (tmp_path / "mine.yaml").write_text(example)
    zoo.save(zoo.build(tmp_path / "mine.yaml"), tmp_path / "folder")  # as the first snippet does
    return tmp_path


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_snippets_run_in_order(folder: Path) -> None:
    shown = run([sys.executable, "-c", "\n".join(blocks("python"))], folder)
    assert "mine.yaml: override layers.1.mixer.windw: unknown option" in shown
    assert "did you mean 'window'?" in shown


def commands() -> list[str]:
    lines = [line.split("   #")[0] for text in blocks("sh") for line in text.splitlines()]
    assert all(line.startswith(("make ", "zoo ")) for line in lines)
    return [line for line in lines if line.startswith("zoo ")]


def test_commands_run_in_order(folder: Path) -> None:
    for command in commands():
        arguments = [part.strip('"') for part in re.findall(r'"[^"]*"|\S+', command)][1:]
        run([sys.executable, "-m", "zoo.cli", *arguments], folder)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^make (\w+)", "".join(blocks("sh")), re.MULTILINE))
    assert targets == {"compare", "test"}
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_the_diff_applies_and_builds(folder: Path) -> None:
    (diff,) = blocks("diff")
    removed, added = (line[1:] for line in diff.splitlines())
    text = (folder / "mine.yaml").read_text()
    assert text.count(removed) == 1
    (folder / "mine.yaml").write_text(text.replace(removed, added))
    shown = run([sys.executable, "-m", "zoo.cli", "show", "mine.yaml"], folder)
    assert "name: full_attention" in shown
    assert "sliding_window" not in shown


def test_the_tables_are_the_measured_ones() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "<!-- throughput: " in README


def test_a_table_that_differs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text(README.replace("| deltanet-340m | ", "| deltanet-340m | 9", 1))
    monkeypatch.setattr(tables, "PAGES", (page,))
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    with pytest.raises(SystemExit, match="1"):
        tables.main()
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    with pytest.raises(SystemExit, match="0"):
        tables.main()
    assert page.read_text() == README
