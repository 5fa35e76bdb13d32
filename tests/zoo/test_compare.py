"""`zoo compare` on a small scale: figures, plans, resuming, merging."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_cases import key, measured, small, write_faults
from report_cases import fake

from zoo.compare.apart import Apart
from zoo.compare.measure import measure
from zoo.compare.merge import merge, refuse_graphs
from zoo.compare.plan import Cell, Plan, make_plan
from zoo.compare.run import run_plan

Results = dict[str, Any]
Row = dict[str, Any]


def plan_of(*sources: str, **options: Any) -> Plan:
    defaults: dict[str, Any] = {
        "modes": ("train",), "compiles": ("none",), "lengths": (16,), "tokens_per_step": 32, "steps": 2, "warmup": 1
    }  # fmt: skip
    return make_plan([*sources], **defaults | options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[Row]:
    """One model at two lengths: trained eager and compiled both ways; and its forward passes."""
    options: dict[str, Any] = {"lengths": (24, 48), "tokens_per_step": 96, "steps": 3, "warmup": 2}
    source = small(folder, "one")
    training = plan_of(source, compiles=("none", "model", "block"), **options)
    passes = plan_of(source, modes=("forward",), **options)
    found = [*measured(training, folder / "train")["rows"], *measured(passes, folder / "forward")["rows"]]
    assert not [*(folder / "train").iterdir(), *(folder / "forward").iterdir()]
    return found


def test_cells_of_one_group_stand_together(rows: list[Row]) -> None:
    ways = (("train", "none"), ("train", "model"), ("train", "block"), ("forward", "none"))
    assert [key(row) for row in rows] == [
        ("one", mode, how, length, 96 // length) for mode, how in ways for length in (24, 48)
    ]


def test_speeds_belong_together(rows: list[Row]) -> None:
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(96 / row["step_ms"] * 1e3)
        assert row["tokens_per_s_p20"] <= row["tokens_per_s"] <= row["tokens_per_s_p80"]
        assert row["first_step_s"] > 0
        assert row["mfu"] is None  # no peak is known of a CPU


def test_sizes_and_work_are_the_model_s(rows: list[Row], folder: Path) -> None:
    (config,) = plan_of(str(folder / "one.yaml")).configs.values()
    for row in rows:
        assert row["params"] == config.num_params
        assert row["state_bytes"] == row["batch_size"] * config.state_bytes(row["length"], torch.float32)
        assert row["flops_per_token"] == config.flops_per_token(row["length"]) * (3 if row["mode"] == "train" else 1)
        weights = 4 * row["params"]
        beside = 2 * weights if row["mode"] == "train" else 4 * 96 * 256  # Adam's moments, or the logits
        assert weights + beside < row["peak_bytes"] < 10 * (weights + beside)


def test_losses_agree_however_it_is_compiled(rows: list[Row]) -> None:
    losses = [row["loss"] for row in rows]
    assert losses[2:6] == pytest.approx(losses[:2] * 2, abs=1e-3)
    assert losses[0] != losses[1]
    assert losses[6:] == [None] * 2


def test_what_compiling_took(rows: list[Row]) -> None:
    figures = ("compile_cold_s", "compile_warm_s", "recompile_s", "graphs", "graph_breaks", "recompilations", "dynamic")
    for row in rows:
        if row["compile"] == "none":
            assert [row[name] for name in figures] == [None] * 7
        else:
            assert row["compile_cold_s"] > row["compile_warm_s"] > 0
            assert 0 <= row["recompile_s"] < row["compile_cold_s"]
            # Of blocks: the one kind of block, the norm in front of the head, a chunk of the cross-entropy.
            assert row["graphs"] == (1 if row["compile"] == "model" else 3)
            assert (row["graph_breaks"], row["recompilations"], row["dynamic"]) == (0, 0, True)


def test_decoding_by_batch_and_context(tmp_path: Path) -> None:
    sources = [small(tmp_path, "one"), small(tmp_path, "two", "delta_net")]
    plan = plan_of(*sources, modes=("prefill", "decode"), lengths=(32, 64), batch_sizes=(3, 1))
    rows = measured(plan, tmp_path / "out")["rows"]
    for name in ("one", "two"):
        wanted = product(("prefill", "decode"), ("none",), (32, 64), (3, 1))
        assert [key(row)[1:] for row in rows if row["recipe"] == name] == [*wanted]
    for row in rows:
        config = plan.configs[row["recipe"]]
        tokens = row["batch_size"] * (row["length"] if row["mode"] == "prefill" else 1)
        assert row["tokens_per_s"] == pytest.approx(tokens / row["step_ms"] * 1e3)
        assert row["state_bytes"] == row["batch_size"] * config.state_bytes(row["length"], torch.float32)
        assert row["peak_bytes"] > 4 * row["params"] + row["state_bytes"]
        forward = config.flops_per_token(row["length"])
        head = 2 * 32 * 256 / row["length"]  # of one token of each row
        wanted = forward - 2 * 32 * 256 + head if row["mode"] == "prefill" else None
        assert row["flops_per_token"] == (wanted and pytest.approx(wanted))
    states = {key(row)[0::3]: row["state_bytes"] for row in rows if row["batch_size"] == 1}
    assert states["one", 64] == 2 * states["one", 32]
    assert states["two", 64] == states["two", 32]


def test_a_compiled_step_of_decoding(tmp_path: Path) -> None:
    plan = plan_of(small(tmp_path, "one"), modes=("decode",), compiles=("model",), batch_sizes=(2,))
    with Apart(measure, plan, *plan.cells(), log=tmp_path / "log.txt", environment={}) as call:
        row = call.result(200)
    assert (row["graphs"], row["graph_breaks"], row["dynamic"]) == (1, 0, False)
    assert row["first_step_s"] > row["compile_s"] > 0


def test_a_state_that_does_not_fit_is_not_tried(tmp_path: Path) -> None:
    plan = plan_of(small(tmp_path, "one"), modes=("prefill", "decode"), lengths=(1 << 40,), batch_sizes=(1,))
    results = measured(plan, tmp_path / "out")
    assert len(results["rows"]) == 2
    assert all("does not fit into memory of" in row["skipped"] for row in results["rows"])


def test_dtypes_and_a_loss_that_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    sources = [small(tmp_path, "one"), write_faults(tmp_path)["Fading"]]
    plan = plan_of(*sources, dtypes=("bfloat16", "float32", "float16"))
    results = measured(plan, tmp_path / "out")
    json.dumps(results, allow_nan=False)  # or it is no JSON
    rows = {(row["recipe"], row["dtype"]): row for row in results["rows"]}
    assert [*rows] == [*product(("one", "Fading"), ("bfloat16", "float32", "float16"))]
    assert {row["loss"] for (name, _), row in rows.items() if name == "Fading"} == {None}
    assert rows["one", "bfloat16"]["loss"] == pytest.approx(rows["one", "float32"]["loss"], abs=0.05)
    for dtype in ("bfloat16", "float16"):
        assert rows["one", dtype]["state_bytes"] * 2 == rows["one", "float32"]["state_bytes"]
        assert rows["one", dtype]["peak_bytes"] < rows["one", "float32"]["peak_bytes"]


def test_names_of_any_characters_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write_faults(tmp_path)
    names = ["a/b: <ü>", "a/b: <ö>", "../c", "." * 3, "[bold]", " ".join(["long"] * 100)]
    paths = [small(tmp_path, name[:8] + str(place), "faults.Raising") for place, name in enumerate(names)]
    for path, name in zip(paths, names, strict=True):
        lines = Path(path).read_text().splitlines()
        Path(path).write_text("\n".join([f"name: {json.dumps(name)}", *lines[2:]]))
    rows = measured(plan_of(*paths), tmp_path / "out")["rows"]
    assert [row["recipe"] for row in rows] == names
    logs = [row["error"].partition("RuntimeError: it broke (")[2].removesuffix(")") for row in rows]
    assert len(set(logs)) == len(names)
    assert all((tmp_path / "out" / log).read_text().count("RuntimeError: it broke") == 1 for log in logs)
    assert {file.parent for file in (tmp_path / "out").rglob("*.txt")} == {tmp_path / "out" / "logs"}


def test_paths_are_of_the_folder_where_the_plan_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # as a notebook does, after Python has started
    Path("text.txt").write_text("to be or not to be " * 9)
    small(tmp_path, "one")
    plan = plan_of("one.yaml", text=Path("text.txt"))
    (row,) = measured(plan, Path("out"))["rows"]
    assert "error" not in row
    assert plan.settings()["text_bytes"] == 171


# Plans


def test_default_plan_is_every_tiny_recipe() -> None:
    plan = make_plan([], device="cpu")
    names = "transformer deltanet deltanet-swa deltanet-global deltaformer deltaformer-swa swa-full"
    assert {*plan.configs} == {f"{name}-tiny" for name in names.split()}
    assert {(cell.mode, cell.compile, cell.length, cell.batch_size, cell.dtype) for cell in plan.cells()} == {
        (mode, how, 1024, 2, "float32") for mode in ("train", "forward") for how in ("none", "model")
    }


def test_each_override_makes_a_variant(tmp_path: Path) -> None:
    source = small(tmp_path, "one")
    text = "num_layers=2 layers.1.mixer={name: sliding_window, window: 8}"
    plan = plan_of(source, overrides=("", text, "dim=64  name=wide"))
    assert [*plan.configs] == ["one", f"one {text}", "wide"]
    assert [config.num_layers for config in plan.configs.values()] == [1, 2, 1]
    assert plan.configs[f"one {text}"].layers[1] != plan.configs["one"].layers[0]
    assert plan.configs["wide"].dim == 64
    assert len(set(plan.hashes().values())) == 3


def test_sizes_of_each_mode(tmp_path: Path) -> None:
    modes = ("train", "forward", "prefill", "decode")
    plan = plan_of(small(tmp_path, "one"), modes=modes, lengths=(16, 48), tokens_per_step=100)
    sizes = {mode: [(c.length, c.batch_size) for c in plan.cells() if c.mode == mode] for mode in modes}
    assert sizes["train"] == sizes["forward"] == [(16, 6), (48, 2)]
    assert sizes["prefill"] == sizes["decode"] == [(16, 1), (16, 8), (48, 1), (48, 8)]
    plan = plan_of(small(tmp_path, "one"), modes=modes, lengths=None, tokens_per_step=None, batch_sizes=(3, 5))
    sizes = {mode: [(c.length, c.batch_size) for c in plan.cells() if c.mode == mode] for mode in modes}
    assert sizes["train"] == sizes["forward"] == [(1024, 3), (1024, 5)]
    assert sizes["prefill"] == sizes["decode"] == [(256, 3), (256, 5), (1024, 3), (1024, 5)]


def test_peers_stand_behind_what_they_are_like() -> None:
    plan = make_plan(["transformer-tiny", "deltanet-swa-tiny", "deltaformer-tiny"], beside=("fla", "hf"), device="cpu",
                     modes=("forward", "decode"), compiles=("none", "model", "block"))  # fmt: skip
    cells = [(cell.recipe, cell.mode, cell.compile) for cell in plan.cells() if cell.peer]
    assert {*cells} == {
        (name, "forward", how) for name in ("hf/transformer-tiny", "fla/deltaformer-tiny") for how in ("none", "model")
    }
    order = list(dict.fromkeys(cell.recipe for cell in plan.cells()))
    assert order[:2] == ["transformer-tiny", "hf/transformer-tiny"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": (64,), "tokens_per_step": 0}, "--tokens-per-step: got 0, allowed: at least 64"),
        ({"lengths": (64,), "tokens_per_step": 32}, "--tokens-per-step: got 32, allowed: at least 64"),
        ({"tokens_per_step": 64, "batch_sizes": (2,)}, "--tokens-per-step: it stands beside --batch, allowed: one"),
        ({"lengths": (0,)}, "--lengths: got 0, allowed: at least 1"),
        ({"steps": 0}, "--steps: got 0, allowed: at least 1"),
        ({"warmup": 0}, "--warmup: got 0, allowed: at least 1"),
        ({"batch_sizes": (0,)}, "--batch: got 0, allowed: at least 1"),
        ({"timeout": 0.5}, "--timeout: got 0.5, allowed: at least 1"),
        ({"timeout": float("nan")}, "--timeout: got nan, allowed: 1 to 1000000"),
        ({"timeout": float("inf")}, "--timeout: got inf, allowed: 1 to 1000000"),
        ({"device": "tpu"}, "--device: got 'tpu', allowed: cpu, cuda"),
        ({"device": "meta"}, "--device: got 'meta', allowed: cpu, cuda"),
        ({"sources": ["deltanet-tiny", "deltanet-tiny"]}, "another model is called 'deltanet-tiny'"),
        ({"overrides": ("", "name=deltanet-tiny dim=64")}, "another model is called 'deltanet-tiny'"),
        ({"overrides": ("dim64",)}, "dim64"),
        ({"overrides": ("dimm=64",)}, "did you mean 'dim'"),
        ({"lengths": (1 << 23,)}, "too few for sequences of 8388608"),
        ({"beside": ("hf",)}, "--peers: hf has nothing like these models, allowed: hf beside transformer-*"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        make_plan(arguments.pop("sources", ["deltanet-tiny"]), **arguments)
    assert "\n" not in str(refused.value)


def test_a_vocabulary_without_room_for_bytes(tmp_path: Path) -> None:
    path = Path(small(tmp_path, "letters"))
    path.write_text(path.read_text().replace("vocab_size: 256", "vocab_size: 26"))
    with pytest.raises(ValueError, match="vocab_size is 26, allowed: at least 256"):
        make_plan([str(path)])


# Going on with what an earlier run left


def stop_after(count: int) -> Callable[[Results], None]:
    """Ctrl-C when so many rows are there."""

    def keep(results: Results) -> None:
        if len(results["rows"]) == count and results["missing"] and not stopped:
            stopped.append(count)
            raise KeyboardInterrupt

    stopped: list[int] = []
    return keep


def test_five_lengths_one_that_fails_and_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiling took stands in every row of the group, also in those of the run that goes on."""
    monkeypatch.syspath_prepend(tmp_path)
    lengths = (64, 16, 24, 63, 32)  # the first one fails; B is 1, 4, 3, 1, 2
    source = write_faults(tmp_path)["Limited"]
    plan = plan_of(source, modes=("forward",), compiles=("model",), lengths=lengths, tokens_per_step=78)
    out, said = tmp_path / "out", list[str]()
    (out / "compiled").mkdir(parents=True)
    (out / "compiled" / "mine.txt").touch()
    before = run_plan(plan, out, said.append, stop_after(3))
    assert (before["complete"], len(before["missing"])) == (False, 2)
    assert [line for line in said if "ahead" in line] == []
    said.clear()
    after = run_plan(plan, out, said.append, lambda _: None, previous=json.loads(json.dumps(before)))
    assert not any(line.startswith("compiling") for line in said)  # the graphs are there
    assert (after["complete"], [row["length"] for row in after["rows"]]) == (True, [*lengths])
    failed, *rows = after["rows"]
    assert "too long" in failed["error"]
    assert json.dumps(before["rows"][1:]) == json.dumps(rows[:2])
    for row in rows:
        assert (row["graphs"], row["graph_breaks"], row["recompilations"]) == (2, 0, 1)  # of one row, and of several
        assert row["compile_cold_s"] == rows[0]["compile_cold_s"] > row["compile_warm_s"]
    assert [file.name for file in (out / "compiled").iterdir()] == ["mine.txt"]  # it is not the run's


