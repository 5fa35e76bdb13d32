"""Results as a table, as Markdown, and as a plot."""

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["markdown", "plot", "table"]

Row = dict[str, Any]

_COLUMNS = (
    "recipe",
    "length",
    "mode",
    "eager tok/s",
    "compiled tok/s",
    "speedup",
    "step ms",
    "peak MiB",
    "compile s",
    "graphs",
    "breaks",
    "params",
    "MFLOP/tok",
    "loss",
)
_LEFT = (0, 2)  # columns of words
_FEWEST = 6  # columns that are always shown


def _pairs(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """(eager, compiled) of each recipe, length and mode; training first, then by length."""
    found: dict[tuple[str, int, str], dict[bool, Row]] = {}
    for row in rows:
        found.setdefault((row["recipe"], row["length"], row["mode"]), {})[row["compiled"]] = row
    pairs = [(pair.get(False, {}), pair.get(True, {})) for pair in found.values()]
    return sorted(pairs, key=lambda pair: _order(pair[0] or pair[1]))


def _order(row: Row) -> tuple[bool, int]:
    return row["mode"] != "train", row["length"]


def _cells(eager: Row, compiled: Row) -> list[str]:
    """One line of the table: throughput of both, and the other figures of the compiled one."""
    either = compiled or eager
    both = "tokens_per_s" in eager and "tokens_per_s" in compiled
    speedup = f"{compiled['tokens_per_s'] / eager['tokens_per_s']:.2f}x" if both else "-"
    best = compiled if "tokens_per_s" in compiled else eager
    return [
        either["recipe"],
        f"{either['length']}",
        either["mode"],
        *(_rate(row) for row in (eager, compiled)),
        speedup,
        _number(best.get("step_ms"), "{:.1f}"),
        _number(best.get("peak_bytes"), "{:,.0f}", 2**-20),
        _number(compiled.get("compile_s"), "{:.1f}"),
        _number(compiled.get("graphs"), "{}"),
        _number(compiled.get("graph_breaks"), "{}"),
        _number(best.get("params"), "{:.2f}M", 1e-6),
        _number(best.get("flops_per_token"), "{:,.1f}", 1e-6),
        _number(best.get("loss"), "{:.3f}"),
    ]


def _rate(row: Row) -> str:
    if "error" in row:
        return "failed"
    if not row:
        return "-"
    middle, low, high = (row[key] for key in ("tokens_per_s", "tokens_per_s_p20", "tokens_per_s_p80"))
    return f"{middle:,.0f} ±{(high - low) / 2 / middle:.0%}"


def _number(value: float | None, form: str, factor: float = 1) -> str:
    return "-" if value is None else form.format(value if factor == 1 else value * factor)


def table(results: dict[str, Any], width: int) -> Table:
    """For the terminal: as many columns, from the left, as fit into ``width`` characters."""
    for count in range(len(_COLUMNS), _FEWEST, -1):
        result = _table(results, count)
        if Console(width=10_000).measure(result).maximum <= width:
            return result
    return _table(results, _FEWEST)


def _table(results: dict[str, Any], count: int) -> Table:
    caption = _CAPTION if count == len(_COLUMNS) else f"{_CAPTION} The other columns are in table.md."
    result = Table(title=_title(results), caption=caption, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    result.title_justify = result.caption_justify = "left"
    for index, name in enumerate(_COLUMNS[:count]):
        result.add_column(name, justify="left" if index in _LEFT else "right", no_wrap=True)
    for _, group in groupby((_cells(*pair) for pair in _pairs(results["rows"])), key=itemgetter(2)):
        for cells in group:
            result.add_row(*map(escape, cells[:count]))
        result.add_section()
    return result


_CAPTION = (
    "tok/s: median ± half the distance from the 20th to the 80th percentile; a wide one says that the machine was "
    "busy. Lengths share a graph, which the first one compiles. Step time, peak memory (parameters, optimiser state, "
    "activations) and the last step's loss: compiled."
)


def markdown(results: dict[str, Any]) -> str:
    """A Markdown table, with what it was measured on."""
    rule = ["---" if index in _LEFT else "---:" for index in range(len(_COLUMNS))]
    rows = [list(_COLUMNS), rule, *(_cells(*pair) for pair in _pairs(results["rows"]))]
    return _title(results) + ":\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _title(results: dict[str, Any]) -> str:
    machine, settings = results["machine"], results["settings"]
    return (
        f"{machine['device']}, torch {machine['torch']}, {settings['dtype']}, "
        f"up to {settings['tokens_per_step']:,} tokens a step, medians of {settings['steps']} steps"
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """Throughput and memory in each mode: one group of bars a recipe, one pair of bars a length.

    Args:
        results: of `zoo.compare.run.run_plan`.
        path: of the PNG.
    """
    from matplotlib.figure import Figure

    rows = results["rows"]
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
    figure.suptitle(_title(results), x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=100)


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
