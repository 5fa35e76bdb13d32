"""Results as one page that needs nothing else: no network, no fonts, and a script only to sort and for hints."""

import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from math import isfinite
from string import Template
from typing import Any

from zoo.compare.report import charts, listings, profiles
from zoo.compare.report.listings import tick_box
from zoo.compare.report.palette import KINDS, LAYERS, Style, styles
from zoo.compare.report.panels import groups
from zoo.compare.report.rows import (
    COMPILES,
    MODE_NAMES,
    Results,
    commit,
    failures,
    modes,
    title,
    tokens_per_step,
    warnings,
)
from zoo.compare.report.tables import digits

__all__ = ["page"]

_READING = (
    "<b>tokens/s</b>: the median over the timed steps, one right after the other. The whisker goes from the "
    "20th to the 80th percentile: a wide one says that the machine was busy, a narrow one does not say that it was "
    "idle.",
    "<b>compiled</b>: by torch.compile as one graph, or <b>block-compiled</b>, each block by itself. The charts show "
    "the faster of the two, solid; <b>eager</b> is pale and dashed. Grey: models of other libraries.",
    "<b>MFU</b>: the FLOPs that the architecture asks for (a multiply-add is two, causal attention counts what it "
    "sees, a training step is three forward passes), not those that its kernels happen to execute, over the GPU's "
    "dense peak in this dtype. N/A where that peak is not known.",
    "<b>compile cold</b>: the first compilation, with empty caches; <b>warm</b>: again, with what the first one left "
    "on disk; <b>first step</b>: the whole first step with these warm caches, and with whatever else happens once.",
    "<b>peak memory</b>: of tensors, that is parameters, optimiser state, activations and decoding state.",
    "<b>state of a row</b>: what decoding keeps between two tokens of one sequence of this length: keys and values "
    "of attention grow with the context, the state of the delta rule does not.",
    "<b>graphs, breaks, recompilations</b>: one graph and no break is what an architecture should compile to; "
    "recompilations are further graphs for further sizes, such as a batch of one row.",
)


def page(results: Results) -> str:
    """The whole page.

    Args:
        results: of a comparison.
    """
    looks, present = styles(results), modes(results)
    parts = {
        "heading": escape(_heading(results)),
        "subtitle": escape(title(results)),
        "style": _data("page.css"),
        "colours": _colours(looks),
        "warnings": _warnings(results),
        "facts": _facts(results),
        "reading": f'<details class="card reading" open><summary>How to read this</summary>{_list(_READING)}</details>',
        "choices": _choices(looks) if looks else "<p>Nothing was measured.</p>",
        "modes": "\n".join(_mode(results, mode, looks) for mode in present),
        "profiles": profiles.section(results),
        "rows": listings.every_row(results, looks),
        "version": escape(str(results.get("machine", {}).get("zoo") or "")),
        "json": _embedded(results),
        "script": _data("page.js"),
    }
    return Template(_data("page.html")).substitute(parts)


def _data(name: str) -> str:
    return files("zoo.compare.report").joinpath(name).read_text(encoding="utf-8")


def _heading(results: Results) -> str:
    rows = results["rows"]
    count = len({row["recipe"] for row in rows if not row.get("peer")})
    device = results.get("machine", {}).get("device") or "an unknown device"
    return f"{count} {'architecture' if count == 1 else 'architectures'} on {device}"


