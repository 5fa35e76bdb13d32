"""Results as a table of the terminal, as Markdown, and as CSV."""

import csv as csv_format
from collections.abc import Callable
from io import StringIO
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from zoo.compare.report.rows import (
    COMPILES,
    Line,
    Results,
    Row,
    batched,
    conditions,
    failures,
    footnotes,
    lines,
    measured,
    ranked,
    state_of_row,
    title,
    tokens_per_step,
    warnings,
)

__all__ = ["CAPTION", "FIGURES", "csv", "digits", "markdown", "number", "rate", "side_by_side", "table", "unit"]

CELL = ("recipe", "peer", "length", "batch_size", "mode", "compile", "dtype")
FIGURES = (
    "tokens_per_s",
    "tokens_per_s_p20",
    "tokens_per_s_p80",
    "step_ms",
    "mfu",
    "flops_per_token",
    "peak_bytes",
    "state_bytes",
    "compile_cold_s",
    "compile_warm_s",
    "first_step_s",
    "graphs",
    "graph_breaks",
    "recompilations",
    "params",
    "loss",
)
_RATES = {"none": "eager tok/s", "model": "compiled tok/s", "block": "blocks tok/s"}
LEFT = ("recipe", "dtype", "mode")  # columns of words
CAPTION = (
    "tok/s: median ± half the distance from the 20th to the 80th percentile; a wide one says that the machine was "
    "busy, a narrow one does not say that it was idle. Blocks: each block compiled by itself. Marked: the fastest of a "
    "line, whose are the step time, MFU, memory and loss. Speedup: the fastest compiled one over eager. x peer: how "
    "many times as fast as the other library's model, the best of eager and compiled on both sides. A step of decode "
    "is a token of each row; state of a row: what decoding keeps of one sequence of this length. Compile cold: with "
    "empty caches, warm: with what the first compilation left on disk; first step: of the same "
    "compiled model, with warm caches, and of eager where nothing was compiled. model / block: compiled whole, and "
    "block by block. -: not measured, or nothing."
)

Mark = Callable[[str], str]


def unit(values: list[float | None]) -> tuple[str, float]:
    """The unit that a column or an axis of bytes is shown in, and the factor to it."""
    largest = max((value for value in values if value), default=0)
    for name, bits in (("GiB", 30), ("MiB", 20)):
        if largest >= 2**bits:
            return name, 2.0**-bits
    return "KiB", 2.0**-10


def number(value: float | None, form: str, factor: float = 1) -> str:
    """The value, or "-" where there is none."""
    return "-" if value is None else form.format(value if factor == 1 else value * factor)


