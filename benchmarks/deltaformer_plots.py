"""The plots of `deltaformer_gpu.py`, from what it writes."""

from pathlib import Path
from typing import Any

from delta_rule_calls import STEPS
from delta_rule_plots import finish, save, title

BARS = {"cudnn": ("cuDNN attention", "0.75"), "read": ("read", "C1"), "write": ("write", "C0"), "op": ("op", "C2")}


def plot_ops(result: dict[str, Any], path: Path) -> None:
    """GPU milliseconds of cuDNN's attention, of both stages and of the op at each shape."""
    from matplotlib.figure import Figure

    rows = result["ops"]["shapes"]
    names = [" ".join(f"{key}{size}" for key, size in row["shape"].items()) for row in rows]
    figure = Figure(figsize=(11, 5), layout="constrained")
    height = 0.84 / len(BARS)
    for axes, step in zip(figure.subplots(1, 2), STEPS, strict=True):
        for i, (side, (label, colour)) in enumerate(BARS.items()):
            places = [position - 0.42 + (i + 0.5) * height for position in range(len(rows))]
            values = [row[step]["gpu_ms"][side]["median"] or 0 for row in rows]
            bars = axes.barh(places, values, height * 0.92, color=colour, label=label)
            axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, fontsize=8)
        axes.set_yticks(range(len(rows)), names if axes is figure.axes[0] else [])
        axes.set_title(f"{step.replace('_', ' + ')}, GPU ms", loc="left", fontsize=11)
        axes.invert_yaxis()
        finish(axes)
    save(figure, f"Deltaformer, bf16, {title(result)}", path)


def plot_lengths(result: dict[str, Any], path: Path) -> None:
    """Milliseconds and memory of the write per 1024 tokens over T."""
    from matplotlib.figure import Figure

    rows = result["lengths"]["rows"]
    lengths = [row["T"] for row in rows]
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    times, peaks = figure.subplots(1, 2)
    for step in STEPS:
        label = step.replace("_", " + ")
        times.loglog(lengths, [row[step]["ms_per_1k"] for row in rows], "o-", base=2, label=label)
        peaks.semilogx(lengths, [row[step]["peak_bytes"] / row["T"] / 1024 for row in rows], "o-", base=2)
    times.yaxis.set_major_formatter("{x:g}")
    times.set_title("GPU ms per 1024 tokens", loc="left", fontsize=11)
    peaks.set_title("peak MiB per 1024 tokens, beside the inputs", loc="left", fontsize=11)
    peaks.set_ylim(0, 1.08 * peaks.get_ylim()[1])
    for axes in (times, peaks):
        axes.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
        axes.set_xlabel("T")
        finish(axes)
    save(figure, f"The Deltaformer's write, bf16, {result['lengths']['shape']}, {title(result)}", path)
