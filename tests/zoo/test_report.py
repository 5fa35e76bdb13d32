"""What a comparison's report says, in each of its forms."""

import csv
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from report_cases import EDGES, PEERS, RECIPES, cell, fake, good, only
from rich.console import Console

from zoo.compare import report
from zoo.compare.report.palette import styles
from zoo.compare.report.panels import groups, ticks
from zoo.compare.report.rows import failures, lines, recipes, warnings

Results = dict[str, Any]


def shown(results: Results, width: int) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    console.print(report.table(results, width))
    return console.export_text()


def table_of(text: str) -> list[dict[str, str]]:
    rows = [[part.strip() for part in line[1:-1].split(" | ")] for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def test_peers_stand_below_what_they_belong_to_and_are_beaten_there() -> None:
    results = fake(modes=("train",))
    order = recipes(results)
    for peer in PEERS:
        assert order[order.index(peer) - 1] == peer.partition("/")[2]
    table = table_of(report.markdown(results))
    assert [line["recipe"] for line in table] == order * 4
    ratios = {line["recipe"]: line["x peer"] for line in table if line["length"] == "2048"}
    assert ratios["deltanet-340m"] == "1.30x fla"
    assert ratios["transformer-340m"] == "1.15x hf"
    assert ratios["fla/deltanet-340m"] == ratios["swa-full-340m"] == "-"


def test_a_ratio_takes_the_best_of_eager_and_compiled_on_both_sides() -> None:
    rows = [
        good() | {"tokens_per_s": 200.0},
        good(compile="block") | {"tokens_per_s": 300.0},
        good(recipe="fla/deltanet-340m", peer="fla") | {"tokens_per_s": 100.0},
        cell(recipe="fla/deltanet-340m", peer="fla", compile="model", error="no"),
    ]
    (line, _) = lines(only(rows))
    assert line.ratios == {"fla": 3.0}
    assert line.speedup == 1.5
    text = report.markdown(only(rows))
    assert "| 200 ±" in text
    assert "| **300 ±" in text
    assert "3.00x fla" in text


def test_a_peer_without_its_architecture_still_has_a_line() -> None:
    (line,) = table_of(report.markdown(only([good(recipe="hf/other", peer="hf")])))
    assert line["recipe"] == "hf/other"


def test_markdown_of_figures() -> None:
    line, *_ = table_of(report.markdown(fake(modes=("train",), recipes=("deltanet-340m",), lengths=(2048,))))
    assert line["eager tok/s"] == "148,313 ±2%"
    assert line["compiled tok/s"] == "**215,054 ±2%**"
    assert line["blocks tok/s"] == "206,782 ±2%"
    assert line["speedup"] == "1.45x"
    assert line["step ms"] == "152.4"
    assert line["MFU"] == "45.6%"
    assert line["params"] == "374.26M"
    assert line["compile cold s (model / block)"] == "59.6 / 59.8"
    assert line["compile warm s (model / block)"] == "9.5 / 9.5"
    assert line["first step s (model / block)"] == "12.50 / 12.50"
    assert line["state of a row, MiB"] == "12"
    assert line["loss"] == "3.466"
    assert "batch" not in line
    assert "dtype" not in line
    assert "x peer" not in line


def test_columns_without_anything_are_left_out_and_an_unknown_gpu_is_not_guessed() -> None:
    unknown = good() | {"mfu": None, "loss": None}
    (line,) = table_of(report.markdown(only([unknown])))
    assert line["MFU"] == "N/A"
    assert not {"loss", "compiled tok/s", "blocks tok/s", "speedup", "graphs", "compile cold s"} & line.keys()
    (line,) = table_of(report.markdown(only([good(mode="decode")])))
    assert "MFU" not in line
    assert line["batch"] == "16"


def test_what_failed_is_in_the_line_and_below_with_its_whole_reason() -> None:
    reason = "RuntimeError: " + "a long reason " * 20
    results = only([cell(error=reason), good(compile="model"), cell(compile="block", skipped="too large")])
    (line,) = table_of(report.markdown(results))
    assert (line["eager tok/s"], line["blocks tok/s"]) == ("failed", "skipped")
    assert "speedup" not in line
    text = report.markdown(results)
    assert f"- deltanet-340m, train, length 2048, batch 16, bfloat16, eager: failed: {reason.strip()}" in text
    assert "block-compiled: skipped: too large" in text
    assert "too large" in shown(results, 80)


def test_failures_stand_together_only_where_that_says_no_more_than_is_true() -> None:
    square = [cell(length=length, compile=how, error="no") for length in (1024, 2048) for how in ("none", "model")]
    (both,) = failures(only(square))
    assert both == ("deltanet-340m, train, length 1024 and 2048, batch 16, bfloat16, eager and compiled", "failed: no")
    assert len(failures(only([square[0], square[3]]))) == 2


@pytest.mark.parametrize("width", [80, 100, 140, 400])
def test_the_terminal_shows_what_fits_and_cuts_nothing(width: int) -> None:
    text = shown(fake(modes=("train", "decode"), lengths=(2048, 16384)), width)
    assert "…" not in text
    assert "*215,054 ±2%" in text
    assert max(map(len, text.splitlines())) <= width
    assert ("MFLOP/tok" in text) == (width == 400)
    assert ("in table.md" in " ".join(text.split())) == (width != 400)


def test_the_first_lines_say_what_is_amiss() -> None:
    results = EDGES["mixed"]
    for text in (report.markdown(results), shown(results, 200), report.page(results)):
        start = text[: text.index("commit: 1a2b and 3c4d")]
        assert "148,313" not in start
        assert "3 cells of the plan not measured" in text
    assert report.markdown(results).startswith("**Not all of this was measured alike.")
    assert "interrupted" in report.markdown(only([good()], complete=False))
    assert "Not complete" not in report.markdown(fake())


def test_missing_cells_are_counted_and_the_first_named() -> None:
    (told,) = warnings(only([good()], missing=[f"cell {n}" for n in range(7)]))
    assert told.endswith("7 cells of the plan not measured: cell 0; cell 1; cell 2; cell 3; cell 4; and 2 more.")
    (told,) = warnings(only([good()], missing=3))
    assert told.endswith("3 cells of the plan not measured.")


def two_batches(mode: str = "train", lengths: tuple[int, ...] = (2048, 4096)) -> Results:
    return only([good(mode=mode, length=length, batch_size=batch) for length in lengths for batch in (1, 4)])


@pytest.mark.parametrize("mode", ["train", "forward"])
@pytest.mark.parametrize("lengths", [(2048,), (2048, 4096)])
def test_several_batch_sizes_of_a_length_stand_apart(mode: str, lengths: tuple[int, ...]) -> None:
    results = two_batches(mode, lengths)
    found = groups(results, mode)
    assert [group.name for group in found] == ["batch 1", "batch 4"]
    for group, batch in zip(found, (1, 4), strict=True):
        (series,) = group.panels[0].series
        assert [(point.length, point.row["batch_size"]) for point in series.points] == [(n, batch) for n in lengths]
    assert [line["batch"] for line in table_of(report.markdown(results))] == ["1", "4"] * len(lengths)
    page = report.page(results)
    assert page.count("<h3>Batch ") == 2
    beside = page.partition('aria-label="Side by side')[2].partition("</table>")[0]
    assert re.findall(r"<td>([14])</td>", beside) == ["1", "4"] * len(lengths)


def test_tokens_a_step_are_claimed_only_where_every_row_has_as_many() -> None:
    for results in (two_batches(), only([good(batch_size=4)]), only([good(mode="decode")])):
        assert "tokens a step" not in report.title(results)
        assert "Tokens per step" not in report.page(results)
    assert "Tokens per step" in report.page(fake())
    assert "batch" in table_of(report.markdown(only([good(batch_size=4)])))[0]


def test_a_row_whose_profile_failed_is_told_and_keeps_its_figures() -> None:
    results = only([good() | {"error": "killed by SIGKILL"}])
    ((_, what),) = failures(results)
    assert what == "its profile failed: killed by SIGKILL"
    assert table_of(report.markdown(results))[0]["eager tok/s"] == "148,313 ±2%"
    assert f"- deltanet-340m, train, length 2048, batch 16, bfloat16, eager: {what}" in report.markdown(results)
    tips = re.findall(r'<div class="bar [^"]*" title="([^"]*)"', report.page(results))
    assert tips
    assert all("148,313 tokens/s" in tip and what in tip for tip in tips)
    (note,) = re.findall(f".*{what}", words(report.plots(results)["train"]))
    assert note.startswith("deltanet-340m")  # no cross stands for it
    assert "data-failed" not in re.findall("<tr[^>]*row-train[^>]*>", report.page(results))[0]


def test_the_state_is_of_one_row_in_every_mode() -> None:
    rows = [good(mode=mode, batch_size=8) | {"state_bytes": 8 << 20} for mode in ("train", "decode")]
    rows += [good(length=length, batch_size=8) | {"state_bytes": none} for length, none in ((4096, 0), (8192, None))]
    found = table_of(report.markdown(only(rows)))
    assert [line["state of a row, MiB"] for line in found] == ["1", "-", "-", "1"]


def test_what_was_measured_otherwise_is_marked_and_explained() -> None:
    rows = [good(), good(length=4096, batch_size=8) | {"measured_with": {"commit": "1a2b", "torch": "2.10"}}]
    results = only(rows)
    text = report.markdown(results)
    assert [line["recipe"] for line in table_of(text)] == ["deltanet-340m", "deltanet-340m †"]
    note = "†: measured, in whole or in part, under other conditions (commit: 1a2b; torch: 2.10)."
    assert note in text
    page = report.page(results)
    assert page.count(note) == 2
    assert 'data-value="deltanet-340m">deltanet-340m <span title="commit: 1a2b; torch: 2.10">†</span>' in page
    told = [row["measured_with"] for row in csv.DictReader(StringIO(report.csv(results)))]
    assert told == ["", "commit: 1a2b; torch: 2.10"]
    assert "†" not in report.markdown(fake())


def test_what_is_said_of_compiling_says_of_which_way() -> None:
    rows = [good(), good(compile="model"), cell(compile="block", error="no"), good(recipe="other")]
    compiled, eager = table_of(report.markdown(only(rows)))
    assert compiled["compile cold s (model / block)"] == "59.6 / -"
    assert eager["compile cold s (model / block)"] == eager["first step s (model / block)"] == "-"
    compiled, eager = table_of(report.markdown(only([*rows[:2], rows[3]])))
    assert (compiled["graphs"], compiled["first step s"], eager["graphs"]) == ("1", "12.50", "-")
    (line,) = table_of(report.markdown(only(rows[:1])))
    assert line["first step s"] == "0.80"


def test_csv_has_every_row_and_every_scalar() -> None:
    results = fake()
    rows = list(csv.DictReader(StringIO(report.csv(results))))
    assert len(rows) == len(results["rows"])
    columns = list(rows[0])
    assert columns[:3] == ["recipe", "peer", "length"]
    assert columns == list(csv.DictReader(StringIO(report.csv(EDGES["failed"]))).fieldnames or ())
    assert {key for row in results["rows"] for key in row} - {"profile"} | {"measured_with"} == set(columns)
    first = next(row for row in rows if row["recipe"] == "deltanet-340m" and row["compile"] == "model")
    assert float(first["tokens_per_s"]) == pytest.approx(1e6 / 4.65)
    assert first["peer"] == first["error"] == ""
    assert next(csv.DictReader(StringIO(report.csv(only([good() | {"extra": 7}])))))["extra"] == "7"


def test_outcome_is_one_line() -> None:
    assert report.outcome(cell(error="RuntimeError: it broke")) == "failed: RuntimeError: it broke"
    assert report.outcome(cell(skipped="no room")) == "skipped: no room"
    text = report.outcome(good(compile="model"))
    assert re.fullmatch(r"215,054 tokens/s, [\d,]+ MiB \(compiled in 59.6 s, from the cache in 9.5 s\)", text)
    assert "compiled" not in report.outcome(good())


def test_title_names_device_versions_and_what_was_done() -> None:
    task = "bfloat16, up to 32,768 tokens a step, medians of 10 steps"
    code = "driver 580.95.05, commit b517db0a90e7 with changes"
    assert report.title(fake()) == f"NVIDIA H200, torch 2.11.0+cu130, {task}, {code}"
    assert "tokens a step" not in report.title(fake(modes=("decode",)))
    assert report.title(EDGES["bare"]).startswith("unknown device")


def test_a_family_has_its_colour_whatever_it_is_compared_with_and_no_two_share_one() -> None:
    everything, alone = styles(fake()), styles(fake(recipes=("deltanet-340m",)))
    assert everything["deltanet-340m"].light == alone["deltanet-340m"].light
    assert styles(only([good(recipe="deltanet-tiny")]))["deltanet-tiny"].light == alone["deltanet-340m"].light
    assert len({(style.light, style.marker) for style in everything.values()}) == len(RECIPES) + len(PEERS)
    sweep = styles(only([good(recipe=f"deltanet-340m num_layers={n}") for n in range(4)]))
    assert len({style.light for style in sweep.values()}) == 4
    assert everything["fla/deltanet-340m"].peer
    assert everything["fla/deltanet-340m"].marker == everything["deltanet-340m"].marker


def test_lines_take_the_faster_way_to_compile_and_break_where_a_cell_failed() -> None:
    rows = [good(compile="model"), good(compile="block") | {"tokens_per_s": 1e9}]
    (group,) = groups(only(rows), "train")
    (series,) = group.panels[0].series
    assert [point.row["compile"] for point in series.points] == ["block"]
    (group,) = groups(EDGES["a gap"], "train")
    (series,) = group.panels[0].series
    assert [[point.length for point in piece] for piece in series.pieces] == [[1024, 2048], [8192, 16384]]
    assert [row["length"] for row in series.failed] == [4096]
    assert [group.name for group in groups(fake(), "decode")] == ["batch 1", "batch 8"]
    assert [panel.title for panel in groups(fake(), "decode")[0].panels] == [
        "tokens/s", "ms per step", "peak memory, GiB", "state of a row, GiB",
    ]  # fmt: skip


def test_throughput_starts_at_zero_and_wide_ranges_are_logarithmic() -> None:
    rates, times, *_ = groups(only([good(), good(length=4096) | {"tokens_per_s": 100.0}]), "train")[0].panels
    assert not rates.log
    assert times.log
    assert ticks(0, 23, log=False) == [0, 5, 10, 15, 20]
    assert ticks(0.9, 30, log=True) == [1, 2, 5, 10, 20]


def test_percentiles_of_a_time_are_those_of_the_rate_turned_round() -> None:
    row = good() | {"tokens_per_s": 100.0, "tokens_per_s_p20": 50.0, "tokens_per_s_p80": 200.0}
    _, times, _ = groups(only([row]), "train")[0].panels
    (point,) = times.series[0].points
    assert (point.low, point.value, point.high) == pytest.approx((5, 10, 20))


def words(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(match=lambda part: hasattr(part, "get_text")))


def test_a_long_title_of_a_picture_stays_in_it() -> None:
    for device in ("NVIDIA H200", "A device with a long name " * 6):
        machine = fake()["machine"] | {"device": device}
        figure = report.plots(only([good()], machine=machine))["train"]
        (above,) = (text for text in figure.texts if text.get_text() == figure.get_suptitle())
        assert above.get_window_extent().x1 <= figure.bbox.x1
        assert "commit b517db0a90e7 with changes" in " ".join(figure.get_suptitle().split())


def test_plots_show_every_architecture_and_name_what_failed() -> None:
    found = report.plots(fake())
    assert list(found) == ["train", "forward", "prefill", "decode"]
    for figure in found.values():
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert labels == [*recipes(fake()), "compiled", "eager"]
    assert "deltaformer-340m, train, length 16384, batch 2, bfloat16, eager: failed" in words(found["train"])
    bars = report.plots(fake(modes=("train",), lengths=(16384,)))["train"]
    assert sum(text.get_text() == "failed" for text in bars.axes[0].texts) == 3
    assert [tick.get_text() for tick in bars.axes[0].get_yticklabels()] == recipes(fake())


@pytest.mark.parametrize("name", EDGES)
def test_the_folder_holds_the_whole_report_and_nothing_of_an_earlier_one(
    name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    results = EDGES[name]
    (tmp_path / "prefill.svg").write_text("of an earlier report")
    (tmp_path / "mine.png").write_text("of the user")
    paths = report.write(results, tmp_path)
    modes = {row["mode"] for row in results["rows"]}
    plots = [f"{mode}.{ending}" for mode in modes for ending in ("png", "svg")]
    assert sorted(path.name for path in paths) == sorted(["table.md", "results.csv", "report.html", *plots])
    assert {path.name for path in tmp_path.iterdir()} == {*(path.name for path in paths), "mine.png"}
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == report.markdown(results)
    assert all((tmp_path / f"{mode}.png").read_bytes().startswith(b"\x89PNG") for mode in modes)
    assert shown(results, 80)
    assert not [str(warning.message) for warning in recwarn]


def test_the_same_results_make_the_same_files(tmp_path: Path) -> None:
    results = fake(modes=("train",), recipes=("deltanet-340m",))
    first = [path.read_bytes() for path in report.write(results, tmp_path)]
    assert first == [path.read_bytes() for path in report.write(results, tmp_path)]
