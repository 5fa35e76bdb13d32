"""Measuring with progress, tables and files."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from zoo.files import require_writable, write_whole

if TYPE_CHECKING:
    from zoo.results import Results, Row

__all__ = ["console", "run_and_report"]


def run_and_report(
    plan: Any,
    run_plan: Callable[..., "Results"],
    report: ModuleType,
    outcome: Callable[["Row"], str],
    files: tuple[Path, Path, Path],
) -> "Results":
    """Measure with progress on stderr; table and JSON on stdout; JSON, Markdown and a plot as files of one folder."""
    kept, table, plot = files
    try:
        require_writable(kept.parent)
    except OSError as error:
        raise ValueError(f"--out: cannot write to {kept.parent}: {error.strerror or error}") from None
    progress, cells = console(stderr=True), plan.cells()
    with progress.status("") as status:

        def announce(number: int, cell: object) -> None:
            line = f"[{number}/{len(cells)}] {cell}"
            status.update(escape(line))
            if not progress.is_terminal:
                progress.print(line, highlight=False, markup=False)

        def keep(results: "Results") -> None:
            write_whole(kept, lambda path: path.write_text(json.dumps(results, indent=1) + "\n"))
            if results["complete"]:
                return
            rows = results["rows"]
            progress.print(f"  {cells[len(rows) - 1]}: {outcome(rows[-1])}", highlight=False, markup=False)

        for stale in (table, plot):
            stale.unlink(missing_ok=True)
        results = run_plan(plan, announce, keep)
        status.update("plotting")
        write_whole(table, lambda path: path.write_text(report.markdown(results)))
        write_whole(plot, lambda path: report.plot(results, path))
    shown = console()
    shown.print(report.table(results, shown.width))
    print("  ".join(map(str, files)))
    print(json.dumps(results))
    return results


def console(*, stderr: bool = False) -> Console:
    """The terminal, or a pipe."""
    result = Console(stderr=stderr)
    if not result.is_terminal:
        result.width = 200  # a pipe has no width: let no column be cut
    return result
