"""What the rows of a comparison say: which stand together, what failed, what a reader must be told first."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

__all__ = [
    "COMPILES",
    "DECODING",
    "MODES",
    "MODE_NAMES",
    "Line",
    "Results",
    "Row",
    "failures",
    "lengths",
    "lines",
    "measured",
    "modes",
    "outcome",
    "owner",
    "ranked",
    "recipes",
    "title",
    "warnings",
]

Results = dict[str, Any]
Row = dict[str, Any]

MODE_NAMES = {
    "train": "Training step: forward, loss, backward, optimiser",
    "forward": "Forward pass: all logits",
    "prefill": "Prefill: a prompt's state, and the logits of its last token",
    "decode": "Decoding: one more token of each row",
}
MODES = tuple(MODE_NAMES)
DECODING = ("prefill", "decode")  # modes that each batch size is measured in by itself
_NAMED = 5  # of the missing cells
COMPILES = {"none": "eager", "model": "compiled", "block": "block-compiled"}


def measured(row: Row | None) -> bool:
    """Whether there are figures."""
    return row is not None and row.get("tokens_per_s") is not None


def modes(results: Results) -> list[str]:
    """Those of the rows, in the order of `MODES`."""
    present = {row["mode"] for row in results["rows"]}
    return [mode for mode in MODES if mode in present]


def lengths(rows: Iterable[Row]) -> list[int]:
    """Each once, ascending."""
    return sorted({row["length"] for row in rows})


def owner(row: Row) -> str:
    """The recipe of this library that the row's is compared with, or the row's own."""
    return row["recipe"].partition("/")[2] if row.get("peer") else row["recipe"]


def recipes(results: Results) -> list[str]:
    """As they come, a peer right below the architecture that it belongs to."""
    seen = {row["recipe"]: owner(row) for row in results["rows"]}
    owners = list(dict.fromkeys(seen.values()))
    return sorted(seen, key=lambda recipe: (owners.index(seen[recipe]), seen[recipe] != recipe))


@dataclass(frozen=True, slots=True)
class Line:
    """One architecture at one task.

    Attributes:
        rows: by how they were compiled, of `COMPILES`.
        ratios: how many times as fast as each peer, the best of eager and compiled on both sides.
    """

    recipe: str
    dtype: str
    length: int
    batch_size: int
    mode: str
    rows: dict[str, Row] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def fastest(self) -> Row | None:
        """Of the rows with figures."""
        return max(filter(measured, self.rows.values()), key=lambda row: row["tokens_per_s"], default=None)

    @property
    def compiled(self) -> Row | None:
        """The fastest that was compiled."""
        return Line(self.recipe, self.dtype, self.length, self.batch_size, self.mode,
                    {how: row for how, row in self.rows.items() if how != "none"}).fastest  # fmt: skip

    @property
    def speedup(self) -> float | None:
        """Of the fastest compiled row over the eager one."""
        eager, compiled = self.rows.get("none"), self.compiled
        if not (compiled and eager and measured(eager)):
            return None
        return compiled["tokens_per_s"] / eager["tokens_per_s"]


def lines(results: Results) -> list[Line]:
    """Of every architecture, dtype, length, batch size and mode; by mode, dtype, length, batch size, then recipe."""
    order, found = recipes(results), dict[tuple[Any, ...], Line]()
    dtypes = list(dict.fromkeys(row["dtype"] for row in results["rows"]))
    for row in results["rows"]:
        key = tuple(row[name] for name in ("recipe", "dtype", "length", "batch_size", "mode"))
        found.setdefault(key, Line(*key)).rows[row["compile"]] = row
    for (_, *task), line in found.items():
        row = next(iter(line.rows.values()))
        own = found.get((owner(row), *task))
        if row.get("peer") and own and own.fastest and line.fastest:
            own.ratios[row["peer"]] = own.fastest["tokens_per_s"] / line.fastest["tokens_per_s"]
    return sorted(
        found.values(),
        key=lambda line: (
            MODES.index(line.mode),
            dtypes.index(line.dtype),
            line.length,
            line.batch_size,
            order.index(line.recipe),
        ),
    )


def ranked(results: Results) -> list[Row]:
    """All rows in the order of `lines`."""
    return [line.rows[how] for line in lines(results) for how in COMPILES if how in line.rows]


def failures(results: Results, mode: str | None = None) -> list[tuple[str, str]]:
    """Of the rows without figures, of one mode if given: which they are, and what became of them.

    Cells of a recipe that share all else stand together where they are every combination of what they name.
    """
    together = dict[tuple[str, ...], list[Row]]()
    for row in ranked(results):
        if not measured(row) and mode in (None, row["mode"]):
            together.setdefault((row["recipe"], row["mode"], row["dtype"], outcome(row)), []).append(row)
    found = []
    for (*_, what), rows in together.items():
        combinations = prod(len({row[key] for row in rows}) for key in ("length", "batch_size", "compile"))
        parts = [rows] if len(rows) == combinations else [[row] for row in rows]
        found += [(_describe(part), what) for part in parts]
    return found


def _describe(rows: list[Row]) -> str:
    row = rows[0]
    hows = [COMPILES[how] for how in COMPILES if any(row["compile"] == how for row in rows)]
    batches = sorted({row["batch_size"] for row in rows})
    parts = [
        row["recipe"],
        row["mode"],
        f"length {' and '.join(map(str, lengths(rows)))}",
        f"batch {' and '.join(map(str, batches))}",
        row["dtype"],
        " and ".join(hows),
    ]
    return ", ".join(parts)


def outcome(row: Row) -> str:
    """What became of a cell, in a line."""
    for word, key in (("failed", "error"), ("skipped", "skipped")):
        if row.get(key):
            return f"{word}: {row[key]}"
    if not measured(row):
        return "not measured"
    rate = f"{row['tokens_per_s']:,.0f} tokens/s"
    if row.get("peak_bytes"):
        rate += f", {row['peak_bytes'] * 2**-20:,.0f} MiB"
    times = [("compiled in", row.get("compile_cold_s")), ("from the cache in", row.get("compile_warm_s"))]
    shown = ", ".join(f"{words} {seconds:.1f} s" for words, seconds in times if seconds is not None)
    return f"{rate} ({shown})" if shown else rate


def warnings(results: Results) -> list[str]:
    """What a reader must know before any figure; empty where all is as it should be."""
    found = []
    if mixed := results.get("mixed"):
        found.append(f"Not all of this was measured alike. What differs: {'; '.join(mixed)}.")
    if missing := results.get("missing"):
        named = "; ".join(missing[:_NAMED]) + (f"; and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
        count = f"{len(missing):,} {'cell' if len(missing) == 1 else 'cells'}"
        found.append(f"Not complete: {count} of the plan not measured: {named}.")
    elif not results.get("complete", True):
        found.append("Not complete: the run was interrupted, or goes on.")
    if results.get("unwritten"):
        found.append("These results could not be written to results.json.")
    return found


def title(results: Results) -> str:
    """What it was measured on, and how."""
    machine, settings, rows = results.get("machine", {}), results.get("settings", {}), results["rows"]
    parts = [f"{machine.get('device') or 'unknown device'}", f"torch {machine.get('torch')}"]
    parts += dict.fromkeys(row["dtype"] for row in rows)
    tokens, steps = settings.get("tokens_per_step"), settings.get("steps")
    if tokens and any(row["mode"] not in DECODING for row in rows):
        parts.append(f"up to {tokens:,} tokens a step")
    if steps:
        parts.append(f"medians of {steps} {'step' if steps == 1 else 'steps'}")
    return ", ".join(parts)
