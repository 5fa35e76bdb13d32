"""``zoo compare`` and ``zoo report``."""

import json
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from zoo.cli.options import DTYPES, Device, choices, numbers
from zoo.cli.running import Announce, Keep, console, measure_and_report
from zoo.files import require_writable, write_whole

__all__ = ["compare", "report"]

Mixed = Annotated[
    bool,
    typer.Option("--mixed", help="Allow results of other machines, versions, commits or settings; the report says so."),
]


def compare(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE",
            help="Recipes or paths of YAML files. Default: every recipe, tiny on a CPU, 340m on CUDA.",
        ),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE...",
            help="Changes of every recipe, with spaces between, e.g. 'num_layers=4 layers.3.mixer=full_attention'. "
            "Given several times, each makes one more variant of every recipe; '' is the recipe itself.",
        ),
    ] = None,
    mode: Annotated[
        str, typer.Option(help="Of train, forward, prefill (a prompt), decode (a token of each row).")
    ] = "train,forward",
    compile: Annotated[
        str,
        typer.Option(
            help="Of none (eager), model (one graph), block (blocks of one kind share a graph: short to compile)."
        ),
    ] = "none,model",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Sequence lengths, e.g. 512,2k; of decode, the context's. Default: 1024 on a CPU, 2048 on CUDA; "
            "of prefill and decode 256,1024 on a CPU, 1k,8k,32k on CUDA."
        ),
    ] = None,
    tokens_per_step: Annotated[
        int | None,
        typer.Option(
            help="Tokens of each step of train and forward, rounded down to whole sequences. "
            "Default: 2048 on a CPU, 32768 on CUDA."
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Rows, e.g. 1,8; of train and forward instead of --tokens-per-step. "
            "Default of prefill and decode: 1,8 on a CPU, 1,8,64 on CUDA."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of float32, bfloat16, float16. Default: float32 on a CPU, bfloat16 on CUDA.")
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            help="Of fla (flash-linear-attention) and hf (Hugging Face transformers): their models of the same sizes "
            "beside deltanet-*, deltaformer-* and transformer-*, in train and forward, eager and compiled."
        ),
    ] = "",
    out: Annotated[
        Path, typer.Option(help="Folder for results.json, results.csv, report.html, table.md and plots.")
    ] = Path("results/compare"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the results in --out: measure what is missing or failed.")
    ] = False,
    mixed: Mixed = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Say where the time goes, by layer and kind, and keep Chrome traces. Every cell compiles once more.",
        ),
    ] = False,
    text: Annotated[
        Path | None, typer.Option(help="Text to learn from, as bytes. Default: the Python standard library's sources.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each cell.")] = 10,
    warmup: Annotated[int, typer.Option(help="Untimed steps before them.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the initialisation.")] = 0,
    jobs: Annotated[
        int, typer.Option(help="Graphs to compile at a time, in front of what is measured; each needs its memory.")
    ] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds after which a cell is given up.")] = 1800,
    device: Device = None,
) -> None:
    """Train and run several architectures on real text, eager and compiled, and compare them.

    Each architecture at each length makes training steps (forward, loss, backward, AdamW) and forward passes; or, to
    decode, passes over prompts, and single tokens after as many tokens. Each measurement has a process of its own: one
    that runs out of memory or crashes is one row that says so. Ctrl-C keeps what is there, and --resume goes on.
    Shows a table, writes results.json, a page to look at and to share (report.html) and plots, and in a pipe prints one
    JSON object as the last line.
    """
    from zoo.compare import report as reports
    from zoo.compare.peers import PEERS
    from zoo.compare.plan import COMPILES, MODES, make_plan
    from zoo.compare.run import run_plan

    if jobs < 1:
        raise ValueError(f"--jobs: got {jobs}, allowed: at least 1")
    if mixed and not resume:
        raise ValueError("--mixed: there is nothing to mix with, allowed: with --resume")
    plan = make_plan(
        sources or [],
        overrides=tuple(override or ()),
        modes=choices("--mode", mode, MODES),
        compiles=choices("--compile", compile, COMPILES),
        dtypes=None if dtype is None else choices("--dtype", dtype, DTYPES),
        lengths=numbers("--lengths", lengths, "numbers of tokens, such as 512,2k"),
        batch_sizes=numbers("--batch", batch, "numbers of rows, such as 1,8"),
        tokens_per_step=tokens_per_step,
        beside=choices("--peers", peers, PEERS) if peers else (),
        warmup=warmup,
        steps=steps,
        seed=seed,
        device=device,
        text=text,
        profile=profile,
        timeout=timeout,
    )
    kept = out / "results.json"
    if kept.exists() and not resume:
        aside = kept.with_name(f"results-{datetime.fromtimestamp(kept.stat().st_mtime):%Y%m%d-%H%M%S}.json")
        kept.replace(aside)
        print(f"earlier results are now {aside}", file=sys.stderr)
    previous = _read(kept) if resume and kept.exists() else None

    def run(announce: Announce, keep: Keep) -> Any:
        return run_plan(plan, out, announce, keep, jobs=jobs, previous=previous, mixed=mixed)

    write = partial(reports.write, folder=out)
    measure_and_report(run, kept, outcome=reports.outcome, table=reports.table, write=write)


def report(
    files: Annotated[list[Path], typer.Argument(metavar="RESULTS.json", help="What zoo compare wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("results/report"),
    mixed: Mixed = False,
) -> None:
    """Make the table, page and plots again from results, of one run or of several together."""
    from zoo.compare import report as reports
    from zoo.compare.merge import merge

    results = merge([_read(file) for file in files], mixed=mixed)
    try:
        require_writable(out)
    except OSError as error:
        raise ValueError(f"--out: cannot write to {out}: {error.strerror or error}") from None
    terminal = console()
    merged = out / "results.json"
    write_whole(merged, lambda path: path.write_text(json.dumps(results, indent=1) + "\n"))
    written = [merged, *reports.write(results, out)]
    terminal.print(reports.table(results, terminal.width))
    print("  ".join(map(str, written)))


def _read(file: Path) -> Any:
    """Results of an earlier run.

    Raises:
        ValueError: the file holds no such thing.
    """
    from zoo.compare.plan import Cell

    try:
        results = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from None
    kinds = {"machine": dict, "settings": dict, "complete": bool, "rows": list}
    if not isinstance(results, dict) or not all(isinstance(results.get(key), kind) for key, kind in kinds.items()):
        raise ValueError(f"{file}: holds no results, allowed: what zoo compare wrote, with {', '.join(kinds)}")
    for row in results["rows"]:
        try:
            hash(Cell.of_row(row))
        except (KeyError, TypeError):
            raise ValueError(f"{file}: holds no rows of this version's zoo compare, allowed: those") from None
    return results