def test_a_run_that_goes_on_with_more(tmp_path: Path) -> None:
    """Other cells stay, in front those of the plan; what was compiled for one size is measured again beside others."""
    one, two = small(tmp_path, "one"), small(tmp_path, "two", "delta_net")
    first = measured(plan_of(one), tmp_path / "out")
    first["rows"] += [first["rows"][0] | {"compile": "model", "dynamic": False, "tokens_per_s": 0.0}]
    second = measured(plan_of(two, one, lengths=(16, 32)), tmp_path / "out", previous=first)
    places = [(row["recipe"], row["compile"], row["length"]) for row in second["rows"]]
    assert places == [*product(("two", "one"), ("none",), (16, 32)), ("one", "model", 16)]
    assert second["rows"][2] == first["rows"][0]
    assert second["rows"][4] == first["rows"][1]
    assert (second["complete"], second["missing"], second["mixed"]) == (True, [], [])
    plan = plan_of(one, compiles=("model",), lengths=(16, 32), timeout=1)  # too short to compile
    third = measured(plan, tmp_path / "out", previous=second)
    again = [row for row in third["rows"] if row["compile"] == "model"]
    assert [row["length"] for row in again] == [16, 32]
    assert all("error" in row for row in again)


@pytest.fixture(scope="module")
def earlier(folder: Path) -> Results:
    return measured(plan_of(small(folder, "first")), folder / "earlier")


