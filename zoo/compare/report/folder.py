"""The report as files of one folder."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from zoo.compare.report.figures import plots, save
from zoo.compare.report.rows import MODES, Results
from zoo.compare.report.tables import csv, markdown
from zoo.compare.report.webpage import page
from zoo.files import write_whole

__all__ = ["write"]

_TEXTS: dict[str, Callable[[Results], str]] = {"table.md": markdown, "results.csv": csv, "report.html": page}


def write(results: Results, folder: Path) -> list[Path]:
    """Write table.md, results.csv, report.html, and a PNG and an SVG of each plot, each whole or not at all.

    Plots of an earlier report there whose modes are not in this one go.

    Args:
        results: of a comparison.
        folder: that exists.

    Returns:
        The paths of what was written.
    """
    paths = []
    for name, make in _TEXTS.items():
        text = make(results)
        write_whole(folder / name, partial(_write_text, text))
        paths.append(folder / name)
    figures = plots(results)
    for mode in MODES:
        for ending, options in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
            path = folder / f"{mode}.{ending}"
            if mode in figures:
                write_whole(path, save(figures[mode], **options))
                paths.append(path)
            else:
                path.unlink(missing_ok=True)
    return paths


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