def _embedded(results: Results) -> str:
    """JSON that ends no script element, whatever it says; what is no number in JSON is null."""
    text = json.dumps(_finite(results), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _colours(looks: dict[str, Style]) -> str:
    """Variables of each colour, light and dark; and rules that hide what is unticked, without a script."""
    pairs = {f"s{index}": (style.light, style.dark) for index, style in enumerate(looks.values())}
    pairs |= {f"k-{kind}": pair for kind, pair in KINDS.items()}
    pairs |= {f"l-{index}": pair for index, pair in enumerate(LAYERS)}
    light, dark = ("\n".join(f".{name} {{ --c: {pair[side]}; }}" for name, pair in pairs.items()) for side in (0, 1))
    hidden = [f"body:has(#show-s{index}:not(:checked)) main .s{index}:not(.key *)" for index in range(len(looks))]
    hidden += [f"body:has(#show-{kind}:not(:checked)) main .{kind}" for kind in ("eager", "compiled")]
    hidden += [f"body:has(#row-{name}:not(:checked)) .row-{name}" for name in (*MODE_NAMES, *COMPILES)]
    rules = ",\n".join(hidden)
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{rules} {{ display: none; }}"


def _warnings(results: Results) -> str:
    told = "".join(f"<p>{escape(text)}</p>" for text in warnings(results))
    failed = [f"<b>{escape(what)}</b>: {escape(reason)}" for what, reason in failures(results)]
    if failed:
        told += f"<p>Failed or skipped:</p>{_list(failed)}"
    return f'<section class="card alarm" aria-label="Warnings">{told}</section>' if told else ""


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _facts(results: Results) -> str:
    machine, settings = results.get("machine", {}), results.get("settings", {})
    if not tokens_per_step(results):
        settings = {name: value for name, value in settings.items() if name != "tokens_per_step"}
    peak, product = machine.get("peak_tflops"), machine.get("matmul_tflops")
    known = {
        "Device": machine.get("device"),
        "Processor": f"{machine['cpu']}, {machine.get('cores')} cores" if machine.get("cpu") else None,
        "dtype": ", ".join(dict.fromkeys(row["dtype"] for row in results["rows"])),
        "Dense peak": f"{peak:,.0f} TFLOP/s" if peak else "N/A",
        "A large product, measured": f"{digits(product)} TFLOP/s" if product else None,
        "Driver": machine.get("driver"),
        "CUDA": machine.get("cuda"),
        "torch": machine.get("torch"),
        "Triton": machine.get("triton"),
        "Python": machine.get("python"),
        "mixer-zoo": machine.get("zoo"),
        "Commit": commit(machine),
        **{f"Peer: {name}": version or "not installed" for name, version in (machine.get("peers") or {}).items()},
        **{name.replace("_", " ").capitalize(): _setting(value) for name, value in settings.items()},
    }
    items = [
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in known.items() if value
    ]
    return f'<dl class="card facts">{"".join(items)}</dl>'


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _choices(looks: dict[str, Style]) -> str:
    labels = [
        f'<label class="key"><input type="checkbox" id="show-s{index}" checked>{charts.swatch(style, index)}'
        f"<span>{escape(recipe)}</span></label>"
        for index, (recipe, style) in enumerate(looks.items())
    ]
    kinds = [tick_box(f"show-{kind}", kind) for kind in ("compiled", "eager")]
    named = ("Architectures, in the charts and the tables", labels), ("In the charts", kinds)
    sets = (f'<fieldset class="choices"><legend>{name}</legend>{"".join(boxes)}</fieldset>' for name, boxes in named)
    return f'<div class="card">{"".join(sets)}</div>'


def _mode(results: Results, mode: str, looks: dict[str, Style]) -> str:
    parts = [f'<section id="{mode}"><h2>{escape(MODE_NAMES[mode])}</h2>']
    for group in groups(results, mode):
        if group.name:
            parts.append(f"<h3>{escape(group.name.capitalize())}</h3>")
        parts.append('<div class="charts">')
        single = len(group.lengths) == 1
        for panel in group.panels:
            scale = f", at length {group.lengths[0]:,}" if single else ", logarithmic" if panel.log else ""
            drawn = charts.bars(panel, looks) if single else charts.chart(panel, group, looks)
            caption = f"<figcaption>{escape(panel.title)}<span>{scale}</span></figcaption>"
            parts.append(f"<figure>{caption}{drawn}</figure>")
        parts.append("</div>")
    return "\n".join(parts) + listings.beside(results, mode, looks) + "</section>"
