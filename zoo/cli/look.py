"""``zoo list`` and ``zoo show``."""

from itertools import groupby
from operator import itemgetter
from typing import Annotated

import typer

from zoo.cli.options import Overrides
from zoo.cli.running import console


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
    console().print(table)


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
