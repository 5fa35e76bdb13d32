"""Results as a table, as Markdown, and as a plot."""

from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from zoo.bench import tables
from zoo.bench.failures import fault
from zoo.bench.plan import BACKENDS
from zoo.results import Row

__all__ = ["markdown", "outcome", "plot", "table"]

_KEYS = ("length", "window", "head_dim", "layout")
_HEADS = ("T", "window", "D", "layout")
_TIMES = ("forward_ms", "forward_backward_ms")
_LEFT = ("layout", "times as long as PyTorch's fastest")  # columns of words
_CAPTION = (
    "Milliseconds of the forward / of forward and backward, medians; bold: the fastest of a line. "
    "-: skipped, failed: an error, both with the reason in the JSON; wrong: far from the reference."
)
_RANKING = (
    "At the length and window, forward or with the backward, where that is most; PyTorch's: sdpa with its kernels, "
    "flash, flex. Left out: auto, and what could not serve every call."
)


def outcome(row: Row) -> str:
    """What became of a cell, in a line."""
    if amiss := fault(row):
        return amiss
    forward, both = (row[time]["median"] for time in _TIMES)
    return f"forward {forward:,.3f} ms, with backward {both:,.3f} ms, {row['forward_backward_tflops']} TFLOP/s"


def _backends(results: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["backend"] for row in results["rows"]))


def _lines(results: dict[str, Any], bold: str) -> list[list[str]]:
    """For each length, window, head dim and layout: these, and the times of every backend."""
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in results["rows"]:
        groups.setdefault(tuple(row[key] for key in _KEYS), {})[row["backend"]] = row
    lines = []
    for (length, window, head_dim, layout), found in groups.items():
        right = [row for row in found.values() if row.get("correct")]
        best = [min((row[time]["median"] for row in right), default=None) for time in _TIMES]
        times = [_times(found.get(backend, {}), best, bold) for backend in _backends(results)]
        lines.append([f"{length}", f"{window or 'full'}", f"{head_dim}", layout, *times])
    return lines


def _times(row: Row, best: list[float | None], bold: str) -> str:
    if "error" in row:
        return "failed"
    if "correct" not in row:
        return "-"
    if not row["correct"]:
        return "wrong"
    marks = [row[time]["median"] for time in _TIMES]
    return " / ".join(
        bold.format(f"{mark:,.3f}") if mark == least else f"{mark:,.3f}"
        for mark, least in zip(marks, best, strict=True)
    )


def table(results: dict[str, Any], width: int) -> Group:
    """For the terminal: one table, or several below each other where ``width`` characters do not hold all backends."""
    lines = [[*_HEADS, *_backends(results)], *_lines(results, "[bold]{}[/bold]")]
    parts = tables.fitted(lines, len(_HEADS), width, left=_LEFT)
    ranking = ()
    if results["ranking"]:
        ranking = (tables.table(_ranking(results), left=_LEFT, wrapped=_LEFT[-1:]), Text(_RANKING))
    return Group(Text(_title(results)), *parts, Text(_CAPTION), *ranking)


def markdown(results: dict[str, Any]) -> str:
    """A Markdown table, with what it was measured on."""
    lines = [[*_HEADS, *_backends(results)], *_lines(results, "**{}**")]
    text = f"{_title(results)}:\n\n{tables.markdown_table(lines, left=_LEFT)}\n\n{_CAPTION}\n"
    if not results["ranking"]:
        return text
    return f"{text}\n{tables.markdown_table(_ranking(results), left=_LEFT)}\n\n{_RANKING}\n"


def _ranking(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """A heading, and a line for each kind of call."""
    lines: list[tuple[str, ...]] = [("D", "layout", "window", _LEFT[-1])]
    for kind in results["ranking"]:
        backends = ", ".join(f"{name} {slowdown:.2f}" for name, slowdown in kind["slowdowns"].items())
        lines.append(
            (f"{kind['head_dim']}", kind["layout"], "sliding" if kind["windowed"] else "full", backends or "-")
        )
    return lines


def _title(results: dict[str, Any]) -> str:
    machine, settings = results["machine"], results["settings"]
    return (
        f"Attention: {machine['device']}, torch {machine['torch']}, {settings['dtype']}, {settings['tokens']:,} tokens"
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """TFLOP/s of forward and backward over the lengths: panels in rows by window, in columns by head dim and layout.

    Args:
        results: of `zoo.bench.measure.run_plan`.
        path: of the PNG.
    """
    from matplotlib.figure import Figure

    rows = results["rows"]
    windows = sorted({row["window"] for row in rows}, key=lambda window: window or 0)
    kinds = sorted({(row["head_dim"], row["layout"]) for row in rows})
    lengths = sorted({row["length"] for row in rows})
    backends = [name for name in BACKENDS if any(row["backend"] == name and row.get("correct") for row in rows)]
    figure = Figure(figsize=(max(3.2 * len(kinds), 9), 1.4 + 2.4 * len(windows)), layout="constrained")
    panels = figure.subplots(len(windows), len(kinds), sharex=True, sharey="row", squeeze=False)
    for window, line in zip(windows, panels, strict=True):
        for (head_dim, layout), axes in zip(kinds, line, strict=True):
            panel = (window, head_dim, layout)
            shown = [row for row in rows if (row["window"], row["head_dim"], row["layout"]) == panel]
            for name in backends:
                _curve(axes, name, [row for row in shown if row["backend"] == name])
            axes.set_title(f"window {window or 'full'}, D {head_dim}, {layout}", loc="left", fontsize=9)
            axes.grid(color="0.9", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].set_ylim(bottom=0)
    for axes in panels[-1]:
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [tables.short(length) for length in lengths])
        axes.minorticks_off()
        axes.set_xlabel("T, tokens in a sequence")
    figure.supylabel("TFLOP/s of forward and backward, over the visible pairs", fontsize=10)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)), frameon=False)
    figure.suptitle(_title(results), x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=100)


def _curve(axes: Any, backend: str, rows: list[Row]) -> None:
    """A backend over the lengths, broken where it has no figures; what is chosen automatically lies pale below."""
    rows = sorted(rows, key=itemgetter("length"))
    heights = [row["forward_backward_tflops"] if row.get("correct") else float("nan") for row in rows]
    style: dict[str, Any] = {"color": "0.8", "linewidth": 7, "solid_capstyle": "round"}
    if backend != "auto":
        index = BACKENDS.index(backend) - 1
        style = {"color": f"C{index}", "marker": "osD^vXP"[index], "markersize": 4.5, "linewidth": 1.3}
    axes.plot([row["length"] for row in rows], heights, label=backend, **style)
