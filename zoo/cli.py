"""The ``zoo`` command."""

import json
import os
import sys
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import typer

from zoo import __version__

Value = TypeVar("Value")
Results = dict[str, Any]
Row = dict[str, Any]

__all__ = ["main"]

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch loads: its profiler would log every start and stop

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Sequence-model architectures with swappable token mixers: list them, look into them, compare them, generate.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


bench = typer.Typer(no_args_is_help=True, help="Measure kernels side by side.")
app.add_typer(bench, name="bench")


@app.callback()
def _zoo(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, help="Show the version.", is_eager=True)
    ] = False,
) -> None:
    del version


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes, in order, e.g. dim=512 layers.3.mixer=full_attention"),
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda when there is one.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16. Default: float32 on a CPU, bfloat16 on CUDA.")
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
def generate(
    folder: Annotated[Path, typer.Argument(help="A model that zoo.save wrote.")],
    prompt: Annotated[
        str | None,
        typer.Option(help="Text to go on from. Token ids, e.g. 1,2,3, if the vocabulary is not the 256 bytes."),
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file that holds it.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to add.")] = 128,
    temperature: Annotated[float, typer.Option(help="Below 1 likely tokens gain; 0 takes the likeliest always.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many of the likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the fewest likely tokens that have this probability together.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the drawing. Default: another each time.")] = None,
    stop: Annotated[
        int | None, typer.Option(help="Id of a token to stop at, e.g. 10, the byte that ends a line.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile the step. Default: on CUDA.")
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Import the classes that the folder's configuration names by a path.")
    ] = False,
) -> None:
    """Go on from a prompt with a saved model, and print each token when it is there.

    The speed stands on stderr: of everything, the prompt's pass and the compilation too.
    """
    import torch

    from zoo import machine
    from zoo.checkpoint import load
    from zoo.prompt import read, stream

    where, chosen, text = machine.find(device), _dtype(dtype), read(prompt, prompt_file)
    model = load(folder, device=where, trust_code=trust_code)
    model.to(chosen or (torch.bfloat16 if where.type == "cuda" else torch.float32))
    drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    stream(model, text, max_new_tokens, stop_token=stop, compile=compile, **drawing)


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
        str | None,
        typer.Option(
            help="Sequence lengths, e.g. 512,2k; of decode, the context's. Default: 1024 on a CPU, 2048 on CUDA; "
            "of prefill and decode 256,1024 on a CPU, 1k,8k,32k on CUDA."
        ),
    ] = None,
    mode: Annotated[
        str, typer.Option(help="Of train, forward, or of prefill (a prompt), decode (a token of each row).")
    ] = "train,forward",
    batch: Annotated[
        str | None,
        typer.Option(help="Rows of prefill and decode, e.g. 1,8. Default: 1,8 on a CPU, 1,8,64 on CUDA."),
    ] = None,
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
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Train and run several architectures on real text, eager and compiled, and compare them.

    Each architecture at each length makes training steps (forward, loss, backward, AdamW) and forward passes; or, to
    decode, passes over prompts, and single tokens after as many tokens.
    Shows a table, writes results.json, table.md and plot.png, and prints one JSON object as the last line.
    """
    from zoo.compare import report
    from zoo.compare.plan import MODES, make_plan
    from zoo.compare.run import run_plan

    plan = make_plan(
        sources or [],
        modes=tuple(_choice("--mode", name, {name: name for name in MODES}) for name in mode.split(",")),
        lengths=None if lengths is None else _lengths(lengths),
        batch_sizes=None if batch is None else _listed(batch, _batch_size),
        tokens_per_step=tokens_per_step,
        warmup=warmup,
        steps=steps,
        seed=seed,
        device=device,
        dtype=_dtype(dtype),
        text=text,
    )

    def outcome(row: Row) -> str:
        compiled = f" (compiled in {row['compile_s']:.1f} s)" if row.get("compile_s") else ""
        return (row.get("error") or row.get("skipped") or f"{row['tokens_per_s']:,.0f} tokens/s") + compiled

    files = (out / "results.json", out / "table.md", out / "plot.png")
    results = _run(plan, run_plan, report, outcome, files)
    if any("error" in row for row in results["rows"]):
        raise typer.Exit(1)


@bench.command()
def attention(
    backends: Annotated[
        str | None,
        typer.Option(
            help="In order: auto (the library's choice), sdpa (PyTorch's choice), cudnn and sdpa-flash (PyTorch's two "
            "kernels, full and dense only), flash, flex, xformers, triton. Default: all."
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="Sequence lengths, e.g. 512,2k. Default: 256,512 on a CPU, 512,1k,4k,16k,32k on CUDA."),
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(
            help="Visible keys, or full; one as long as a sequence is left out there. "
            "Default: full,64 on a CPU, full,256,1024,4096 on CUDA."
        ),
    ] = None,
    head_dims: Annotated[
        str | None, typer.Option(help="Sizes of a head, e.g. 64,128. Default: 32 on a CPU, 64,128 on CUDA.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="dense or packed. Default: both.")] = None,
    heads: Annotated[
        int | None, typer.Option(help="Query heads. Default: 4 on a CPU, 2048 / head dim on CUDA.")
    ] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads. Default: as many as query heads.")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a call, rounded down to whole sequences but at least one. "
            "Default: 512 on a CPU, 16384 on CUDA."
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for attention_DEVICE_DTYPE_HEADS.json, .md and .png, say attention_h200_bfloat16_d64.json."
        ),
    ] = Path("results/bench"),
    seed: Annotated[int, typer.Option(help="Of the tensors' values.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Measure causal attention's backends: time, memory, throughput, and errors against the reference.

    Dense sequences are rows of a batch. Packed, the same tokens are documents of one row: as many visible pairs.
    A backend that cannot serve a call is skipped, and the results say why.
    The exit status is 1 if one fails, or if its output or gradients are far from the reference.
    Shows a table, writes JSON, Markdown and a plot, and prints one JSON object as the last line.
    """
    from zoo.bench import report
    from zoo.bench.measure import run_plan
    from zoo.bench.plan import BACKENDS, LAYOUTS, make_plan
    from zoo.machine import slug

    names, layouts = ({name: name for name in known} for known in (BACKENDS, LAYOUTS))
    chosen = BACKENDS if backends is None else _listed(backends, lambda name: _choice("--backends", name, names))
    plan = make_plan(
        backends=chosen,
        lengths=None if lengths is None else _lengths(lengths),
        windows=None if windows is None else _listed(windows, _window),
        head_dims=None if head_dims is None else _listed(head_dims, _head_dim),
        layouts=LAYOUTS if layout is None else (_choice("--layout", layout, layouts),),
        num_heads=heads,
        num_kv_heads=kv_heads,
        tokens=tokens,
        seed=seed,
        device=device,
        dtype=_dtype(dtype),
    )
    sizes = "-".join(map(str, plan.head_dims))
    name = f"attention_{slug(plan.device)}_{str(plan.dtype).removeprefix('torch.')}_d{sizes}"
    files = (out / f"{name}.json", out / f"{name}.md", out / f"{name}.png")
    results = _run(plan, run_plan, report, report.outcome, files)
    if any("error" in row or row.get("correct") is False for row in results["rows"]):
        raise typer.Exit(1)


