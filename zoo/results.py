"""Results of many measurements, kept as they come."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    cells: Sequence[Any],
    before: Mapping[Any, Row] | None = None,
    conclude: Callable[[list[Row]], Results] = lambda _: {},
) -> Results:
    """Go through the measurements. Ctrl-C ends them early.

    Args:
        machine: where they run.
        settings: that they share.
        rows: makes them: the cell of a plan, a dataclass, and its figures.
        keep: given all results so far before the first, after each, and once more at the end.
        cells: all of the plan.
        before: rows of an earlier run, by their cells.
        conclude: what is added at the end.

    Returns:
        {"machine": ..., "settings": ..., "complete": whether all rows are there, "missing": the names of the cells
        that have none, "rows": [one mapping per cell]} and what was added.
    """
    found = dict(before or {})
    results: Results = {"machine": machine, "settings": settings, "complete": False, "rows": [*found.values()]}

    def so_far() -> Results:
        return results | {"missing": [str(cell) for cell in cells if cell not in found]}

    try:
        keep(so_far())
        for cell, figures in rows:
            found[cell] = asdict(cell) | figures
            results["rows"].append(found[cell])
            keep(so_far())
        results["complete"] = True
    except KeyboardInterrupt:
        pass
    results |= conclude(results["rows"])
    keep(so_far())
    return so_far()
