"""Measuring kernels: every cell's errors, times, floor and share of it, results kept as they come."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle, groupby
from typing import Any

import torch

from zoo.bench.failures import LARGEST_ERROR, Skipped, failure
from zoo.bench.kernels.case import Case
from zoo.bench.kernels.ceilings import Ceilings
from zoo.bench.kernels.kernel import REFERENCE_LENGTH, STEPS, Call, Side, Step
from zoo.bench.kernels.plan import Cell, Plan
from zoo.bench.kernels.table import KERNELS
from zoo.machine import describe
from zoo.memory import give_back
from zoo.results import Results, Row, collect
from zoo.timing import call_ms, graph_ms, milliseconds, rounded, spread

__all__ = ["run_plan"]


def run_plan(plan: Plan, announce: Callable[[str], None], keep: Callable[[Results], None]) -> Results:
    """Measure every cell.

    Args:
        plan: what to measure.
        announce: told of each cell before it runs, in a line.
        keep: given all results so far after each cell, and once more when they are complete.

    Returns:
        See `collect`; the settings hold what the device gives at most, measured first. A cell that its side cannot
        serve has the reason as "skipped", one that failed has an "error"; they have no figures, and the others go on.
        See `_measure` for the figures.
    """
    with torch.cuda.device(plan.device) if plan.device.type == "cuda" else nullcontext():
        ceilings = Ceilings.measure(plan.device, plan.dtype)
        give_back(plan.device)
        settings = {
            "dtype": str(plan.dtype).removeprefix("torch."),
            "tokens": plan.tokens,
            "window": plan.window,
            "seed": plan.seed,
            "largest_error": LARGEST_ERROR[plan.dtype],
            "reference_length": REFERENCE_LENGTH,
            "copy_tb_per_s": rounded(ceilings.bytes_per_s / 1e12),
            "matmul_tflops": rounded(ceilings.flops_per_s / 1e12),
        }
        rows = _rows(plan, ceilings, announce)
        return collect(describe(plan.device), settings, rows, keep, cells=plan.cells())


def _rows(plan: Plan, ceilings: Ceilings, announce: Callable[[str], None]) -> Iterator[tuple[Cell, Row]]:
    number, total = 0, len(plan.cells())
    for _, group in groupby(plan.cells(), key=lambda x: (x.kernel, x.length, x.num_heads, x.head_dim)):
        case: Case | None = None
        best: dict[Step, float] = {}  # peers' times so far; they come first
        for cell in group:
            number += 1
            announce(f"[{number}/{total}] {cell}")
            kernel = KERNELS[cell.kernel]
            side = next(side for side in kernel.sides if side.name == cell.side)
            try:
                call = _prepare(side, plan, cell)
                case = case or Case(kernel, plan.shape(cell), plan.seed)
                row = _measure(case, side, call, ceilings, best)
            except Exception as error:  # one broken kernel must not lose the rest
                row = failure(error)
                if side.role == "reference" and isinstance(error, torch.OutOfMemoryError):
                    row = {"skipped": "the reference takes more memory than there is"}
            call = None
            if plan.device.type == "cuda":
                give_back(plan.device)
            yield cell, row
        case = None
        torch.compiler.reset()  # each shape has graphs of its own, as many as there are shapes
        give_back(plan.device)


def _prepare(side: Side, plan: Plan, cell: Cell) -> Call:
    if side.longest is not None and cell.length > side.longest:
        raise Skipped(f"the reference is measured up to T {side.longest}, got {cell.length}")
    return side.make(plan.shape(cell))


def _measure(case: Case, side: Side, call: Call, ceilings: Ceilings, best: dict[Step, float]) -> Row:
    """The figures of one cell.

    Args:
        case: its tensors.
        side: whose figures.
        call: of that side.
        ceilings: of the device.
        best: the least times of right peers so far, to which a right peer's are added.

    Returns:
        ``batch_size``, ``role``, and of the forward and, if there is a backward, of both together: milliseconds as
        quantiles, how they were measured (``method``: replays of a "cuda_graph"; "calls" on CUDA, with what the host
        takes; "cpu"), the floor, what sets it (``bound``: "bytes" or "FLOPs"), and its ``share`` of the time; for ours,
        the ``speedup`` over the fastest peer, None without one. ``errors`` relative to the reference in float64, and
        whether they are all small enough for the dtype.
    """
    errors = case.errors(call)
    row: Row = {
        "batch_size": case.shape.batch_size,
        "role": side.role,
        "errors": {name: rounded(error) for name, error in errors.items()},
        "correct": all(error <= LARGEST_ERROR[case.shape.dtype] for error in errors.values()),
    }
    work = case.kernel.work(case.shape)
    for step in STEPS if case.kernel.has_backward else STEPS[:1]:
        method, marks = _time(_timed(case, call, step), case.shape.device, captured=side.captured)
        floor, bound = ceilings.floor(*work.of(step))
        median = marks["median"]
        assert median, "a call takes time"
        row |= {
            f"{step}_ms": marks,
            f"{step}_method": method,
            f"{step}_floor_ms": rounded(floor),
            f"{step}_bound": bound,
            f"{step}_share": rounded(floor / median),
        }
        if side.role == "ours":
            row[f"{step}_speedup"] = rounded(best[step] / median) if step in best else None
        if side.role == "peer" and row["correct"]:
            best[step] = min(median, best.get(step, median))
    return row


def _timed(case: Case, call: Call, step: Step) -> Callable[[], Any]:
    """What is measured: each call takes the next copy of the inputs."""
    turns = cycle(case.copies)

    def once() -> None:
        inputs, gradient = next(turns)
        if step == "forward":
            case.forward(call, inputs)
        else:
            assert gradient is not None, "there is a backward"
            case.forward_backward(call, inputs, gradient)

    return once


def _time(call: Callable[[], Any], device: torch.device, *, captured: bool) -> tuple[str, dict[str, float | None]]:
    """How it was measured, and the quantiles: on CUDA of the replays of a graph, if it can be captured."""
    if device.type != "cuda":
        return "cpu", milliseconds(call, device)
    marks = graph_ms(call, rep=20) if captured else None
    return ("calls", spread(call_ms(call))) if marks is None else ("cuda_graph", spread(marks))
