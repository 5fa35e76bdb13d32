"""Which backends are fastest in the worst case, for each kind of call that is told apart beforehand."""

from collections.abc import Iterable
from typing import Any

from zoo.bench.plan import FORCED, PYTORCH
from zoo.results import Row

__all__ = ["rank"]

_STEPS = ("forward_ms", "forward_backward_ms")


def rank(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The backends of each kind of call, in order of the worst time relative to PyTorch, over lengths and windows.

    So the first one is never much slower than the best that there is without this library.

    Args:
        rows: of `zoo.bench.measure.run_plan`.

    Returns:
        One mapping per kind of call: ``head_dim``, ``layout``, ``windowed``, and ``slowdowns``, by backend: how many
        times as long as the fastest of PyTorch's (or of all, if none of these could) it took at the length and window,
        forward or with the backward, where that is most. Those that could not serve every call, or were wrong, are left
        out, and so is "auto".
    """
    kinds: dict[tuple[int, str, bool], list[Row]] = {}
    for row in rows:
        if row["backend"] != "auto":
            kinds.setdefault((row["head_dim"], row["layout"], row["window"] is not None), []).append(row)
    return [
        {"head_dim": head_dim, "layout": layout, "windowed": windowed, "slowdowns": _slowdowns(group)}
        for (head_dim, layout, windowed), group in kinds.items()
    ]


def _slowdowns(rows: list[Row]) -> dict[str, float]:
    """By backend, the least first."""
    calls: dict[tuple[int, int | None], dict[str, Row]] = {}
    for row in rows:
        calls.setdefault((row["length"], row["window"]), {})[row["backend"]] = row
    worst: dict[str, float] = {}
    for found in calls.values():
        right = {name: row for name, row in found.items() if row.get("correct")}
        for step in _STEPS:
            measures = {name: row for name, row in right.items() if name in PYTORCH} or right
            fastest = min((row[step]["median"] for row in measures.values()), default=0.0)
            for name, row in right.items():
                worst[name] = max(worst.get(name, 0.0), row[step]["median"] / fastest)
    served = {name for name in worst if all(found.get(name, {}).get("correct") for found in calls.values())}
    return {name: round(worst[name], 3) for name in sorted(served - set(FORCED), key=lambda name: (worst[name], name))}
