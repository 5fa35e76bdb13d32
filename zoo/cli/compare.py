"""``zoo compare``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from zoo.cli.options import Device, Dtype, choices, numbers
from zoo.cli.options import dtype as read_dtype
from zoo.cli.running import run_and_report


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
        modes=choices("--mode", mode, MODES),
        lengths=numbers("--lengths", lengths, "numbers of tokens, such as 512,2k"),
        batch_sizes=numbers("--batch", batch, "numbers of rows, such as 1,8"),
        tokens_per_step=tokens_per_step,
        warmup=warmup,
        steps=steps,
        seed=seed,
        device=device,
        dtype=read_dtype(dtype),
        text=text,
    )

    def outcome(row: dict[str, Any]) -> str:
        compiled = f" (compiled in {row['compile_s']:.1f} s)" if row.get("compile_s") else ""
        return (row.get("error") or row.get("skipped") or f"{row['tokens_per_s']:,.0f} tokens/s") + compiled

    files = (out / "results.json", out / "table.md", out / "plot.png")
    results = run_and_report(plan, run_plan, report, outcome, files)
    if any("error" in row for row in results["rows"]):
        raise typer.Exit(1)
