"""Charts of the page: SVG and bars that need no script, in colours that the page's style sets."""

from collections.abc import Callable
from html import escape
from math import log2, log10

from zoo.compare.report.palette import Style
from zoo.compare.report.panels import Group, Panel, Point, Series, name_length, name_value, ticks
from zoo.compare.report.rows import COMPILES, Row, outcome
from zoo.compare.report.tables import digits

__all__ = ["bars", "chart", "swatch"]

_WIDTH, _HEIGHT = 380, 254
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 372, 8, 222  # of the drawing area
_PAD = 12  # from its sides to the first and the last length
_MOST_LABELS = 8

_SHAPES = {  # around 0,0; by matplotlib's letter
    "o": "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "s": "M-3.6,-3.6h7.2v7.2h-7.2z",
    "^": "M0,-4.6L4.4,3.4H-4.4z",
    "D": "M0,-4.8L4.8,0L0,4.8L-4.8,0z",
    "v": "M0,4.6L4.4,-3.4H-4.4z",
    "<": "M-4.6,0L3.4,-4.4V4.4z",
    ">": "M4.6,0L-3.4,-4.4V4.4z",
    "p": "M0,-4.6L4.4,-1.4L2.7,3.7H-2.7L-4.4,-1.4z",
    "X": "M-4,-2L-2,-4L0,-2L2,-4L4,-2L2,0L4,2L2,4L0,2L-2,4L-4,2L-2,0z",
}


def chart(panel: Panel, group: Group, looks: dict[str, Style]) -> str:
    """Lines over the length, as SVG."""
    order, points = list(looks), [point for series in panel.series for point in series.points]
    across, up, marks = _across(group.lengths), *_scale(panel, points)
    parts = [f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_described(panel, group)}">']
    for value in marks:
        y = up(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 3.8:.1f}" text-anchor="end">{name_value(value)}</text>')
    for length in group.lengths[:: -(-len(group.lengths) // _MOST_LABELS)]:
        x = across(length)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{_BOTTOM + 14}" text-anchor="middle">{name_length(length)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>')
    parts.append(f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 1}" text-anchor="middle">length, tokens</text>')
    for series in sorted(panel.series, key=lambda series: series.compiled):  # pale ones below
        classes = _classes(series, order.index(series.recipe), looks)
        parts.append(f'<g class="series {classes}">{_drawn(series, looks[series.recipe], across, up)}</g>')
    return "".join(parts) + "</svg>"


def _described(panel: Panel, group: Group) -> str:
    ends = f"{name_length(group.lengths[0])} to {name_length(group.lengths[-1])} tokens"
    return escape(f"{panel.title} over lengths of {ends}; the figures are in the tables below", quote=True)


def _across(lengths: list[int]) -> Callable[[float], float]:
    first, last = log2(lengths[0]), log2(lengths[-1])
    return lambda length: _LEFT + _PAD + (log2(length) - first) / (last - first) * (_RIGHT - _LEFT - 2 * _PAD)


def _scale(panel: Panel, points: list[Point]) -> tuple[Callable[[float], float], list[float]]:
    """From a value to a height, and where to label the axis."""
    if not points:
        return lambda _: _BOTTOM, []
    most = max(point.high for point in points) * 1.05
    if not panel.log:
        return lambda value: _BOTTOM - value / most * (_BOTTOM - _TOP), ticks(0, most, log=False)
    least = min(point.low for point in points) / 1.2
    most *= 1.15
    height = (_BOTTOM - _TOP) / log10(most / least)
    return lambda value: _BOTTOM - log10(value / least) * height, ticks(least, most, log=True)


def _classes(series: Series, index: int, looks: dict[str, Style]) -> str:
    kind = "compiled" if series.compiled else "eager"
    return f"s{index} {kind}{' peer' if looks[series.recipe].peer else ''}"


def _drawn(series: Series, style: Style, across: Callable[[float], float], up: Callable[[float], float]) -> str:
    parts = []
    for piece in series.pieces:
        line = " ".join(f"{across(point.length):.1f},{up(point.value):.1f}" for point in piece)
        parts.append(f'<polyline points="{line}"/>')
        for point in piece:
            x, top, bottom = across(point.length), up(point.high), up(point.low)
            if bottom - top > 1:
                parts.append(f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>')
            parts.append(_mark(x, up(point.value), f'<path class="mark" d="{_SHAPES[style.marker]}"/>', point.row))
    for row in series.failed:
        cross = '<path class="mark cross" d="M-4,-4L4,4M-4,4L4,-4"/>'
        parts.append(_mark(across(row["length"]), _BOTTOM, cross, row))
    return "".join(parts)


def _mark(x: float, y: float, shape: str, row: Row) -> str:
    told = _told(row)
    circle = '<circle class="hit" r="9"/>'
    return f'<g transform="translate({x:.1f} {y:.1f})"><title>{told}</title>{shape}{circle}</g>'


def _told(row: Row) -> str:
    where = f"length {row['length']:,}, batch {row['batch_size']:,}, {COMPILES[row['compile']]}"
    return escape(f"{row['recipe']}\n{where}\n{outcome(row)}", quote=True)


def bars(panel: Panel, looks: dict[str, Style]) -> str:
    """A bar for each architecture, eager and compiled, where there is one length."""
    order = list(looks)
    most = max((point.high for series in panel.series for point in series.points), default=1)
    parts = ['<div class="bars">']
    for recipe in dict.fromkeys(series.recipe for series in panel.series):
        parts.append(f'<div class="s{order.index(recipe)}"><div class="name">{escape(recipe)}</div>')
        own = [series for series in panel.series if series.recipe == recipe]
        for series in sorted(own, key=lambda series: not series.compiled):
            classes = _classes(series, order.index(recipe), looks)
            parts += [_bar(point, most, classes) for point in series.points]
            parts += [_failed_bar(row, classes) for row in series.failed]
        parts.append("</div>")
    return "".join(parts) + "</div>"


def _bar(point: Point, most: float, classes: str) -> str:
    share, start, end = (100 * value / most for value in (point.value, point.low, point.high))
    fill = f'<span class="fill" style="width:{share:.2f}%"></span>'
    if end - start > 0.5:
        fill += f'<span class="range" style="left:{start:.2f}%;width:{end - start:.2f}%"></span>'
    told, kind = _told(point.row), COMPILES[point.row["compile"]]
    value = f'<span class="value">{digits(point.value)} {kind}</span>'
    return f'<div class="bar {classes}" title="{told}"><span class="track">{fill}</span>{value}</div>'


def _failed_bar(row: Row, classes: str) -> str:
    word = "failed" if row.get("error") else "skipped"
    value = f'<span class="value bad">{word} ({COMPILES[row["compile"]]})</span>'
    told = _told(row)
    return f'<div class="bar {classes}" title="{told}"><span class="track"></span>{value}</div>'


def swatch(style: Style, index: int) -> str:
    """A piece of the line of an architecture, for the legend."""
    classes = f"series s{index}{' peer' if style.peer else ''}"
    mark = f'<path class="mark" transform="translate(17 7)" d="{_SHAPES[style.marker]}"/>'
    line = f'<g class="{classes}"><polyline points="1,7 33,7"/>{mark}</g>'
    return f'<svg viewBox="0 0 34 14" aria-hidden="true">{line}</svg>'
