"""Results of several runs as one: only where they were measured under the same settings, or said not to be."""

from typing import Any

from zoo.results import Results, Row

__all__ = ["has_figures", "merge", "refuse_mixture"]

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
    if found and not allowed:
        raise ValueError(
            f"these results were not measured in the same way ({'; '.join(lines)}), "
            "allowed: another --out, or --mixed, with which the report says so"
        )
    rows = earlier["rows"]
    if found:
        others = {key: old for key, (old, _) in found.items()}
        rows = [row | {"measured_with": others | row.get("measured_with", {})} for row in rows]
    return list(dict.fromkeys([*earlier.get("mixed", ()), *lines])), rows


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
    return last | {
        "configs": {name: of for run in runs for name, of in run.get("configs", {}).items()},
        "mixed": list(dict.fromkeys(lines)),
        "complete": all(run["complete"] for run in runs),
        "missing": sum(run.get("missing", 0) for run in runs),
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
    pairs |= {
        key: (settings[0].get(key), settings[1].get(key)) for key in settings[0] | settings[1] if key not in _NAMED
    }
    for kind, old, new in (
        ("peer", *(run["machine"].get("peers") or {} for run in (earlier, later))),
        ("configuration of", *(run.get("configs") or {} for run in (earlier, later))),
    ):
        pairs |= {f"{kind} {name}": (old[name], new[name]) for name in old if old[name] and new.get(name)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
