"""Results of kernels as tables, as Markdown, and as a plot."""

from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from zoo.bench import tables
from zoo.bench.failures import fault
from zoo.bench.kernels.kernel import STEPS, Step
from zoo.bench.kernels.table import KERNELS
from zoo.results import Row

__all__ = ["markdown", "outcome", "plot", "table"]

_KEYS = ("length", "num_heads", "head_dim")
_HEADS = ("T", "B", "H", "D")
_NAMES: dict[Step, str] = {"forward": "forward", "forward_backward": "forward and backward"}
_CAPTION = (
    "Milliseconds of the forward / of forward and backward, medians; bold: the fastest of a line; *: no CUDA graph, so "
    "with what the host takes. -: skipped, failed: an error, both with the reason in the JSON; wrong: far from the "
    "reference. floor: bytes that must move over the bandwidth of a copy (b), or FLOPs over the rate of a matrix "
    "product (f), whichever is more. share: of the floor in the time of ours. over peer: how many times as fast ours "
    "is as the fastest peer. ours: the fastest of torch and triton."
)


def outcome(row: Row) -> str:
    """What became of a cell, in a line."""
    if amiss := fault(row):
        return amiss
    return ", ".join(
        f"{_NAMES[step]} {row[f'{step}_ms']['median']:,.4g} ms ({_percent(row[f'{step}_share'])} of it the floor)"
        for step in _steps(row)
    )


def table(results: dict[str, Any], width: int) -> Group:
    """For the terminal: a table for each kernel, or several where ``width`` characters do not hold its columns."""
    parts: list[RenderableType] = [Text(_title(results))]
    for name, rows in _by_kernel(results).items():
        parts.append(Text(f"\n{_heading(name, rows)}"))
        parts += tables.fitted(_lines(rows, "[bold]{}[/bold]"), len(_HEADS), width)
    return Group(*parts, Text(_CAPTION))


def markdown(results: dict[str, Any]) -> str:
    """Markdown tables, with what they were measured on."""
    parts = [f"{_title(results)}:"]
    for name, rows in _by_kernel(results).items():
        parts += [f"### {_heading(name, rows)}", tables.markdown_table(_lines(rows, "**{}**"))]
    return "\n\n".join([*parts, _CAPTION.replace("*:", "\\*:")]) + "\n"


def _by_kernel(results: dict[str, Any]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in results["rows"]:
        found.setdefault(row["kernel"], []).append(row)
    return found


def _heading(name: str, rows: list[Row]) -> str:
    errors = [error for row in rows if row.get("correct") for error in row["errors"].values()]
    worst = f"; errors up to {max(errors):.1e}" if errors else ""
    return f"{name}: {KERNELS[name].summary}{worst}"


def _lines(rows: list[Row], bold: str) -> list[list[str]]:
    """Headings, and for each shape: the times of every side, the floor, and how ours stands to it and to the peers."""
    sides = list(dict.fromkeys(row["side"] for row in rows))
    lines = [[*_HEADS, *sides, "floor", "share", "over peer"]]
    for shape, found in _by_shape(rows).items():
        length, num_heads, head_dim = shape
        right = [row for row in found.values() if row.get("correct")]
        ours = [row for row in right if row["role"] == "ours"]
        batch_size = next((f"{row['batch_size']}" for row in found.values() if "batch_size" in row), "-")
        best: dict[Step, Row | None] = {step: _fastest(right, step) for step in STEPS}
        lines.append(
            [f"{length}", batch_size, f"{num_heads}", f"{head_dim}"]
            + [_times(found.get(side, {}), best, bold) for side in sides]
            + [_joined(_floor(right, step) for step in STEPS)]
            + [_joined(_of_ours(ours, step, what) for step in STEPS) for what in ("share", "speedup")]
        )
    return lines


def _by_shape(rows: list[Row]) -> dict[tuple[int, ...], dict[str, Row]]:
    found: dict[tuple[int, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in _KEYS), {})[row["side"]] = row
    return found


def _steps(row: Row) -> list[Step]:
    return [step for step in STEPS if f"{step}_ms" in row]


def _fastest(rows: list[Row], step: Step) -> Row | None:
    timed = [row for row in rows if step in _steps(row)]
    return min(timed, key=lambda row: row[f"{step}_ms"]["median"], default=None)


def _times(row: Row, best: dict[Step, Row | None], bold: str) -> str:
    if "error" in row:
        return "failed"
    if "correct" not in row:
        return "-"
    if not row["correct"]:
        return "wrong"
    marks = []
    for step in _steps(row):
        mark = f"{row[f'{step}_ms']['median']:,.4g}"
        marks.append(bold.format(mark) if best[step] is row else mark)
        if row[f"{step}_method"] == "calls":
            marks[-1] += "*"
    return " / ".join(marks)


def _floor(rows: list[Row], step: Step) -> str | None:
    """That of a shape is the same for all sides."""
    row = _fastest(rows, step)
    return None if row is None else f"{row[f'{step}_floor_ms']:,.4g}{row[f'{step}_bound'][0].lower()}"


def _of_ours(rows: list[Row], step: Step, what: str) -> str | None:
    row = _fastest(rows, step)
    value = None if row is None else row[f"{step}_{what}"]
    if value is None:
        return None
    return _percent(value) if what == "share" else f"{value:.2f}"


def _joined(cells: Any) -> str:
    """What there is of forward / forward and backward."""
    return " / ".join(cell for cell in cells if cell is not None) or "-"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:.0f}%"