CHANGES: dict[str, Callable[[Results], Any]] = {
    "commit: abc and": lambda run: run["machine"].update(commit="abc"),
    "device: TPU and": lambda run: run["machine"].update(device="TPU"),
    "torch: 1.0 and": lambda run: run["machine"].update(torch="1.0"),
    "threads: 99 and": lambda run: run["machine"].update(threads=99),
    "seed: 7 and 0": lambda run: run["settings"].update(seed=7),
    "steps: 3 and 2": lambda run: run["settings"].update(steps=3),
    "text_bytes: 9 and": lambda run: run["settings"].update(text_bytes=9),
    "configuration of first: abc and": lambda run: run["configs"].update(first="abc"),
}


@pytest.mark.parametrize("line", CHANGES)
def test_what_was_measured_otherwise_is_refused_or_said(earlier: Results, folder: Path, line: str) -> None:
    plan = plan_of(str(folder / "first.yaml"), lengths=(16, 32))
    changed = copy.deepcopy(earlier)
    CHANGES[line](changed)
    for go in (
        lambda mixed: measured(plan, folder / "earlier", previous=changed, mixed=mixed),
        lambda mixed: merge([changed, earlier], mixed=mixed),
    ):
        with pytest.raises(ValueError, match="not measured in the same way") as refused:
            go(mixed=False)
        assert line in str(refused.value)
        assert ";" not in str(refused.value).partition("(")[2].partition(")")[0]  # nothing else
        assert "\n" not in str(refused.value)
        results = go(mixed=True)
        assert [text.startswith(line) for text in results["mixed"]] == [True]
    name, _, rest = line.partition(": ")
    results = measured(plan, folder / "earlier", previous=changed, mixed=True)
    old, new = results["rows"]
    assert {name: str(value) for name, value in old["measured_with"].items()} == {name: rest.partition(" ")[0]}
    assert "measured_with" not in new
    plan = plan_of(str(folder / "first.yaml"), lengths=(16, 24), seed=5)
    chained = measured(plan, folder / "earlier", previous=results, mixed=True)
    found = {row["length"]: row.get("measured_with") for row in chained["rows"]}
    assert found == {16: {"seed": 0} | old["measured_with"], 32: {"seed": 0}, 24: None}
    assert len(chained["mixed"]) == 2


