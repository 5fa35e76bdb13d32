"""The plots of `decoding_gpu.py`, from what it writes."""

from math import floor, log10
from pathlib import Path
from typing import Any

from delta_rule_plots import finish, save, title

Row = dict[str, Any]


def plot_bandwidth(result: dict[str, Any], path: Path) -> None:
    """Milliseconds of DeltaNet's step over the context, and the share of the bandwidth's limit in every row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    times, shares = figure.subplots(1, 2)
    rows = result["bandwidth"]["rows"]
    alone = select(rows, "deltanet-340m", 1)
    contexts = [row["context"] for row in alone]
    times.semilogx(contexts, medians(alone), "o-", base=2, label="deltanet-340m, batch 1")
    times.semilogx(contexts, [row["limit_ms"] for row in alone], "k--", base=2, linewidth=1, label="bytes / bandwidth")
    times.plot([], [], "C3", linewidth=2, label="target")  # for the legend, which is of this panel
    times.set_title("ms per token", loc="left", fontsize=11)
    name_contexts(times, alone)
    draw_shares(shares, rows, {target["name"]: target["target"] for target in result["bandwidth"]["targets"]})
    save(figure, f"A step of decoding, bf16, {title(result)}", path)


def draw_shares(axes: Any, rows: list[Row], targets: dict[str, float]) -> None:
    """A bar for each row; a target is of the shortest context."""
    shortest = min(row["context"] for row in rows)
    names = [f"{row['recipe']} B{row['batch_size']} {row['context'] // 1024}K" for row in rows]
    values = [row["share_of_limit"] or 0 for row in rows]
    axes.barh(names, values, 0.74, color="C0")
    axes.axvline(1, color="k", linestyle="--", linewidth=1)
    for position, (row, value) in enumerate(zip(rows, values, strict=True)):
        target = targets.get(f"{row['recipe']}, batch {row['batch_size']}") if row["context"] == shortest else None
        if target is not None:
            axes.vlines(target, position - 0.46, position + 0.46, colors="C3", linewidth=2)
        place = max(value, target or 0), position
        axes.annotate(f"{value:.2f}", place, (5, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_title("share of what the bandwidth allows", loc="left", fontsize=11)
    axes.invert_yaxis()
    finish(axes)


def plot_context(result: dict[str, Any], path: Path) -> None:
    """Milliseconds of a step over the context: a line for each recipe, and single points of the larger batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.subplots()
    rows = result["context"]["rows"]
    for i, recipe in enumerate(dict.fromkeys(row["recipe"] for row in rows)):
        for batch_size, style in ((1, "o-"), (8, "s")):
            shown = select(rows, recipe, batch_size)
            label = recipe if batch_size == 1 else None
            face = f"C{i}" if batch_size == 1 else "none"
            contexts = [row["context"] for row in shown]
            axes.semilogx(contexts, medians(shown), f"C{i}{style}", base=2, markerfacecolor=face, label=label)
    axes.plot([], [], "ks", markerfacecolor="none", label="batch 8")
    axes.set_title("ms per step, lines at batch 1", loc="left", fontsize=11)
    name_contexts(axes, rows)
    save(figure, f"A step of decoding, bf16, {title(result)}", path)


def plot_generation(result: dict[str, Any], path: Path) -> None:
    """Tokens a second of both sides at each batch size, and how many times FLA's ours are."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.subplots()
    rows = result["generation"]["rows"]
    names = {"ours": ("this repository", "C0"), "fla": (f"FLA {result['fla']}", "0.75")}
    sides = [side for side in names if side in rows[0]]
    width = 0.8 / len(names)
    for i, side in enumerate(sides):
        places = [position + (i - (len(sides) - 1) / 2) * width for position in range(len(rows))]
        values = [row[side]["tokens_per_s"] for row in rows]
        label, colour = names[side]
        bars = axes.bar(places, values, width * 0.92, color=colour, label=label, log=True)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3, fontsize=8)
    for position, row in enumerate(rows):
        if "fla" in row:
            ours, theirs = (row[side]["tokens_per_s"] for side in names)
            text = f"{ours / theirs:.1f}x FLA"
            axes.annotate(text, (position, max(ours, theirs)), (0, 20), textcoords="offset points", ha="center")
    rates = [row[side]["tokens_per_s"] for row in rows for side in sides]
    axes.set_ylim(10 ** floor(log10(min(rates) / 2)), 4 * max(rates))  # bars of a log axis begin at a power of ten
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xticks(range(len(rows)), [f"batch {row['batch_size']}" for row in rows])
    axes.set_title("tokens/s", loc="left", fontsize=11)
    finish(axes)
    workload = f"prompt {result['prompt']}, {result['new_tokens']} new tokens"
    save(figure, f"Generation, deltanet-340m, bf16, {workload}\n{title(result)}", path)


def select(rows: list[Row], recipe: str, batch_size: int) -> list[Row]:
    """The rows of a recipe at a batch size."""
    return [row for row in rows if (row["recipe"], row["batch_size"]) == (recipe, batch_size)]


def medians(rows: list[Row]) -> list[float]:
    """Milliseconds of a step."""
    return [row["step_ms"]["median"] for row in rows]


def name_contexts(axes: Any, rows: list[Row]) -> None:
    """Ticks at the contexts, and times from 0."""
    contexts = sorted({row["context"] for row in rows})
    axes.set_xticks(contexts, [f"{context // 1024}K" for context in contexts])
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.set_xlabel("context, tokens")
    finish(axes)
