"""Tables of text, for the terminal and as Markdown: a line of headings, then lines of cells."""

from collections.abc import Collection, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

__all__ = ["fitted", "markdown_table", "short", "table"]

Lines = Sequence[Sequence[str]]


def table(lines: Lines, *, left: Collection[str] = (), wrapped: Collection[str] = ()) -> Table:
    """One table for the terminal.

    Args:
        lines: the first one holds the headings.
        left: headings of columns of words; numbers stand to the right.
        wrapped: of columns that may be broken into several lines.
    """
    result = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in lines[0]:
        result.add_column(name, justify="left" if name in left else "right", no_wrap=name not in wrapped)
    for line in lines[1:]:
        result.add_row(*line)
    return result


def fitted(lines: Lines, first: int, width: int, *, left: Collection[str] = ()) -> list[Table]:
    """One table, or several with the first columns in each where so many characters do not hold all others."""
    tables = []
    for count in range(len(lines[0]) - first, 0, -1):
        starts = range(first, len(lines[0]), count)
        tables = [table([(*line[:first], *line[at : at + count]) for line in lines], left=left) for at in starts]
        if all(Console(width=10_000).measure(part).maximum <= width for part in tables):
            break
    return tables


def markdown_table(lines: Lines, *, left: Collection[str] = ()) -> str:
    """The same in Markdown, without a line break at the end."""
    heads, *cells = lines
    rule = ["---" if head in left else "---:" for head in heads]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, rule, *cells))


def short(length: int) -> str:
    """2k for 2048."""
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length}"
