"""Results as pictures, by matplotlib."""

import textwrap
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zoo.compare.report.palette import Style, styles
from zoo.compare.report.panels import Group, Panel, Point, Series, groups, name_length, name_value, ticks
from zoo.compare.report.rows import MODE_NAMES, Results, failures, measured, modes, title
from zoo.compare.report.rows import warnings as told_first
from zoo.compare.report.tables import digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plots", "save"]

_LONGEST_NAME = 36
_MOST_FAILURES = 6  # that a picture names; table.md names all


def plots(results: Results) -> "dict[str, Figure]":
    """A figure for each mode, by the name of its file.

    Panels of tokens/s, of time and of memory over the length, a line for each architecture: solid compiled (whichever
    way to compile was faster), pale and dashed eager. Where there is one length, bars.
    """
    return {mode: _plot(results, mode) for mode in modes(results)}


def save(figure: "Figure", **options: Any) -> Callable[[Any], None]:
    """What writes a figure to a path: the same bytes for the same figure."""

    def write(path: Any) -> None:
        from matplotlib import rc_context

        with warnings.catch_warnings(), rc_context({"svg.hashsalt": "zoo"}):
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a box stands for it
            figure.savefig(path, **options)

    return write


def _plot(results: Results, mode: str) -> "Figure":
    from matplotlib.figure import Figure

    found, looks = groups(results, mode), styles(results)
    columns = max(len(group.panels) for group in found)
    single = all(len(group.lengths) == 1 for group in found)
    shown = [recipe for recipe in looks if any(row["recipe"] == recipe for row in _rows(results, mode))]
    height = 0.9 + 0.52 * len(shown) if single else 3.4
    width = max(4.6 * columns, 9.2)  # inches; that a title takes, at least
    notes = _notes(results, mode, int(11 * width))
    heading = textwrap.wrap(_text(title(results | {"rows": _rows(results, mode)})), int(9.5 * width))
    told = [_text(textwrap.shorten(text, int(9.5 * width), placeholder=" ...")) for text in told_first(results)]
    handles = _patches() if single else [*_names(shown, looks), *_keys()]
    # Inches, from below: the notes, the legend, the panels, the title.
    below = 0.17 * len(notes) + 0.08 if notes else 0.0
    legend = 0.15 + 0.205 * -(-len(handles) // _per_line(columns))
    size = width, below + legend + height * len(found) + 0.42 + 0.18 * (len(heading) + len(told))
    figure = Figure(figsize=size, dpi=150)
    taken = (below + legend) / size[1]
    figure.set_layout_engine("constrained", rect=(0, taken, 1, 1 - taken))
    grid = figure.subplots(len(found), columns, squeeze=False)
    for group, line in zip(found, grid, strict=True):
        for axes, panel in zip(line, group.panels, strict=False):
            (_bars if single else _lines)(axes, panel, group, looks)
            name = f"{panel.title} ({group.name})" if group.name else panel.title
            axes.set_title(name, loc="left", fontsize=10.5, fontweight="bold")
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color("0.6")
            axes.tick_params(color="0.6", labelcolor="0.25", labelsize=9)
        for axes in line[len(group.panels) :]:
            axes.set_visible(False)
        for axes in line[1 : len(group.panels)] if single else ():
            axes.set_yticklabels([])
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, below / size[1]), "ncols": _per_line(columns)}
    figure.legend(handles=handles, frameon=False, fontsize=9, borderaxespad=0.2, **place)
    above = "\n".join((_text(MODE_NAMES[mode]), *heading, *told))
    figure.suptitle(above, x=0.008, ha="left", fontsize=10.5, linespacing=1.35)
    figure.text(0.008, 0.06 / size[1], "\n".join(notes), fontsize=8.5, color="0.25", va="bottom")
    return figure


def _rows(results: Results, mode: str) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if row["mode"] == mode]


def _per_line(columns: int) -> int:
    return max(2, 2 * columns - 1)


def _notes(results: Results, mode: str, width: int) -> list[str]:
    """What failed or was skipped, each in at most ``width`` characters."""
    rows = _rows(results, mode)
    failed = []
    for drawn, mark in ((False, "\N{MULTIPLICATION SIGN} "), (True, "")):  # a cross in the picture, or figures
        own = results | {"rows": [row for row in rows if measured(row) == drawn]}
        failed += [f"{mark}{what}: {reason}" for what, reason in failures(own)]
    more = [f"and {len(failed) - _MOST_FAILURES} more: see table.md"] if failed[_MOST_FAILURES:] else []
    return [_text(textwrap.shorten(text, width, placeholder=" ...")) for text in (*failed[:_MOST_FAILURES], *more)]


def _text(text: str) -> str:
    """As it stands: a dollar begins no formula."""
    return text.replace("$", r"\$")


