"""Results of many measurements, kept as they come."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

__all__ = ["Results", "Row", "collect"]

Results = dict[str, Any]
Row = dict[str, Any]


def collect(
    machine: dict[str, Any],
    settings: dict[str, Any],
    rows: Iterable[tuple[Any, Row]],
    keep: Callable[[Results], None],
    *,
    total: int,
    before: Iterable[Row] = (),
    conclude: Callable[[list[Row]], Results] = lambda _: {},
) -> Results:
    """Go through the measurements. Ctrl-C ends them early.

    Args:
        machine: where they run.
        settings: that they share.
        rows: makes them: the cell of a plan, a dataclass, and its figures.
        keep: given all results so far before the first, after each, and once more at the end.
        total: how many rows there are in the end.
        before: those of an earlier run.
        conclude: what is added at the end.

    Returns:
        {"machine": ..., "settings": ..., "complete": whether all rows are there, "missing": how many are not, "rows":
        [one mapping per cell]} and what was added.
    """
    results: Results = {"machine": machine, "settings": settings, "complete": False, "rows": [*before]}

    def count() -> Results:
        results["missing"] = total - len(results["rows"])
        return results

    try:
        keep(count())
        for cell, row in rows:
            results["rows"].append(asdict(cell) | row)
            keep(count())
        results["complete"] = True
    except KeyboardInterrupt:
        pass
    results |= conclude(results["rows"])
    keep(count())
    return results
