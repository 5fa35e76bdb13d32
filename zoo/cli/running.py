"""Measuring with progress, tables and files."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import typer
from rich.console import Console, RenderableType
from rich.markup import escape

from zoo.files import require_writable, write_whole

if TYPE_CHECKING:
    from zoo.results import Results, Row

__all__ = ["Announce", "Keep", "Run", "console", "measure_and_report"]

Announce = Callable[[str], None]
Keep = Callable[["Results"], None]
Run = Callable[[Announce, Keep], "Results"]


def measure_and_report(
    run: Run,
    kept: Path,
    *,
    outcome: Callable[["Row"], str],
    table: Callable[["Results", int], RenderableType],
    write: Callable[["Results"], list[Path]],
    failed: Callable[["Row"], bool] = lambda row: "error" in row,
) -> None:
    """Measure with progress on stderr; then a table on stdout, in a pipe the JSON as well, and files.

    Where there is no room to keep the results so far, measuring goes on, and they are kept the next time.

    Args:
        run: measures; it is given what shows a line, and what keeps the results so far.
        kept: the file that they are kept in as JSON.
        outcome: what became of a row, in a line.
        table: for the terminal, so many characters wide.
        write: makes the other files beside it.
        failed: whether a row lets the command fail.

    Raises:
        Exit: with status 130 after Ctrl-C, and 1 if a row failed or a file could not be written.
    """
    try:
        require_writable(kept.parent)
    except OSError as error:
        raise ValueError(f"--out: cannot write to {kept.parent}: {error.strerror or error}") from None
    progress = console(stderr=True)
    unwritten: list[str] = []
    seen: int | None = None  # rows

    def keep(results: "Results") -> None:
        nonlocal seen
        unwritten.clear()
        try:
            write_whole(kept, lambda path: path.write_text(json.dumps(results, indent=1) + "\n"))
        except OSError as error:
            unwritten.append(f"cannot write {kept}: {error.strerror or error}")
            progress.print(unwritten[0], highlight=False, markup=False)
        rows = results["rows"]
        if seen is not None and len(rows) > seen:
            progress.print(f"  {outcome(rows[-1])}", highlight=False, markup=False)
        seen = len(rows)

    begin = perf_counter()
    with progress.status("") as status:

        def announce(line: str) -> None:
            status.update(escape(line))
            progress.print(f"{_clock(perf_counter() - begin)} {line}", highlight=False, markup=False)

        results = run(announce, keep)
        status.update("plotting")
        files = [kept]
        try:
            files += write(results | {"unwritten": bool(unwritten)})
        except OSError as error:
            unwritten.append(f"cannot write the report: {error.strerror or error}")
    terminal = console()
    terminal.print(table(results, terminal.width))
    print("  ".join(map(str, files)))
    if not terminal.is_terminal:
        print(json.dumps(results))
    for line in unwritten:
        print(f"zoo: error: {line}", file=sys.stderr)
    if not results["complete"]:
        print(f"zoo: stopped, {len(results['missing'])} measurements are missing", file=sys.stderr)
        raise typer.Exit(130)
    if unwritten or any(failed(row) for row in results["rows"]):
        raise typer.Exit(1)


def _clock(seconds: float) -> str:
    """Minutes and seconds."""
    return "{}:{:02}".format(*divmod(int(seconds), 60))


def console(*, stderr: bool = False) -> Console:
    """The terminal, or a pipe."""
    result = Console(stderr=stderr)
    if not result.is_terminal:
        result.width = 400  # a pipe has no width: let no column be cut
    return result
