"""Results of many measurements, kept as they come."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch

from zoo import machine

__all__ = ["Results", "Row", "collect"]

Results = dict[str, Any]
Row = dict[str, Any]


def collect(
    device: torch.device,
    settings: dict[str, Any],
    rows: Iterable[tuple[Any, Row]],
    keep: Callable[[Results], None],
    conclude: Callable[[list[Row]], Results] = lambda _: {},
) -> Results:
    """Go through the measurements.

    Args:
        device: where they run.
        settings: that they share.
        rows: makes them: the cell of a plan, a dataclass, and its figures.
        keep: given all results so far after each, and once more when they are complete.
        conclude: what is added in the end.

    Returns:
        {"machine": header, "settings": ..., "complete": ..., "rows": [one mapping per cell]} and what was added.
    """
    results: Results = {"machine": machine.describe(device), "settings": settings, "complete": False, "rows": []}
    for cell, row in rows:
        results["rows"].append(asdict(cell) | row)
        keep(results)
    results |= {"complete": True} | conclude(results["rows"])
    keep(results)
    return results
