"""Results of several runs as one: only where they were measured under the same settings, or said not to be."""

from typing import Any

from zoo.results import Results, Row

__all__ = ["merge", "refuse_mixture"]

_MACHINE = ("device", "cpu", "cores", "threads", "driver", "python", "torch", "triton", "cuda", "zoo")
_CODE = ("commit", "changed_since_commit")


def refuse_mixture(earlier: Results | None, later: Results, *, allowed: bool) -> tuple[list[str], list[Row]]:
    """What differs between two runs, each in a line, and the earlier one's rows, which then say it too.

    Args:
        earlier: results, or None.
        later: at least the "machine" and "settings" of others.
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
    others = {key: old for key, (old, _) in found.items()}
    rows = [({"measured_with": others} if others else {}) | row for row in earlier["rows"]]
    return list(dict.fromkeys([*earlier.get("mixed", ()), *lines])), rows


def merge(runs: list[Results], *, mixed: bool) -> Results:
    """Several results as one; of a cell that several have, the last that did not fail.

    Args:
        runs: at least one, earlier ones first.
        mixed: whether they may be of other machines, versions, commits or settings.

    Raises:
        ValueError: they are, and may not.
    """
    from zoo.compare.plan import Cell

    *others, last = runs
    lines, rows = [*last.get("mixed", ())], {}
    for run in others:
        differences, old = refuse_mixture(run, last, allowed=mixed)
        lines += differences
        rows |= {Cell.of_row(row): row for row in old if "error" not in row or Cell.of_row(row) not in rows}
    rows |= {cell: row for row in last["rows"] for cell in [Cell.of_row(row)] if "error" not in row or cell not in rows}
    return last | {
        "mixed": list(dict.fromkeys(lines)),
        "complete": all(run["complete"] for run in runs),
        "missing": sum(run.get("missing", 0) for run in runs),
        "rows": list(rows.values()),
    }


def _differences(earlier: Results, later: Results) -> dict[str, tuple[Any, Any]]:
    """Of the machines, the settings, and the peers that both have."""
    pairs = {key: (earlier["machine"].get(key), later["machine"].get(key)) for key in (*_MACHINE, *_CODE)}
    settings = earlier["settings"], later["settings"]
    pairs |= {key: (settings[0].get(key), settings[1].get(key)) for key in settings[0] | settings[1]}
    peers = (earlier["machine"].get("peers") or {}, later["machine"].get("peers") or {})
    pairs |= {key: (peers[0][key], peers[1][key]) for key in peers[0] if key in peers[1]}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
