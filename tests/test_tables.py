"""The tables of the pages: what stands in them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from report_cases import fake, good, only

import tables
from zoo.compare.report.rows import recipes


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The lines of a table of results, as cells."""
    monkeypatch.setattr(tables, "FOLDER", tmp_path)

    def make(kind: str, *runs: dict[str, Any]) -> list[list[str]]:
        names = [f"{index}.json" for index in range(len(runs))]
        for name, results in zip(names, runs, strict=True):
            (tmp_path / name).write_text(json.dumps(results))
        above, _, table = tables.table(kind, names, "there/").partition("\n\n")
        assert above.endswith(", ".join(f"[{name}](there/{name})" for name in names) + ":")
        return [line.strip("| ").split(" | ") for line in table.strip().splitlines()]

    return make


def test_throughput(made: Any) -> None:
    row = good(compile="model") | {"tokens_per_s": 2e5, "mfu": 0.456, "peak_bytes": 3 << 30, "compile_cold_s": 47.3,
                                   "compile_warm_s": 12.6, "graphs": 1, "graph_breaks": 0, "params": 374e6}  # fmt: skip
    eager = good() | {"tokens_per_s": 1e5}
    peer = good(recipe="fla/deltanet-340m", peer="fla") | {"tokens_per_s": 1.6e5}
    lines = made("throughput", only([eager, row, peer]))
    assert lines[2] == ["deltanet-340m", "200,000", "2.00x", "1.25x", "45.6%", "3.0", "47 / 13", "1", "0", "374M"]
    assert lines[3][:4] == ["fla/deltanet-340m", "160,000", "-", "-"]
    with pytest.raises(ValueError, match="deltanet-340m: measured several times"):
        made("throughput", only([row, good(length=4096)]))


def test_several_runs_over_the_lengths(made: Any) -> None:
    first, second = ({"tokens_per_s": speed, "mfu": mfu} for speed, mfu in ((2e5, 0.5), (1.5e5, None)))
    lines = made("lengths", only([good() | first]), only([good(length=4096) | second]))
    assert lines[0] == ["architecture", "T 2048", "T 4096"]
    assert lines[2] == ["deltanet-340m", "200.0K, 50.0%", "150.0K, N/A"]
    with pytest.raises(ValueError, match="not measured in the same way"):
        made("lengths", only([good()], machine={"device": "another"}), only([good(length=4096)]))


def test_steps_are_those_of_one_row(made: Any) -> None:
    results = fake(modes=("decode",))
    lines = made("steps", results)
    assert lines[0] == ["architecture", "T 4096", "T 8192", "T 16384"]
    assert [line[0] for line in lines[2:]] == recipes(results)
    (row,) = (row for row in results["rows"] if (row["recipe"], row["compile"], row["length"], row["batch_size"]) ==
              ("deltanet-340m", "model", 4096, 1))  # fmt: skip
    assert next(line for line in lines if line[0] == "deltanet-340m")[1] == f"{row['step_ms']:.3g}"


def test_kernels_of_this_library_alone(made: Any) -> None:
    row = {"kernel": "chunk_delta_rule", "side": "triton", "role": "ours", "length": 512, "num_heads": 16,
           "head_dim": 128, "forward_ms": {"median": 0.2071}, "forward_share": 0.48, "forward_speedup": 2.77,
           "forward_backward_ms": {"median": 0.741}, "forward_backward_share": 0.37,
           "forward_backward_speedup": None}  # fmt: skip
    others = [row | {"side": "fla", "role": "peer"}, {**row, "side": "torch"}]
    lines = made("kernels", only([row, *others]))
    assert lines[2:] == [["chunk_delta_rule", "512", "16", "128", "0.207 / 0.741", "48% / 37%", "2.77x / -"]]