def digits(value: float) -> str:
    """Three digits of the value, and of a large one all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rate(row: Row | None) -> str:
    """Tokens a second, or the word for what became of them."""
    if row is None:
        return "-"
    if not measured(row):
        return "failed" if row.get("error") else "skipped" if row.get("skipped") else "-"
    middle, low, high = row["tokens_per_s"], row.get("tokens_per_s_p20"), row.get("tokens_per_s_p80")
    shown = digits(middle)
    return shown if low is None or high is None else f"{shown} ±{(high - low) / 2 / middle:.0%}"


def side_by_side(results: Results, mark: Mark) -> tuple[list[str], list[list[str]], list[str]]:
    """The lines of the tables.

    Args:
        results: of a comparison.
        mark: what is done to the fastest of a line.

    Returns:
        The columns' names, the cells of each line, and the mode of each line. Columns without anything are left out.
    """
    rows = results["rows"]
    hows = [how for how in COMPILES if any(row["compile"] == how for row in rows)]
    peak = unit([row.get("peak_bytes") for row in rows])
    state = unit(list(map(state_of_row, rows)))
    found = lines(results)
    cells = [_cells(line, hows, peak, state, mark) for line in found]
    some = [name for name in (cells[0] if cells else ()) if any(line[name] != "-" for line in cells)]
    if len({line.dtype for line in found}) == 1:
        some.remove("dtype")  # it stands in the title
    if some and tokens_per_step(results) and not batched(results):
        some.remove("batch")  # it follows from the length, and from the tokens of a step in the title
    return some, [[line[name] for name in some] for line in cells], [line.mode for line in found]


def _cells(
    line: Line, hows: list[str], peak: tuple[str, float], state: tuple[str, float], mark: Mark
) -> dict[str, str]:
    fastest = line.fastest or {}
    choice = len(hows) > 1
    rates = {
        _RATES[how]: mark(rate(line.rows[how]))
        if choice and fastest and line.rows.get(how) is fastest
        else rate(line.rows.get(how))
        for how in hows
    }
    unknown = "N/A" if fastest and line.mode != "decode" else "-"
    return {
        "recipe": f"{line.recipe} †" if any(map(conditions, line.rows.values())) else line.recipe,
        "dtype": line.dtype,
        "length": f"{line.length}",
        "batch": f"{line.batch_size}",
        "mode": line.mode,
        **rates,
        "speedup": number(line.speedup, "{:.2f}x"),
        "x peer": ", ".join(f"{ratio:.2f}x {peer}" for peer, ratio in line.ratios.items()) or "-",
        "step ms": number(fastest.get("step_ms"), "{:.3g}" if line.mode == "decode" else "{:,.1f}"),
        "MFU": unknown if fastest.get("mfu") is None else f"{fastest['mfu']:.1%}",
        f"peak {peak[0]}": number(fastest.get("peak_bytes"), "{:,.1f}", peak[1]),
        f"state of a row, {state[0]}": number(state_of_row(fastest) if fastest else None, "{:,.4g}", state[1]),
        **_of_compiling(line, hows),
        "params": number(fastest.get("params"), "{:.2f}M", 1e-6),
        "MFLOP/tok": number(fastest.get("flops_per_token"), "{:,.1f}", 1e-6),
        "loss": number(fastest.get("loss"), "{:.3f}"),
    }


def _of_compiling(line: Line, hows: list[str]) -> dict[str, str]:
    """Of each way to compile that the results have, beside each other; the first step of eager where they have none."""
    ways = [how for how in hows if how != "none"]
    suffix = " (model / block)" if len(ways) > 1 else ""

    def of(key: str, form: str, hows: list[str] = ways) -> str:
        shown = [number((line.rows.get(how) or {}).get(key), form) for how in hows]
        return " / ".join(shown) if set(shown) - {"-"} else "-"

    cells = {
        "compile cold s": of("compile_cold_s", "{:.1f}"),
        "compile warm s": of("compile_warm_s", "{:.1f}"),
        "first step s": of("first_step_s", "{:.2f}", ways or hows),
        "graphs": of("graphs", "{}"),
        "breaks": of("graph_breaks", "{}"),
        "recompilations": of("recompilations", "{}"),
    }
    return {f"{name}{suffix}": text for name, text in cells.items()}


def table(results: Results, width: int) -> RenderableType:
    """For the terminal: as many columns, from the left, as fit into ``width`` characters.

    Args:
        results: of a comparison.
        width: characters of a line.
    """
    heads, cells, kinds = side_by_side(results, lambda text: f"[bold]*{text}[/bold]")
    fewest = sum(name in (*LEFT, "length", "batch") or name in _RATES.values() for name in heads)
    count = len(heads)
    shown = _table(heads, cells, kinds)
    while count > fewest and Console(width=10_000).measure(shown).maximum > width:
        count -= 1
        shown = _table(heads[:count], [line[:count] for line in cells], kinds)
    left_out = "" if count == len(heads) else " The other columns are in table.md."
    failed = [Text(f"{what}: {reason}") for what, reason in failures(results)]
    first = [Text(text, style="bold yellow") for text in warnings(results)]
    notes = [Text(text) for text in footnotes(results)]
    body = (shown, *notes, Text(f"{CAPTION}{left_out}", style="dim")) if cells else (Text("Nothing was measured."),)
    return Group(Text(title(results)), *first, *body, *failed)


def _table(heads: list[str], cells: list[list[str]], kinds: list[str]) -> Table:
    result = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in heads:
        # Where not even the fewest columns fit, a long name takes several lines, and no figure is cut.
        options: dict[str, Any] = {"overflow": "fold"} if name == "recipe" else {"no_wrap": True}
        result.add_column(name, justify="left" if name in LEFT else "right", **options)
    for _, group in groupby(zip(kinds, cells, strict=True), key=lambda pair: pair[0]):
        for _, line in group:
            result.add_row(escape(line[0]), *line[1:])
        result.add_section()
    return result


def markdown(results: Results) -> str:
    """A Markdown table, with what it was measured on, and what failed."""
    heads, cells, _ = side_by_side(results, lambda text: f"**{text}**")
    rule = ["---" if name in LEFT else "---:" for name in heads]
    table_lines = [
        f"| {' | '.join(line)} |" for line in (heads, rule, *([_safe(line[0]), *line[1:]] for line in cells))
    ]
    failed = [f"- {_safe(what)}: {_safe(reason)}" for what, reason in failures(results)]
    parts = [
        *(f"**{_safe(text)}**" for text in warnings(results)),
        _safe(title(results)) + ":",
        "\n".join(table_lines) if cells else "Nothing was measured.",
        *map(_safe, footnotes(results)),
        *(["\n".join(failed)] if failed else []),
        *([CAPTION] if cells else []),
    ]
    return "\n\n".join(parts) + "\n"


def _safe(text: str) -> str:
    """On one line, without what ends a cell or begins a tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def csv(results: Results) -> str:
    """Every row with everything in it that is a number or a word; columns that every report has stand first."""
    known = (*CELL, *FIGURES, "error", "skipped", "measured_with")
    rows = [
        {key: value for key, value in row.items() if not isinstance(value, dict | list)}
        | {"measured_with": conditions(row)}
        for row in ranked(results)
    ]
    others = sorted({key for row in rows for key in row} - {*known, "profile"})
    stream = StringIO()
    writer = csv_format.DictWriter(stream, [*known, *others], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