def _title(results: dict[str, Any]) -> str:
    machine, settings = results["machine"], results["settings"]
    return (
        f"Kernels: {machine['device']}, torch {machine['torch']}, {settings['dtype']}, {settings['tokens']:,} tokens; "
        f"a copy {settings['copy_tb_per_s']:.3g} TB/s, a product {settings['matmul_tflops']:.3g} TFLOP/s"
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """Milliseconds over the lengths beside the floor: panels in rows by kernel, in columns by size and step.

    Args:
        results: of `zoo.bench.kernels.measure.run_plan`.
        path: of the PNG.
    """
    from matplotlib.figure import Figure

    kernels = _by_kernel(results)
    sizes = sorted({(row["head_dim"], row["num_heads"]) for row in results["rows"]})
    columns: list[tuple[int, int, Step]] = [(*size, step) for size in sizes for step in STEPS]
    colors = {
        side: f"C{index % 10}" for index, side in enumerate(dict.fromkeys(row["side"] for row in results["rows"]))
    }
    figure = Figure(figsize=(max(3 * len(columns), 9), 1.4 + 2.2 * len(kernels)), layout="constrained")
    panels = figure.subplots(len(kernels), len(columns), squeeze=False)
    handles: dict[str, Any] = {}
    for (name, rows), line in zip(kernels.items(), panels, strict=True):
        for (head_dim, num_heads, step), axes in zip(columns, line, strict=True):
            if step == "forward_backward" and not KERNELS[name].has_backward:
                axes.set_axis_off()
                continue
            shown = [row for row in rows if (row["head_dim"], row["num_heads"]) == (head_dim, num_heads)]
            _draw(axes, shown, step, colors)
            axes.set_title(f"{name}, H {num_heads}, D {head_dim}\n{_NAMES[step]}", loc="left", fontsize=9)
            found, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, found, strict=True))
    figure.supylabel("milliseconds, over T, tokens in a sequence", fontsize=10)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle(_title(results), x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=90)


def _draw(axes: Any, rows: list[Row], step: Step, colors: dict[str, str]) -> None:
    """One panel: a curve for each side that is right, and the floor."""
    right = sorted((row for row in rows if row.get("correct")), key=itemgetter("length"))
    for side, color in colors.items():
        points = [(row["length"], row[f"{step}_ms"]["median"]) for row in right if row["side"] == side]
        if points:
            axes.plot(*zip(*points, strict=True), label=side, color=color, marker="o", markersize=3.5, linewidth=1.3)
    floor = {row["length"]: row[f"{step}_floor_ms"] for row in right}
    if floor:
        axes.plot([*floor], [*floor.values()], label="floor", color="0.5", linestyle="--", marker="_")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([*floor], [tables.short(length) for length in floor])
        axes.xaxis.minorticks_off()
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=7)
