"""Tables of the page: eager beside compiled, and every row with all its figures."""

from html import escape

from zoo.compare.report.palette import Style
from zoo.compare.report.rows import (
    COMPILES,
    MODE_NAMES,
    Results,
    Row,
    conditions,
    footnotes,
    measured,
    modes,
    outcome,
    ranked,
    state_of_row,
)
from zoo.compare.report.rows import lines as lines_of
from zoo.compare.report.tables import number, side_by_side, unit

__all__ = ["beside", "every_row", "tick_box"]

_BESIDE = ("recipe", "dtype", "length", "batch", "eager tok/s", "compiled tok/s", "blocks tok/s", "speedup", "x peer")
_TASK = ("dtype", "length", "batch")
_WORDS = ("recipe", "mode", "dtype", "compile")  # sorted as text
_PLACE = ("mode", "length", "batch", "dtype", "compile")  # what failed rows have too

# As it sorts, and as it is shown.
Cell = tuple[object, str]


def beside(results: Results, mode: str, looks: dict[str, Style]) -> str:
    """Throughput of each architecture in one mode: eager, compiled, and over the peers."""
    own = results | {"rows": [row for row in results["rows"] if row["mode"] == mode]}
    heads, lines, _ = side_by_side(own, lambda text: f"\0{text}")
    shown = [index for index, name in enumerate(heads) if name in _BESIDE]
    order, body, place = list(looks), [], shown[1 : 1 + sum(heads[index] in _TASK for index in shown)]
    names = [line.recipe for line in lines_of(own)]
    for name, line, last in zip(names, lines, [None, *lines], strict=False):
        first = " first" if last and any(line[index] != last[index] for index in place) else ""
        cells = "".join(f"<td>{_marked(line[index])}</td>" for index in shown[1:])
        body.append(f'<tr class="s{order.index(name)}{first}"><th scope="row">{escape(line[0])}</th>{cells}</tr>')
    table = _table(f"Side by side: {mode}", "beside", [_head(heads[index]) for index in shown], body)
    return table + _notes(own)


def _notes(results: Results) -> str:
    return "".join(f'<p class="soft">{escape(text)}</p>' for text in footnotes(results))


def _marked(text: str) -> str:
    safe = escape(text.removeprefix("\0"))
    return f"<strong>{safe}</strong>" if text.startswith("\0") else safe


def _table(label: str, kind: str, heads: list[str], body: list[str]) -> str:
    table = f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="scroll tall {kind}" tabindex="0" role="region" aria-label="{label}">{table}</div>'


def _head(name: str) -> str:
    words = ' class="word" data-words' if name in _WORDS else ""
    return f'<th scope="col"{words}>{escape(name)}</th>'


def every_row(results: Results, looks: dict[str, Style]) -> str:
    """A section with the table that can be sorted, failed rows last, and what it can be filtered by."""
    rows = sorted(ranked(results), key=lambda row: not measured(row))
    if not rows:
        return ""
    peak, state = unit([row.get("peak_bytes") for row in rows]), unit(list(map(state_of_row, rows)))
    table = [_cells(row, peak, state) for row in rows]
    # Tokens/s stay: there a failed row says why.
    heads = [name for name in table[0] if name == "tokens/s" or any(cells[name][1] != "-" for cells in table)]
    order = list(looks)
    body = [_row(row, cells, heads, order.index(row["recipe"])) for row, cells in zip(rows, table, strict=True)]
    boxes = [tick_box(f"row-{mode}", mode) for mode in modes(results)]
    boxes += [tick_box(f"row-{how}", name) for how, name in COMPILES.items() if any(r["compile"] == how for r in rows)]
    choices = f'<fieldset class="choices"><legend>In this table</legend>{"".join(boxes)}</fieldset>'
    listing = _table("All rows", "sortable", list(map(_head, heads)), body)
    return f'<section id="rows"><h2>All rows</h2>{choices}{listing}{_notes(results)}</section>'


def _cells(row: Row, peak: tuple[str, float], state: tuple[str, float]) -> dict[str, Cell]:
    def of(key: str, form: str, factor: float = 1) -> Cell:
        value = row.get(key)
        return value, number(value, form, factor)

    rate = "{:,.0f}" if (row.get("tokens_per_s") or 0) >= 100 else "{:.3g}"
    mfu = (row.get("mfu"), "N/A" if measured(row) and row["mode"] != "decode" else "-")
    return {
        "recipe": of("recipe", "{}"),
        "mode": (list(MODE_NAMES).index(row["mode"]), row["mode"]),
        "length": of("length", "{}"),
        "batch": of("batch_size", "{}"),
        "dtype": of("dtype", "{}"),
        "compile": (row["compile"], COMPILES[row["compile"]]),
        "tokens/s": of("tokens_per_s", rate),
        "p20": of("tokens_per_s_p20", rate),
        "p80": of("tokens_per_s_p80", rate),
        "step ms": of("step_ms", "{:,.4g}" if (row.get("step_ms") or 0) < 1000 else "{:,.0f}"),
        "MFU": mfu if row.get("mfu") is None else of("mfu", "{:.1%}"),
        f"peak {peak[0]}": of("peak_bytes", "{:,.2f}", peak[1]),
        f"state of a row, {state[0]}": (state_of_row(row), number(state_of_row(row), "{:,.4g}", state[1])),
        "compile cold s": of("compile_cold_s", "{:.1f}"),
        "compile warm s": of("compile_warm_s", "{:.1f}"),
        "first step s": of("first_step_s", "{:.2f}"),
        "graphs": of("graphs", "{}"),
        "breaks": of("graph_breaks", "{}"),
        "recompilations": of("recompilations", "{}"),
        "params": of("params", "{:.2f}M", 1e-6),
        "MFLOP/token": of("flops_per_token", "{:,.1f}", 1e-6),
        "loss": of("loss", "{:.3f}"),
    }


def _row(row: Row, cells: dict[str, Cell], heads: list[str], index: int) -> str:
    failed = not measured(row)
    shown = [name for name in heads[1:] if not failed or name in _PLACE]
    parts = [_cell(name, *cells[name]) for name in shown]
    if failed:
        parts.append(f'<td class="reason bad" colspan="{len(heads) - 1 - len(shown)}">{escape(outcome(row))}</td>')
    name = escape(row["recipe"], quote=True)
    classes = f"s{index} row-{row['mode']} row-{row['compile']}"
    mark = f' <span title="{escape(conditions(row), quote=True)}">†</span>' if conditions(row) else ""
    head = f'<th scope="row" data-value="{name}">{name}{mark}</th>'
    return f'<tr class="{classes}"{" data-failed" if failed else ""}>{head}{"".join(parts)}</tr>'


def _cell(name: str, value: object, shown: str) -> str:
    words = ' class="word"' if name in _WORDS else ""
    sorts = "" if value is None else escape(str(value), quote=True)
    return f'<td{words} data-value="{sorts}">{escape(shown)}</td>'


def tick_box(name: str, text: str) -> str:
    """A ticked box; the style hides what belongs to it when the tick is taken away."""
    return f'<label><input type="checkbox" id="{name}" checked>{escape(text)}</label>'
