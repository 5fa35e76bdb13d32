"""The plots of `delta_rule_gpu.py`, from what it writes."""

from pathlib import Path
from typing import Any

from delta_rule_calls import STEPS
from zoo.files import write_whole


def plot_ops(result: dict[str, Any], path: Path) -> None:
    """GPU milliseconds of both sides at each shape."""
    from matplotlib.figure import Figure

    rows = result["ops"]["shapes"]
    names = [" ".join(f"{key}{size}" for key, size in row["shape"].items()) for row in rows]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, step in zip(figure.subplots(1, 2, sharey=True), STEPS, strict=True):
        sides = list(rows[0][step]["gpu_ms"])
        height = 0.8 / len(sides)
        for i, side in enumerate(sides):
            places = [position - 0.4 + (i + 0.5) * height for position in range(len(rows))]
            values = [row[step]["gpu_ms"][side]["median"] or 0 for row in rows]
            label = "this repository" if side == "ours" else f"FLA {result['fla']}"
            bars = axes.barh(places, values, height * 0.92, color=("C0", "0.75")[i], label=label)
            axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, fontsize=8)
        floors = [row[step]["floor_ms"] for row in rows]
        tops = [position - 0.4 for position in range(len(rows))]
        axes.vlines(floors, tops, [top + 0.8 for top in tops], colors="k", linewidth=1, label="bytes / bandwidth")
        axes.set_yticks(range(len(rows)), names)
        axes.set_title(f"{step.replace('_', ' + ')}, GPU ms", loc="left", fontsize=11)
        finish(axes)
    figure.axes[0].invert_yaxis()
    save(figure, f"Chunked delta rule, bf16, {title(result)}", path)


def plot_lengths(result: dict[str, Any], path: Path) -> None:
    """Milliseconds and memory per 1024 tokens over T."""
    from matplotlib.figure import Figure

    rows = result["lengths"]["rows"]
    ticks = range(len(rows))
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    times, peaks = figure.subplots(1, 2)
    for name in STEPS:
        times.plot(ticks, [row[f"{name}_ms_per_1k"] for row in rows], "o-", label=name.replace("_", " + "))
    times.set_title("GPU ms per 1024 tokens", loc="left", fontsize=11)
    peaks.plot(ticks, [row["peak_bytes"] / row["T"] / 1024 for row in rows], "o-", color="C1")
    peaks.set_title("peak MiB per 1024 tokens, beside the inputs", loc="left", fontsize=11)
    for axes in (times, peaks):
        axes.set_xticks(ticks, [f"{row['T'] // 1024}K" for row in rows])
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        axes.set_xlabel("T")
        finish(axes)
    save(figure, f"Chunked delta rule, bf16, {result['lengths']['shape']}, {title(result)}", path)


def finish(axes: Any) -> None:
    """Light, with room for labels."""
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, heading: str, path: Path) -> None:
    """Put a legend and a heading on it, and write it."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11)
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=100))


def title(result: dict[str, Any]) -> str:
    """The device and the versions."""
    return f"{result['machine']['device']}, torch {result['machine']['torch']}, Triton {result['machine']['triton']}"