def test_an_edited_file_is_another_model(earlier: Results, folder: Path, tmp_path: Path) -> None:
    path = Path(small(tmp_path, "first"))
    path.write_text(path.read_text().replace("hidden_dim: 64", "hidden_dim: 96"))
    with pytest.raises(ValueError, match=r"\(configuration of first: \w{12} and \w{12}\)"):
        measured(plan_of(str(path)), tmp_path / "out", previous=earlier)
    more = measured(plan_of(small(tmp_path, "second")), tmp_path / "out", previous=earlier)
    with pytest.raises(ValueError, match=r"\(configuration of first: \w{12} and \w{12}\)"):
        measured(plan_of(str(path)), tmp_path / "out", previous=more)


def test_another_variant_or_peer_is_no_other_setting(earlier: Results, folder: Path) -> None:
    plan = plan_of(str(folder / "first.yaml"), overrides=("", "dim=64"), beside=("hf",))
    results = measured(plan, folder / "more", previous=earlier)
    assert results["mixed"] == []
    assert [row["recipe"] for row in results["rows"][:2]] == ["first", "hf/first"]
    assert json.dumps(results["rows"][0]) == json.dumps(earlier["rows"][0])


def test_merging_takes_what_has_figures() -> None:
    whole = fake(("forward",), (2048,), ("none", "model"))
    for run in (first := copy.deepcopy(whole), second := copy.deepcopy(whole)):
        run["configs"] = {}
    first["rows"], second["rows"] = first["rows"][:6], second["rows"][4:]
    first["rows"][4] |= {"tokens_per_s": 1.0}  # in both: the later one's
    for word, place in (("error", 0), ("skipped", 1)):  # unless that has no figures
        cell = {field.name: second["rows"][place][field.name] for field in fields(Cell)}
        second["rows"][place] = cell | {word: "why"}
    merged = merge([first, second], mixed=False)
    assert [key(row) for row in merged["rows"]] == [key(row) for row in whole["rows"]]
    assert merged["rows"][4] == first["rows"][4]
    assert merged["rows"][5] == first["rows"][5]
    assert merged["rows"][6:] == whole["rows"][6:]
    assert (merged["complete"], merged["missing"], merged["mixed"]) == (True, [], [])
    names = [str(Cell.of_row(second["rows"][0])), "another"]
    part = merge([first | {"complete": False, "missing": names}, second], mixed=False)
    assert (part["complete"], part["missing"]) == (False, ["another"])


def test_graphs_for_one_size_and_for_any_are_not_mixed_in_silence() -> None:
    pairs = [("train", True), ("train", None), ("decode", False)]
    assert refuse_graphs(pairs, allowed=False) == []
    with pytest.raises(ValueError, match="graphs of train: for any size and for one size"):
        refuse_graphs([*pairs, ("train", False)], allowed=False)
    assert refuse_graphs([*pairs, ("train", False)], allowed=True) == ["graphs of train: for any size and for one size"]
