"""Results of several runs as one: only where they were measured under the same settings, or said not to be."""

from collections.abc import Iterable
from typing import Any

from zoo.results import Results, Row

__all__ = ["Graphs", "has_figures", "merge", "refuse_graphs", "refuse_mixture"]

Graphs = Iterable[tuple[str, bool | None]]
"""Modes, and whether their graphs have symbols for sizes; None where nothing is compiled."""

_MACHINE = ("device", "cpu", "cores", "threads", "driver", "python", "torch", "triton", "cuda", "zoo")
_CODE = ("commit", "changed_since_commit")
_NAMED = ("overrides",)  # settings that the names of the recipes tell


def has_figures(row: Row) -> bool:
    """Whether nothing failed, and nothing was skipped."""
    return "error" not in row and "skipped" not in row


def refuse_mixture(earlier: Results | None, later: Results, *, allowed: bool) -> tuple[list[str], list[Row]]:
    """What differs between two runs, each in a line, and the earlier one's rows, which then say it too.

    Args:
        earlier: results, or None.
        later: at least the "machine", "settings" and "configs" of others.
        allowed: whether they may differ.

    Raises:
        ValueError: they do, and may not.
    """
    if earlier is None:
        return [], []
    found = _differences(earlier, later)
    lines = [f"{key}: {old} and {new}" for key, (old, new) in found.items()]
    _refuse(lines, allowed)
    rows = earlier["rows"]
    if found:
        others = {key: old for key, (old, _) in found.items()}
        rows = [row | {"measured_with": others | row.get("measured_with", {})} for row in rows]
    return list(dict.fromkeys([*earlier.get("mixed", ()), *lines])), rows


def refuse_graphs(graphs: Graphs, *, allowed: bool) -> list[str]:
    """The modes that have graphs for any size and graphs for one size, each in a line: they are not equally fast.

    Raises:
        ValueError: there are some, and may not be.
    """
    known: dict[str, set[bool]] = {}
    for mode, dynamic in graphs:
        if dynamic is not None:
            known.setdefault(mode, set()).add(dynamic)
    lines = [f"graphs of {mode}: for any size and for one size" for mode, kinds in known.items() if len(kinds) > 1]
    _refuse(lines, allowed)
    return lines


def _refuse(differences: list[str], allowed: bool) -> None:
    if differences and not allowed:
        raise ValueError(
            f"these results were not measured in the same way ({'; '.join(differences)}), "
            "allowed: another --out, or --mixed, with which the report says so"
        )


def merge(runs: list[Results], *, mixed: bool) -> Results:
    """Several results as one; of a cell that several have, the last with figures.

    Args:
        runs: at least one, earlier ones first.
        mixed: whether they may be of other machines, versions, commits or settings.

    Raises:
        ValueError: they are, and may not.
    """
    *others, last = runs
    lines, rows = [*last.get("mixed", ())], {}
    for run in others:
        differences, old = refuse_mixture(run, last, allowed=mixed)
        lines += differences
        rows |= _better(old, rows)
    rows |= _better(last["rows"], rows)
    lines += refuse_graphs(((row["mode"], row.get("dynamic")) for row in rows.values()), allowed=mixed)
    there = {str(cell) for cell in rows}
    missing = [name for run in runs for name in run.get("missing", []) if name not in there]
    return last | {
        "configs": {name: of for run in runs for name, of in run.get("configs", {}).items()},
        "mixed": list(dict.fromkeys(lines)),
        "complete": not missing,
        "missing": missing,
        "rows": list(rows.values()),
    }


def _better(rows: list[Row], others: dict[Any, Row]) -> dict[Any, Row]:
    """By cell those with figures, or of a cell that the others lack."""
    from zoo.compare.plan import Cell

    cells = [(Cell.of_row(row), row) for row in rows]
    return {cell: row for cell, row in cells if has_figures(row) or cell not in others}


def _differences(earlier: Results, later: Results) -> dict[str, tuple[Any, Any]]:
    """Of the machines and the settings, and of the peers and the recipes that both have."""
    pairs = {key: (earlier["machine"].get(key), later["machine"].get(key)) for key in (*_MACHINE, *_CODE)}
    settings = earlier["settings"], later["settings"]
    pairs |= {key: (value, settings[1].get(key)) for key, value in settings[0].items() if key not in _NAMED}
    pairs = {key: pair for key, pair in pairs.items() if key in _CODE or None not in pair}  # what one does not use
    for kind, old, new in (
        ("peer", *(run["machine"].get("peers") or {} for run in (earlier, later))),
        ("configuration of", *(run.get("configs") or {} for run in (earlier, later))),
    ):
        pairs |= {f"{kind} {name}": (old[name], new[name]) for name in old if old[name] and new.get(name)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
