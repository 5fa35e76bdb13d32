"""What the rows of a comparison say: which stand together, what failed, what a reader must be told first."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from textwrap import shorten
from typing import Any

from zoo.compare.plan import DECODING, MODES
from zoo.results import Results, Row

__all__ = [
    "COMPILES",
    "DECODING",
    "MODES",
    "MODE_NAMES",
    "Line",
    "Results",
    "Row",
    "batched",
    "commit",
    "conditions",
    "failures",
    "footnotes",
    "lengths",
    "lines",
    "measured",
    "modes",
    "on_gpu",
    "outcome",
    "owner",
    "ranked",
    "recipes",
    "state_of_row",
    "title",
    "tokens_per_step",
    "warnings",
]

MODE_NAMES = {
    "train": "Training step: forward, loss, backward, optimiser",
    "forward": "Forward pass: all logits",
    "prefill": "Prefill: a prompt's state, and the logits of its last token",
    "decode": "Decoding: one more token of each row",
}
_NAMED = 5  # of the missing cells
_LONGEST_CONDITION = 60
COMPILES = {"none": "eager", "model": "compiled", "block": "block-compiled"}


def measured(row: Row | None) -> bool:
    """Whether there are figures."""
    return row is not None and row.get("tokens_per_s") is not None


def modes(results: Results) -> list[str]:
    """Those of the rows, in the order of `MODES`."""
    present = {row["mode"] for row in results["rows"]}
    return [mode for mode in MODES if mode in present]


def batched(results: Results) -> set[str]:
    """The modes whose batch size is part of the task: those of decoding, and those with several for one length."""
    sizes = dict[tuple[str, int], set[int]]()
    for row in results["rows"]:
        sizes.setdefault((row["mode"], row["length"]), set()).add(row["batch_size"])
    return {mode for (mode, _), found in sizes.items() if mode in DECODING or len(found) > 1}


def tokens_per_step(results: Results) -> int | None:
    """The setting, where there are rows of training or forward passes and each has as many sequences as fit in it."""
    tokens = results.get("settings", {}).get("tokens_per_step")
    rows = [row for row in results["rows"] if row["mode"] not in DECODING]
    if not tokens or not rows or any(row["batch_size"] != max(1, tokens // row["length"]) for row in rows):
        return None
    return tokens


def state_of_row(row: Row) -> float | None:
    """Bytes that decoding keeps between two tokens of one sequence; None where it is unknown or nothing."""
    whole = row.get("state_bytes")
    return whole / row["batch_size"] if whole else None


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
    """Of the rows without figures or without a profile, of one mode if given: which, and what became of them.

    Cells of a recipe that share all else stand together where they are every combination of what they name.
    """
    together = dict[tuple[str, ...], list[Row]]()
    for row in ranked(results):
        if (row.get("error") or not measured(row)) and mode in (None, row["mode"]):
            what = f"its profile failed: {row['error']}" if measured(row) else outcome(row)
            together.setdefault((row["recipe"], row["mode"], row["dtype"], what), []).append(row)
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
    if not measured(row):
        words = (("failed", "error"), ("skipped", "skipped"))
        return next((f"{word}: {row[key]}" for word, key in words if row.get(key)), "not measured")
    rate = f"{row['tokens_per_s']:,.0f} tokens/s"
    if row.get("peak_bytes"):
        rate += f", {row['peak_bytes'] * 2**-20:,.0f} MiB"
    times = [("compiled in", row.get("compile_cold_s")), ("from the cache in", row.get("compile_warm_s"))]
    shown = ", ".join(f"{words} {seconds:.1f} s" for words, seconds in times if seconds is not None)
    text = f"{rate} ({shown})" if shown else rate
    return f"{text}; its profile failed: {row['error']}" if row.get("error") else text


def conditions(row: Row) -> str:
    """What was otherwise where the row was measured, in a line; empty where nothing was."""
    told = (row.get("measured_with") or {}).items()
    return "; ".join(f"{key}: {shorten(str(value), _LONGEST_CONDITION, placeholder=' ...')}" for key, value in told)


def footnotes(results: Results) -> list[str]:
    """What the mark of a recipe stands for; empty where none has one."""
    found = list(dict.fromkeys(filter(None, map(conditions, results["rows"]))))
    return [f"†: measured, in whole or in part, under other conditions ({'; or '.join(found)})."] if found else []


def warnings(results: Results) -> list[str]:
    """What a reader must know before any figure; empty where all is as it should be."""
    found = []
    if mixed := results.get("mixed"):
        found.append(f"Not all of this was measured alike. What differs: {'; '.join(mixed)}.")
    if missing := results.get("missing"):
        # A number in results of earlier versions.
        names, many = (missing, len(missing)) if isinstance(missing, list) else ([], missing)
        more = [f"and {many - _NAMED:,} more"] if len(names) > _NAMED else []
        named = f": {'; '.join([*names[:_NAMED], *more])}" if names else ""
        found.append(f"Not complete: {many:,} {'cell' if many == 1 else 'cells'} of the plan not measured{named}.")
    elif not results.get("complete", True):
        found.append("Not complete: the run was interrupted, or goes on.")
    if results.get("unwritten"):
        found.append("These results could not be written to results.json.")
    return found


def on_gpu(machine: dict[str, Any]) -> bool:
    """Whether the device of a header is a GPU: torch may be built for CUDA where the processor did the work."""
    return bool(machine.get("cuda")) and machine.get("device") != machine.get("cpu")


def commit(machine: dict[str, Any]) -> str | None:
    """Of the code, short."""
    if not machine.get("commit"):
        return None
    return f"{str(machine['commit'])[:12]}{' with changes' if machine.get('changed_since_commit') else ''}"


def title(results: Results) -> str:
    """What it was measured on, and how."""
    machine, settings, rows = results.get("machine", {}), results.get("settings", {}), results["rows"]
    parts = [f"{machine.get('device') or 'unknown device'}", f"torch {machine.get('torch')}"]
    parts += dict.fromkeys(row["dtype"] for row in rows)
    steps = settings.get("steps")
    if tokens := tokens_per_step(results):
        parts.append(f"up to {tokens:,} tokens a step")
    if steps:
        parts.append(f"medians of {steps} {'step' if steps == 1 else 'steps'}")
    known = (("driver", machine.get("driver")), ("commit", commit(machine)))
    parts += [f"{name} {value}" for name, value in known if value]
    return ", ".join(parts)