def _run(
    plan: Any,
    run_plan: Callable[..., Results],
    report: ModuleType,
    outcome: Callable[[Row], str],
    files: tuple[Path, Path, Path],
) -> Results:
    """Measure with progress on stderr; table and JSON on stdout; JSON, Markdown and a plot as files of one folder."""
    from rich.markup import escape

    from zoo.files import require_writable, write_whole

    kept, table, plot = files
    try:
        require_writable(kept.parent)
    except OSError as error:
        raise ValueError(f"--out: cannot write to {kept.parent}: {error.strerror or error}") from None
    progress, cells = _console(stderr=True), plan.cells()
    with progress.status("") as status:

        def announce(number: int, cell: object) -> None:
            line = f"[{number}/{len(cells)}] {cell}"
            status.update(escape(line))
            if not progress.is_terminal:
                progress.print(line, highlight=False, markup=False)

        def keep(results: Results) -> None:
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
    console = _console()
    console.print(report.table(results, console.width))
    print("  ".join(map(str, files)))
    print(json.dumps(results))
    return results


def _lengths(text: str) -> tuple[int, ...]:
    return _listed(text, lambda part: _number("--lengths", part, "numbers of tokens, such as 512,2k"))


def _batch_size(text: str) -> int:
    return _number("--batch", text, "numbers of rows, such as 1,8")


def _window(text: str) -> int | None:
    return None if text == "full" else _number("--windows", text, "full and numbers of keys, such as full,256,1k")


def _head_dim(text: str) -> int:
    return _number("--head-dims", text, "numbers of channels, such as 64,128")


def _number(option: str, text: str, allowed: str) -> int:
    """A positive number, 2048 for 2k."""
    digits = text.lower().removesuffix("k")
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError(f"{option}: got {text!r}, allowed: {allowed}")
    return int(digits) * (1024 if digits != text else 1)


def _listed(text: str, read: Callable[[str], Value]) -> tuple[Value, ...]:
    """What stands between commas, each once."""
    return tuple(dict.fromkeys(read(part.strip()) for part in text.split(",")))


def _dtype(name: str | None) -> Any:
    import torch

    dtypes = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
    return None if name is None else _choice("--dtype", name, dtypes)


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
