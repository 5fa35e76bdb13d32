"""Where the time of a step goes, for the page: by kind of work, and layer by layer."""

from html import escape
from urllib.parse import quote

from zoo.compare.report.palette import KINDS, LAYERS
from zoo.compare.report.rows import COMPILES, Results, Row, on_gpu, ranked
from zoo.compare.report.tables import digits

__all__ = ["section"]


def section(results: Results) -> str:
    """Stacked bars of every row that was profiled; empty where none was."""
    rows = [row for row in ranked(results) if row.get("profile")]
    if not rows:
        return ""
    used = {kind for row in rows for kind in row["profile"].get("kinds_ms") or {}}
    kinds = [kind for kind in KINDS if kind in used]
    keys = "".join(f'<li class="k-{kind}"><i></i>{escape(kind)}</li>' for kind in kinds)
    gpu = on_gpu(results.get("machine", {}))
    told = "GPU time of one step by kind of kernel" if gpu else "Time of the thread that steps, by kind of work"
    places = ("in kernels" if gpu else "of that thread"), *_distinct(rows)
    parts = "".join(_profile(row, *places) for row in rows)
    return (
        '<section id="profiles"><h2>Where the time goes</h2>'
        f"<p>{told}, and below it by layer; the layers' colours are of their mixers. Each is the mean of a few steps, "
        "which ran apart from the measured ones, with the profiler on.</p>"
        f'<ul class="kinds">{keys}</ul><div class="profiles">{parts}</div></section>'
    )


def _distinct(rows: list[Row]) -> tuple[bool, bool]:
    """Whether batch sizes and dtypes differ, which titles then say."""
    return len({row["batch_size"] for row in rows}) > 1, len({row["dtype"] for row in rows}) > 1


def _profile(row: Row, place: str, batches: bool, dtypes: bool) -> str:
    profile = row["profile"]
    kinds = profile.get("kinds_ms") or {}
    total = profile.get("total_ms") or sum(kinds.values())
    task = [row["recipe"], row["mode"], f"length {row['length']:,}"]
    task += [f"batch {row['batch_size']:,}"] * batches + [row["dtype"]] * dtypes + [COMPILES[row["compile"]]]
    trace = profile.get("trace")
    link = f' <a href="{escape(quote(trace), quote=True)}" download>trace</a>' if trace else ""
    told = [f"{digits(total)} ms {place}"]
    if row.get("step_ms"):
        told.append(f"the measured step took {digits(row['step_ms'])} ms")
    if profile.get("unattributed_ms") is not None and total:
        told.append(f"{profile['unattributed_ms'] / total:.0%} unattributed (part of other)")
    head = f'<h3>{escape(", ".join(task))}</h3><p class="soft">{"; ".join(told)}.{link}</p>'
    return f"<div>{head}{_stack(kinds)}{_layers(profile.get('layers_ms') or [])}</div>"


def _stack(kinds: dict[str, float]) -> str:
    whole = sum(kinds.values()) or 1
    parts, words = [], []
    for kind in sorted(kinds, key=_place):
        share = kinds[kind] / whole
        told = escape(f"{kind}: {digits(kinds[kind])} ms, {share:.1%}", quote=True)
        colour = kind if kind in KINDS else "other"
        parts.append(f'<span class="k-{colour}" style="flex:{share:.4f} 0 0" title="{told}"></span>')
        words.append(f"{escape(kind)} {share:.0%}")
    return f'<div class="stack" aria-hidden="true">{"".join(parts)}</div><p class="soft">{", ".join(words)}</p>'


def _place(kind: str) -> int:
    return list(KINDS).index(kind) if kind in KINDS else len(KINDS)


def _layers(layers: list[dict[str, object]]) -> str:
    if not layers:
        return ""
    times = [float(str(layer["ms"])) for layer in layers]
    most = max(times) or 1
    kinds = list(dict.fromkeys(str(layer["kind"]) for layer in layers))
    parts = []
    for layer, time in zip(layers, times, strict=True):
        told = escape(f"layer {layer['layer']}, {layer['kind']}: {digits(time)} ms", quote=True)
        colour = f"l-{kinds.index(str(layer['kind'])) % len(LAYERS)}"
        height = f"height:{100 * time / most:.1f}%"
        parts.append(f'<span class="{colour}" style="{height}" title="{told}"></span>')
    keys = "".join(f'<li class="l-{n % len(LAYERS)}"><i></i>{escape(kind)}</li>' for n, kind in enumerate(kinds))
    words = (f"layer {layers[0]['layer']}", f"tallest {digits(most)} ms", f"layer {layers[-1]['layer']}")
    ends = "".join(f"<span>{escape(word)}</span>" for word in words)
    return f'<ul class="kinds">{keys}</ul><div class="layers">{"".join(parts)}</div><div class="ends">{ends}</div>'
