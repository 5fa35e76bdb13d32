"""``zoo bench``."""

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from zoo.cli.options import Device, Dtype, choice, choices, listed, number, numbers
from zoo.cli.options import dtype as read_dtype
from zoo.cli.running import Run, measure_and_report
from zoo.files import write_whole

app = typer.Typer(no_args_is_help=True, help="Measure kernels side by side.")


@app.command()
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

    plan = make_plan(
        backends=BACKENDS if backends is None else choices("--backends", backends, BACKENDS),
        lengths=numbers("--lengths", lengths, "numbers of tokens, such as 512,2k"),
        windows=None if windows is None else listed(windows, _window),
        head_dims=numbers("--head-dims", head_dims, "numbers of channels, such as 64,128"),
        layouts=LAYOUTS if layout is None else (choice("--layout", layout, LAYOUTS),),
        num_heads=heads,
        num_kv_heads=kv_heads,
        tokens=tokens,
        seed=seed,
        device=device,
        dtype=read_dtype(dtype),
    )
    sizes = "-".join(map(str, plan.head_dims))
    name = f"attention_{slug(plan.device)}_{str(plan.dtype).removeprefix('torch.')}_d{sizes}"
    _measure(partial(run_plan, plan), report, out / name)


@app.command()
def kernels(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAMES]...",
            help="chunk_delta_rule, recurrent_delta_rule, deltaformer_write, deltaformer_write_read, attention, "
            "attention_window, short_convolution, read_cache, row_linear, delta_step. Default: all.",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Sequence lengths, e.g. 512,2k; slots of a cache. Default: 64,256 on a CPU, 512,2k,8k,32k on CUDA."
        ),
    ] = None,
    head_dims: Annotated[
        str | None, typer.Option(help="Sizes of a head, e.g. 64,128. Default: 32 on a CPU, 64,128 on CUDA.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Numbers of heads, e.g. 8,16. Default: 2 on a CPU, 16 on CUDA.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="Visible keys of attention_window; sequences that are no longer are left out there. "
            "Default: 32 on a CPU, 1024 on CUDA."
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a call, rounded down to whole sequences but at least one. "
            "Default: 256 on a CPU, 16384 on CUDA."
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for kernels_DEVICE_DTYPE_HEADS.json, .md and .png, say kernels_h200_bfloat16_d64-128.json."
        ),
    ] = Path("results/bench"),
    seed: Annotated[int, typer.Option(help="Of the tensors' values.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Measure this library's kernels beside their references, their peers, and the floor that the hardware sets.

    Forward, and forward and backward. The floor is the bytes that must move over the bandwidth of a copy, or the FLOPs
    over the rate of a matrix product, whichever is more; both rates are measured first.
    What cannot serve a call is skipped, and the results say why; so is the reference where it would take too long.
    The exit status is 1 if one fails, or if its outputs or gradients are far from the reference.
    Shows tables, writes JSON, Markdown and a plot, and prints one JSON object as the last line.
    """
    from zoo.bench.kernels import report
    from zoo.bench.kernels.measure import run_plan
    from zoo.bench.kernels.plan import make_plan
    from zoo.bench.kernels.table import KERNELS
    from zoo.machine import slug

    plan = make_plan(
        kernels=choices("NAMES", ",".join(names or KERNELS), KERNELS),
        lengths=numbers("--lengths", lengths, "numbers of tokens, such as 512,2k"),
        head_dims=numbers("--head-dims", head_dims, "numbers of channels, such as 64,128"),
        heads=numbers("--heads", heads, "numbers of heads, such as 8,16"),
        window=window,
        tokens=tokens,
        seed=seed,
        device=device,
        dtype=read_dtype(dtype),
    )
    sizes = "-".join(map(str, plan.head_dims))
    name = f"kernels_{slug(plan.device)}_{str(plan.dtype).removeprefix('torch.')}_d{sizes}"
    _measure(partial(run_plan, plan), report, out / name)


def _measure(run: Run, report: ModuleType, name: Path) -> None:
    """Measure; then JSON, Markdown and a plot under that name. A row that is wrong lets the command fail too."""
    table, plot = (name.with_name(f"{name.name}{ending}") for ending in (".md", ".png"))

    def write(results: dict[str, Any]) -> list[Path]:
        write_whole(table, lambda path: path.write_text(report.markdown(results)))
        write_whole(plot, lambda path: report.plot(results, path))
        return [table, plot]

    def failed(row: dict[str, Any]) -> bool:
        return "error" in row or row.get("correct") is False

    kept = name.with_name(f"{name.name}.json")
    measure_and_report(run, kept, outcome=report.outcome, table=report.table, write=write, failed=failed)


def _window(text: str) -> int | None:
    return None if text == "full" else number("--windows", text, "full and numbers of keys, such as full,256,1k")
