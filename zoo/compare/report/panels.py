"""What the pictures show, before anyone draws it: the same panels for matplotlib and for the page."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from math import floor, isfinite, log10

from zoo.compare.report.rows import Line, Results, Row, batched, lengths, lines, measured, recipes, state_of_row
from zoo.compare.report.tables import unit

__all__ = ["Group", "Panel", "Point", "Series", "groups", "name_length", "name_value", "ticks"]

_LOG_FROM = 10  # a range of this factor and more is drawn on a logarithmic axis


@dataclass(frozen=True, slots=True)
class Point:
    """One figure, with its 20th and 80th percentile where these are known."""

    length: int
    value: float
    low: float
    high: float
    row: Row


@dataclass(frozen=True, slots=True)
class Series:
    """One architecture, eager or compiled (at each length the faster way to compile); in pieces where some failed."""

    recipe: str
    compiled: bool
    pieces: list[list[Point]]
    failed: list[Row]

    @property
    def points(self) -> list[Point]:
        """Of all pieces."""
        return [point for piece in self.pieces for point in piece]


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure of every architecture over the length.

    Attributes:
        log: whether the axis of values is logarithmic; otherwise it starts at zero.
    """

    title: str
    log: bool
    series: list[Series]


@dataclass(frozen=True, slots=True)
class Group:
    """Panels that stand beside each other.

    Attributes:
        name: what sets it apart from the other groups of its mode; empty where there is one.
    """

    name: str
    lengths: list[int]
    panels: list[Panel]


@dataclass(frozen=True, slots=True)
class _Metric:
    """A figure.

    Attributes:
        scale: of all its values: the unit's name, and the factor to it.
        spread: of tokens/s in value: 1 where they grow together, -1 where one is the other's inverse, 0 for neither.
    """

    title: str
    value: Callable[[Row], float | None]
    scale: Callable[[list[float | None]], tuple[str, float]]
    spread: int
    linear: bool


def _time_unit(values: list[float | None]) -> tuple[str, float]:
    return ("ms", 1.0) if max((value for value in values if value), default=1) >= 0.1 else ("µs", 1e3)


_RATE = _Metric("tokens/s", lambda row: row.get("tokens_per_s"), lambda values: ("", 1.0), 1, linear=True)
_TOKEN = _Metric("{} per token", lambda row: 1e3 / row["tokens_per_s"], _time_unit, -1, linear=False)
_STEP = _Metric("{} per step", lambda row: row.get("step_ms"), _time_unit, -1, linear=False)
_PEAK = _Metric("peak memory, {}", lambda row: row.get("peak_bytes"), unit, 0, linear=False)
_STATE = _Metric("state of a row, {}", state_of_row, unit, 0, linear=False)


def groups(results: Results, mode: str) -> list[Group]:
    """All panels of a mode: a group for each dtype and, where the length alone does not say it, each batch size."""
    own = [line for line in lines(results) if line.mode == mode]
    dtypes, by_batch = {line.dtype for line in own}, mode in batched(results)
    metrics = (_RATE, _STEP, _PEAK, _STATE) if mode == "decode" else (_RATE, _TOKEN, _PEAK)

    def key(line: Line) -> tuple[str, int]:
        return line.dtype, line.batch_size if by_batch else 0

    found = []
    for (dtype, batch), group in groupby(sorted(own, key=key), key=key):
        members = list(group)
        order = [recipe for recipe in recipes(results) if any(line.recipe == recipe for line in members)]
        all_lengths = lengths(row for line in members for row in line.rows.values())
        names = ([f"batch {batch}"] if batch else []) + ([dtype] if len(dtypes) > 1 else [])
        panels = [_panel(metric, members, order) for metric in metrics]
        found.append(Group(", ".join(names), all_lengths, [panel for panel in panels if panel]))
    return found


def _panel(metric: _Metric, members: list[Line], order: list[str]) -> Panel | None:
    values = [metric.value(row) for line in members for row in line.rows.values() if measured(row)]
    name, factor = metric.scale(values)
    known = [value for value in values if value is not None and isfinite(value) and value > 0]
    if not known and (values or metric is not _RATE):
        return None  # where all failed, one panel says so
    series = [
        _series(metric, factor, [line for line in members if line.recipe == recipe], compiled=compiled)
        for recipe in order
        for compiled in (False, True)
    ]
    spans = bool(known) and max(known) > _LOG_FROM * min(known)
    log = spans and not metric.linear and len({line.length for line in members}) > 1
    return Panel(metric.title.format(name), log, [part for part in series if part.points or part.failed])


def _series(metric: _Metric, factor: float, own: list[Line], *, compiled: bool) -> Series:
    pieces: list[list[Point]] = [[]]
    failed = []
    for line in own:
        tried = [row for how, row in line.rows.items() if (how != "none") == compiled]
        row = line.compiled if compiled else line.rows.get("none")
        value = metric.value(row) if row and measured(row) else None
        if row and value is not None and isfinite(value) and value > 0:
            middle = row["tokens_per_s"]
            low, high = (
                value * factor * ((row.get(f"tokens_per_s_{end}") or middle) / middle) ** metric.spread
                for end in ("p20", "p80")
            )
            pieces[-1].append(Point(line.length, value * factor, min(low, high), max(low, high), row))
        else:
            pieces.append([])
            failed += tried[:1] if tried and not any(map(measured, tried)) else []
    return Series(own[0].recipe, compiled, [piece for piece in pieces if piece], failed)


def ticks(least: float, most: float, *, log: bool) -> list[float]:
    """Where an axis is labelled: 1, 2 and 5 times a power of ten.

    Args:
        least: the smallest value; of a linear axis zero.
        most: the largest.
        log: whether the axis is logarithmic.
    """
    if log:
        powers = range(floor(log10(least)), floor(log10(most)) + 1)
        marks = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
        inside = [mark for mark in marks if least <= mark <= most]
        tens = [mark for mark in inside if log10(mark).is_integer()]
        return tens if len(inside) > 7 and len(tens) > 1 else inside
    step = 10.0 ** floor(log10(most / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if most / (step * factor) <= 5)
    return [index * step for index in range(int(most / step) + 1)]


def name_length(length: int) -> str:
    """2k of 2048."""
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length}"


def name_value(value: float) -> str:
    """Three digits, and k or M for thousands and millions."""
    for factor, letter in ((1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"
