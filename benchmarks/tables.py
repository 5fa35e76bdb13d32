"""The tables of README.md and benchmarks/README.md, made from the committed results.

    python benchmarks/tables.py            # writes them anew
    python benchmarks/tables.py --check    # exit status 1 if one differs

A table stands between two comments: the first names its kind and its files, which may not differ in how they were
measured.

    <!-- throughput: compare_340m_h200.json -->
    <!-- end -->
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from zoo.compare.merge import merge
from zoo.compare.report.rows import Line, Row, lines

FOLDER = Path(__file__).parent
PAGES = (FOLDER.parent / "README.md", FOLDER / "README.md")
BLOCK = re.compile(r"(<!-- (?P<kind>\w+): (?P<files>[\w. -]+?) -->\n)(?P<table>.*?)(<!-- end -->)", re.DOTALL)

Results = dict[str, Any]


def throughput(results: Results) -> Iterable[list[str]]:
    """Training steps at one length: how fast, what they take, what compiling takes; peers below what they are like."""
    yield ["architecture", "tokens/s", "over eager", "over the peer", "MFU", "peak GiB", "compile s, cold / warm",
           "graphs", "breaks", "parameters"]  # fmt: skip
    for line in _one_each(lines(results), "recipe"):
        best, compiled = line.fastest, line.compiled
        if best is None:
            yield [line.recipe, "failed", *["-"] * 8]
            continue
        yield [
            line.recipe,
            f"{best['tokens_per_s']:,.0f}",
            "-" if line.speedup is None else f"{line.speedup:.2f}x",
            " ".join(f"{ratio:.2f}x" for ratio in line.ratios.values()) or "-",
            _share(best.get("mfu")),
            f"{best['peak_bytes'] / 2**30:.1f}",
            _seconds(compiled),
            *("-" if compiled is None else f"{compiled[key]}" for key in ("graphs", "graph_breaks")),
            f"{best['params'] / 1e6:.0f}M",
        ]


def lengths(results: Results) -> Iterable[list[str]]:
    """Thousand tokens a second and MFU over the lengths, of the fastest of eager and compiled."""
    return _by_length(results, lambda row: f"{row['tokens_per_s'] / 1e3:.1f}K, {_share(row.get('mfu'))}")


def steps(results: Results) -> Iterable[list[str]]:
    """Milliseconds of a step of decoding over the contexts, of one row."""
    one = results | {"rows": [row for row in results["rows"] if row["batch_size"] == 1]}
    return _by_length(one, lambda row: f"{row['step_ms']:.3g}")


def kernels(results: Results) -> Iterable[list[str]]:
    """Ours: forward, and forward and backward."""
    yield ["kernel", "T", "H", "D", "ms", "of it the floor", "over the fastest peer"]
    for row in results["rows"]:
        if row.get("role") != "ours" or row["side"] != "triton" or "forward_ms" not in row:
            continue
        parts = [step for step in ("forward", "forward_backward") if row.get(f"{step}_ms")]
        over = [row.get(f"{step}_speedup") for step in parts]
        yield [
            row["kernel"],
            *(f"{row[key]}" for key in ("length", "num_heads", "head_dim")),
            " / ".join(f"{row[f'{step}_ms']['median']:.3g}" for step in parts),
            " / ".join(f"{row[f'{step}_share']:.0%}" for step in parts),
            " / ".join("-" if ratio is None else f"{ratio:.2f}x" for ratio in over),
        ]


def _by_length(results: Results, show: Callable[[Row], str]) -> Iterable[list[str]]:
    known: dict[str, dict[int, Line]] = {}
    for line in _one_each(lines(results), "recipe", "length"):
        known.setdefault(line.recipe, {})[line.length] = line
    all_lengths = sorted({length for found in known.values() for length in found})
    yield ["architecture", *(f"T {length}" for length in all_lengths)]
    for recipe, found in known.items():
        rows = [found[length].fastest if length in found else None for length in all_lengths]
        yield [recipe, *("-" if row is None else show(row) for row in rows)]


def _one_each(found: list[Line], *keys: str) -> list[Line]:
    """The lines.

    Raises:
        ValueError: two of them would stand in one place of the table.
    """
    places = [tuple(getattr(line, key) for key in keys) for line in found]
    if twice := next((place for place in places if places.count(place) > 1), None):
        raise ValueError(f"{', '.join(map(str, twice))}: measured several times, by mode, dtype, length or batch")
    return found


def _share(value: float | None) -> str:
    return "N/A" if value is None else f"{value:.1%}"


def _seconds(row: Row | None) -> str:
    times = [None if row is None else row.get(f"compile_{kind}_s") for kind in ("cold", "warm")]
    return " / ".join("-" if seconds is None else f"{seconds:.0f}" for seconds in times)


KINDS: dict[str, Callable[[Results], Iterable[list[str]]]] = {
    kind.__name__: kind for kind in (throughput, lengths, steps, kernels)
}


def table(kind: str, files: list[str], folder: str) -> str:
    """The Markdown of a table, and above it what it was measured on."""
    runs = [json.loads((FOLDER / file).read_text()) for file in files]
    results = runs[0] if len(runs) == 1 else merge(runs, mixed=False)
    head, *body = KINDS[kind](results)
    machine = results["machine"]
    words = [machine["device"], f"torch {machine['torch']}", results["rows"][0].get("dtype")]
    links = [f"[{file}]({folder}{file})" for file in files]
    rule = ["---" if name in ("architecture", "kernel") else "---:" for name in head]
    rows = "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *body))
    return f"{', '.join(filter(None, words + links))}:\n\n{rows}\n"


def made(page: Path) -> str:
    """The page with its tables as the results have them."""
    folder = "" if page.parent == FOLDER else "benchmarks/"

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{table(match['kind'], match['files'].split(), folder)}\n{match[5]}"

    return BLOCK.sub(fill, page.read_text())


def main() -> None:
    """Write or check."""
    parser = argparse.ArgumentParser(description="Make the tables of the pages from the committed results.")
    parser.add_argument("--check", action="store_true", help="only say which page differs; exit status 1 if one does")
    check = parser.parse_args().check
    stale = [page for page in PAGES if made(page) != page.read_text()]
    for page in stale:
        print(f"{page.name}: its tables are not those of the results" if check else f"{page}: written")
        if not check:
            page.write_text(made(page))
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
