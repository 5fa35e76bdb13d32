"""The ``zoo`` command: one file for each of its commands."""

import os
import sys
from typing import Annotated

import typer

from zoo import __version__
from zoo.cli import bench, compare, generate, look

__all__ = ["main"]

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch loads: its profiler would log every start and stop

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Sequence-model architectures with swappable token mixers: list them, look into them, compare them, generate.",
)
app.command("list")(look.list_command)
app.command()(look.show)
app.command()(generate.generate)
app.command()(compare.compare)
app.command()(compare.report)
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _zoo(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, help="Show the version.", is_eager=True)
    ] = False,
) -> None:
    del version


def main() -> None:
    """Run the command; a mistake of the user's ends in one line and exit status 2."""
    sys.path.append(os.getcwd())  # a class path in YAML may name a module beside it, as with `python -m`
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"zoo: error: {error}", file=sys.stderr)
        sys.exit(2)
