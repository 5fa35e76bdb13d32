"""Results as a table, as Markdown, and as a plot."""

from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zoo.compare.plan import DECODING

__all__ = ["markdown", "plot", "table"]

Row = dict[str, Any]

_COLUMNS = (
    "recipe",
    "length",
    "batch",
    "mode",
    "eager tok/s",
    "compiled tok/s",
    "speedup",
    "step ms",
    "peak MiB",
    "state MiB",
    "compile s",
    "graphs",
    "breaks",
    "params",
    "MFLOP/tok",
    "loss",
)
_LEFT = ("recipe", "mode")  # columns of words
_OF_DECODING = ("batch", "state MiB")
_FEWEST = 6  # columns that are always shown


def _pairs(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """(eager, compiled) of each recipe, length, batch and mode; training first, then by length and batch."""
    found: dict[tuple[Any, ...], dict[bool, Row]] = {}
    for row in rows:
        key = row["recipe"], row["length"], row.get("batch_size"), row["mode"]
        found.setdefault(key, {})[row["compiled"]] = row
    pairs = [(pair.get(False, {}), pair.get(True, {})) for pair in found.values()]
    return sorted(pairs, key=lambda pair: _order(pair[0] or pair[1]))


def _order(row: Row) -> tuple[bool, str, int, int]:
    decodes = row["mode"] if row["mode"] in DECODING else ""
    return row["mode"] != "train", decodes, row["length"], row.get("batch_size", 0)


def _columns(rows: list[Row]) -> list[str]:
    decodes = any(row["mode"] in DECODING for row in rows)
    return [name for name in _COLUMNS if decodes or name not in _OF_DECODING]


def _cells(eager: Row, compiled: Row) -> dict[str, str]:
    """One line of the table: throughput of both, and the other figures of the compiled one."""
    either = compiled or eager
    both = "tokens_per_s" in eager and "tokens_per_s" in compiled
    speedup = f"{compiled['tokens_per_s'] / eager['tokens_per_s']:.2f}x" if both else "-"
    best = compiled if "tokens_per_s" in compiled else eager
    milliseconds = "{:.1f}" if either["mode"] != "decode" else "{:.3g}"
    return {
        "recipe": either["recipe"],
        "length": f"{either['length']}",
        "batch": _number(either.get("batch_size"), "{}"),
        "mode": either["mode"],
        "eager tok/s": _rate(eager),
        "compiled tok/s": _rate(compiled),
        "speedup": speedup,
        "step ms": _number(best.get("step_ms"), milliseconds),
        "peak MiB": _number(best.get("peak_bytes"), "{:,.0f}", 2**-20),
        "state MiB": _number(best.get("state_bytes"), "{:,.1f}", 2**-20),
        "compile s": _number(compiled.get("compile_s"), "{:.1f}"),
        "graphs": _number(compiled.get("graphs"), "{}"),
        "breaks": _number(compiled.get("graph_breaks"), "{}"),
        "params": _number(best.get("params"), "{:.2f}M", 1e-6),
        "MFLOP/tok": _number(best.get("flops_per_token"), "{:,.1f}", 1e-6),
        "loss": _number(best.get("loss"), "{:.3f}"),
    }


def _rate(row: Row) -> str:
    if "error" in row:
        return "failed"
    if "tokens_per_s" not in row:
        return "-"
    middle, low, high = (row[key] for key in ("tokens_per_s", "tokens_per_s_p20", "tokens_per_s_p80"))
    return f"{middle:,.0f} ±{(high - low) / 2 / middle:.0%}"


def _number(value: float | None, form: str, factor: float = 1) -> str:
    return "-" if value is None else form.format(value if factor == 1 else value * factor)


def table(results: dict[str, Any], width: int) -> Table:
    """For the terminal: as many columns, from the left, as fit into ``width`` characters."""
    columns = _columns(results["rows"])
    for count in range(len(columns), _FEWEST, -1):
        result = _table(results, columns[:count], whole=count == len(columns))
        if Console(width=10_000).measure(result).maximum <= width:
            return result
    return _table(results, columns[:_FEWEST], whole=False)


def _table(results: dict[str, Any], columns: list[str], *, whole: bool) -> Table:
    caption = _CAPTION if whole else f"{_CAPTION} The other columns are in table.md."
    result = Table(title=_title(results), caption=caption, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    result.title_justify = result.caption_justify = "left"
    for name in columns:
        result.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for _, group in groupby((_cells(*pair) for pair in _pairs(results["rows"])), key=itemgetter("mode")):
        for cells in group:
            result.add_row(*(escape(cells[name]) for name in columns))
        result.add_section()
    return result


_CAPTION = (
    "tok/s: median ± half the distance from the 20th to the 80th percentile; a wide one says that the machine was "
    "busy. Lengths share a graph, which the first one compiles, but not those of decode, nor one row with several. "
    "Step time, peak memory (parameters, optimiser state, activations, decoding state) and the last step's loss: "
    "compiled. A step of decode is a token of each row; state: of all rows. -: not run."
)


def markdown(results: dict[str, Any]) -> str:
    """A Markdown table, with what it was measured on."""
    columns = _columns(results["rows"])
    cells = [_cells(*pair) for pair in _pairs(results["rows"])]
    rule = ["---" if name in _LEFT else "---:" for name in columns]
    rows = [columns, rule, *([row[name] for name in columns] for row in cells)]
    return _title(results) + ":\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _title(results: dict[str, Any]) -> str:
    machine, settings = results["machine"], results["settings"]
    decodes = all(row["mode"] in DECODING for row in results["rows"])
    tokens = "" if decodes else f"up to {settings['tokens_per_step']:,} tokens a step, "
    return (
        f"{machine['device']}, torch {machine['torch']}, {settings['dtype']}, "
        f"{tokens}medians of {settings['steps']} steps"
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """A picture of the results.

    Of training and forward passes throughput and memory in each mode: one group of bars a recipe, one pair of bars a
    length. Of decoding the time of a step and the state's size over the context.

    Args:
        results: of `zoo.compare.run.run_plan`.
        path: of the PNG.
    """
    rows = results["rows"]
    figure = _lines(rows) if any(row["mode"] in DECODING for row in rows) else _all_bars(rows)
    figure.suptitle(_title(results), x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=100)


def _lines(rows: list[Row]) -> Any:
    """A row of panels for each mode, in it one panel for each batch, and one of the state for a row of the batch."""
    from matplotlib.figure import Figure

    modes, batches = _modes(rows), sorted({row["batch_size"] for row in rows})
    figure = Figure(figsize=(4.2 * (len(batches) + 1), 3.4 * len(modes) + 0.8), layout="constrained")
    grid = figure.subplots(len(modes), len(batches) + 1, squeeze=False)
    for mode, (*timed, sized) in zip(modes, grid, strict=True):
        best = [compiled if "step_ms" in compiled else eager for eager, compiled in _pairs(rows)]
        shown = [row for row in best if row.get("mode") == mode and "step_ms" in row]
        for batch_size, axes in zip(batches, timed, strict=True):
            own = [row for row in shown if row["batch_size"] == batch_size]
            _line_panel(axes, own, lambda row: row["step_ms"], f"{mode}, batch {batch_size}: ms a step")
        smallest = [row for row in shown if row["batch_size"] == batches[0]]
        _line_panel(sized, smallest, lambda row: row["state_bytes"] / row["batch_size"] * 2**-20, "state of a row, MiB")
    handles, labels = max((axes.get_legend_handles_labels() for axes in figure.axes), key=lambda pair: len(pair[1]))
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _line_panel(axes: Any, rows: list[Row], value: Callable[[Row], float], title: str) -> None:
    for index, recipe in enumerate(dict.fromkeys(row["recipe"] for row in rows)):
        own = [row for row in rows if row["recipe"] == recipe]
        axes.plot([row["length"] for row in own], list(map(value, own)), f"C{index}-o", markersize=4, label=recipe)
    from matplotlib.ticker import LogLocator

    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length}" for length in lengths], minor=False)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("tokens of context")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _all_bars(rows: list[Row]) -> Any:
    from matplotlib.figure import Figure

    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    largest = max((row.get("peak_bytes", 0) for row in rows), default=0)
    unit, factor = ("GiB", 2**-30) if largest >= 2**33 else ("MiB", 2**-20)
    panels = [(mode, "tokens_per_s", 1e-3, f"{mode}: thousand tokens/s") for mode in _modes(rows)]
    panels += [(mode, "peak_bytes", factor, f"{mode}: peak memory, {unit}") for mode in _modes(rows)]
    size = 5.5 * len(panels), 1.6 + 0.5 * len(recipes) * max(len(lengths), 2)
    figure = Figure(figsize=size, layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (mode, key, factor, title) in zip(all_axes, panels, strict=True):
        _bars(axes, [row for row in rows if row["mode"] == mode], recipes, lengths, key, factor)
        axes.set_title(title, loc="left", fontsize=11)
    all_axes[0].invert_yaxis()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _modes(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["mode"] for row in rows))


def _bars(axes: Any, rows: list[Row], recipes: list[str], lengths: list[int], key: str, factor: float) -> None:
    kinds = [(length, compiled) for length in lengths for compiled in (False, True)]
    height = 0.8 / len(kinds)
    for index, (length, compiled) in enumerate(kinds):
        shown = [row for row in rows if (row["length"], row["compiled"]) == (length, compiled)]
        values = {row["recipe"]: row[key] * factor for row in shown if key in row}
        places = [position - 0.4 + (index + 0.5) * height for position in range(len(recipes))]
        bars = axes.barh(
            places,
            [values.get(recipe, 0) for recipe in recipes],
            height * 0.92,
            color=f"C{lengths.index(length)}",
            alpha=1.0 if compiled else 0.4,
            label=f"T {length} {'compiled' if compiled else 'eager'}",
        )
        labels = [_label(values[recipe]) if recipe in values else "failed" for recipe in recipes]
        axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.set_yticks(range(len(recipes)), recipes)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
