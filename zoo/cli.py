"""The ``zoo`` command."""

import json
import os
import sys
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zoo import __version__

if TYPE_CHECKING:
    from zoo.compare.plan import Cell, Plan

__all__ = ["main"]

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch loads: its profiler would log every start and stop

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Sequence-model architectures with swappable token mixers: list them, look into them, compare them.",
)


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


_DTYPES = ("float32", "bfloat16", "float16")

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes, in order, e.g. dim=512 layers.3.mixer=full_attention"),
]


@app.command("list")
def list_command(
    pattern: Annotated[str, typer.Argument(help="Names to show, with the wildcards * ? [ ].")] = "*",
    kind: Annotated[str | None, typer.Option(help="mixer, block, norm, mlp, feature_map or recipe.")] = None,
) -> None:
    """List the components and recipes."""
    from rich.table import Column, Table

    from zoo import recipes, registry

    names = registry.list_names(pattern, kind)
    if not names:
        raise ValueError(f"nothing is called {pattern!r}; zoo list shows everything")
    rows = [(e.kind, e.name, e.summary, e.paper or "", ", ".join(e.supports)) for e in registry.entries(kind)]
    if kind in (None, "recipe"):
        rows += [("recipe", name, recipes.summary(name), "", "") for name in recipes.names()]
    table = Table("kind", Column("name", no_wrap=True), "summary", "paper", "supports")
    for _, group in groupby((row for row in rows if row[1] in names), key=itemgetter(0)):
        for row in group:
            table.add_row(*row)
        table.add_section()
    _console().print(table)


@app.command()
def show(
    recipe: Annotated[str, typer.Argument(help="A recipe or the path of a YAML file.")],
    overrides: Overrides = None,
) -> None:
    """Print the resolved configuration as YAML, which builds the same model again."""
    from zoo.config import resolve

    config = resolve(recipe, overrides or ())
    print(f"# {config.num_params:,} parameters")
    print(f"# {config.flops_per_token(2048) / 1e6:,.1f} MFLOPs a token, forward, at 2048 tokens")
    print(f"# {config.state_bytes(2048):,} bytes of decoding state for 2048 tokens, in bf16")
    print(config.to_yaml(), end="")


@app.command()
def compare(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE",
            help="Recipes or paths of YAML files. Default: every recipe, tiny on a CPU, 340m on CUDA.",
        ),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Sequence lengths, e.g. 512,2k. Default: 1024 on a CPU, 2048 on CUDA.")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="train or forward. Default: both.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.json, table.md and plot.png.")] = Path(
        "results/compare"
    ),
    text: Annotated[
        Path | None, typer.Option(help="Text to learn from, as bytes. Default: the Python standard library's sources.")
    ] = None,
    tokens_per_step: Annotated[
        int | None,
        typer.Option(
            help="Tokens of each step, rounded down to whole sequences. Default: 2048 on a CPU, 32768 on CUDA."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each cell.")] = 10,
    warmup: Annotated[int, typer.Option(help="Untimed steps before them.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the initialisation.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda when there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: float32 on a CPU, bfloat16 on CUDA.")
    ] = None,
) -> None:
    """Train and run several architectures on real text, eager and compiled, and compare them.

    Each architecture at each length makes training steps (forward, loss, backward, AdamW) and forward passes.
    Shows a table, writes results.json, table.md and plot.png, and prints one JSON object as the last line.
    """
    import torch

    from zoo.compare.plan import MODES, make_plan
    from zoo.files import require_writable

    plan = make_plan(
        sources or [],
        modes=MODES if mode is None else (_choice("--mode", mode, {name: name for name in MODES}),),
        lengths=None if lengths is None else _lengths(lengths),
        tokens_per_step=tokens_per_step,
        warmup=warmup,
        steps=steps,
        seed=seed,
        device=device,
        dtype=None if dtype is None else _choice("--dtype", dtype, {name: getattr(torch, name) for name in _DTYPES}),
        text=text,
    )
    try:
        require_writable(out)
    except OSError as error:
        raise ValueError(f"--out: cannot write to {out}: {error.strerror or error}") from None
    results = _run(plan, out)
    if any("error" in row for row in results["rows"]):
        raise typer.Exit(1)


def _run(plan: "Plan", out: Path) -> dict[str, Any]:
    """Measure with progress on stderr; table and JSON on stdout; files in ``out``."""
    from rich.markup import escape

    from zoo.compare import report
    from zoo.compare.run import run_plan
    from zoo.files import write_whole

    progress, cells = _console(stderr=True), plan.cells()
    with progress.status("") as status:

        def announce(number: int, cell: "Cell") -> None:
            line = f"[{number}/{len(cells)}] {cell}"
            status.update(escape(line))
            if not progress.is_terminal:
                progress.print(line, highlight=False, markup=False)

        def keep(results: dict[str, Any]) -> None:
            write_whole(out / "results.json", lambda path: path.write_text(json.dumps(results, indent=1) + "\n"))
            if results["complete"]:
                return
            row = results["rows"][-1]
            outcome = row.get("error") or f"{row['tokens_per_s']:,.0f} tokens/s"
            compiled = f" (compiled in {row['compile_s']:.1f} s)" if row.get("compile_s") else ""
            progress.print(f"  {cells[len(results['rows']) - 1]}: {outcome}{compiled}", highlight=False, markup=False)

        for stale in ("table.md", "plot.png"):
            (out / stale).unlink(missing_ok=True)
        results = run_plan(plan, announce, keep)
        status.update("plotting")
        write_whole(out / "table.md", lambda path: path.write_text(report.markdown(results)))
        write_whole(out / "plot.png", lambda path: report.plot(results, path))
    console = _console()
    console.print(report.table(results, console.width))
    print(f"{out / 'results.json'}  {out / 'table.md'}  {out / 'plot.png'}")
    print(json.dumps(results))
    return results


def _lengths(text: str) -> tuple[int, ...]:
    found = []
    for part in text.split(","):
        digits, thousand = (part.strip().lower().removesuffix("k"), part.strip().lower().endswith("k"))
        if not digits.isdecimal() or int(digits) < 1:
            raise ValueError(f"--lengths: got {part!r}, allowed: numbers of tokens, such as 512,2k")
        found.append(int(digits) * (1024 if thousand else 1))
    return tuple(dict.fromkeys(found))


def _choice(option: str, name: str, choices: dict[str, Any]) -> Any:
    if name not in choices:
        raise ValueError(f"{option}: got {name!r}, allowed: {', '.join(choices)}")
    return choices[name]


def _console(*, stderr: bool = False) -> Any:
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = 200  # a pipe has no width: let no column be cut
    return console


def main() -> None:
    """Run the command; a mistake of the user's ends in one line and exit status 2."""
    sys.path.append(os.getcwd())  # a class path in YAML may name a module beside it, as with `python -m`
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"zoo: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