def _name(recipe: str) -> str:
    half = _LONGEST_NAME // 2
    short = recipe if len(recipe) <= _LONGEST_NAME else f"{recipe[:half]}...{recipe[-half:]}"
    return _text(f" {short}" if short.startswith("_") else short)  # a label that starts with _ is hidden


def _names(shown: list[str], looks: dict[str, Style]) -> list[Any]:
    from matplotlib.lines import Line2D

    return [Line2D([], [], label=_name(recipe), **_line(looks[recipe], compiled=True)) for recipe in shown]


def _keys() -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color="0.2", linewidth=2, label="compiled"),
        Line2D([], [], color="0.2", linewidth=1.4, linestyle=(0, (4, 2.5)), alpha=0.5, label="eager"),
    ]


def _patches() -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(color="0.3", label="compiled"), Patch(color="0.75", label="eager")]


def _line(style: Style, *, compiled: bool) -> dict[str, Any]:
    dashes: Any = "-"
    if not compiled:
        dashes = (0, (4, 2.5))
    elif style.peer:
        dashes = (0, (6, 1.5, 1.5, 1.5))
    return {
        "color": style.light,
        "marker": style.marker,
        "markersize": 5.5 if compiled else 4,
        "markerfacecolor": "white" if style.peer else style.light,
        "linestyle": dashes,
        "linewidth": 1.9 if compiled else 1.2,
        "alpha": 1 if compiled else 0.45,
    }


def _lines(axes: Any, panel: Panel, group: Group, looks: dict[str, Style]) -> None:
    axes.set_xscale("log", base=2)
    if panel.log:
        axes.set_yscale("log")
    for series in panel.series:
        _line_of(axes, series, looks[series.recipe])
    values = [point.value for series in panel.series for point in series.points]
    if values and panel.log:
        axes.set_ylim(min(values) / 1.25, max(values) * 1.25)
        axes.set_yticks(ticks(*axes.get_ylim(), log=True))
    elif values:
        axes.set_ylim(0, max(point.high for series in panel.series for point in series.points) * 1.06)
    every = -(-len(group.lengths) // 8)
    axes.set_xticks(group.lengths[::every], [name_length(length) for length in group.lengths[::every]])
    axes.set_xlim(group.lengths[0] / 1.15, group.lengths[-1] * 1.15)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: name_value(value))
    axes.set_xlabel("length, tokens", fontsize=9, color="0.25")
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)


def _line_of(axes: Any, series: Series, style: Style) -> None:
    look = _line(style, compiled=series.compiled)
    for piece in series.pieces:
        places, values = [point.length for point in piece], [point.value for point in piece]
        axes.plot(places, values, **look)
        ends = [[point.value - point.low for point in piece], [point.high - point.value for point in piece]]
        axes.errorbar(places, values, ends, fmt="none", ecolor=style.light, elinewidth=1, alpha=look["alpha"] * 0.7)
    for row in series.failed:
        place = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
        axes.plot(row["length"], 0, marker="x", color=style.light, markersize=6, **place)


def _bars(axes: Any, panel: Panel, group: Group, looks: dict[str, Style]) -> None:
    order = list(dict.fromkeys(series.recipe for series in panel.series))
    largest = max((point.high for series in panel.series for point in series.points), default=1)
    for series in panel.series:
        both = sum(other.recipe == series.recipe for other in panel.series) > 1
        shift = (-0.2 if series.compiled else 0.2) if both else 0
        place, style = order.index(series.recipe) + shift, looks[series.recipe]
        for point in series.points:
            _bar(axes, place, point, style, compiled=series.compiled)
        for row in series.failed:
            axes.annotate(
                "failed" if row.get("error") else "skipped",
                (0, place),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=style.light,
                style="italic",
            )
    axes.set_yticks(range(len(order)), [_name(recipe) for recipe in order])
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_xlim(0, largest * 1.22)
    axes.xaxis.set_major_formatter(lambda value, _: name_value(value))
    axes.locator_params(axis="x", nbins=5)
    if not any(series.points for series in panel.series):
        axes.set_xticks([])
    axes.set_xlabel(f"length {name_length(group.lengths[0])}", fontsize=9, color="0.25")
    axes.tick_params(axis="y", length=0)


def _bar(axes: Any, place: float, point: Point, style: Style, *, compiled: bool) -> None:
    hatch = "//" if style.peer else None
    axes.barh(place, point.value, 0.36, color=style.light, alpha=1 if compiled else 0.4, hatch=hatch, edgecolor="white",
              linewidth=0)  # fmt: skip
    axes.hlines(place, point.low, point.high, colors="0.15", linewidth=1)
    end = (max(point.value, point.high), place)
    axes.annotate(digits(point.value), end, (4, 0), textcoords="offset points", va="center", fontsize=8,
                  color="0.2")  # fmt: skip
