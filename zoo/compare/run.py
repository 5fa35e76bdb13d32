"""Running a plan: every cell measured, results kept as they come."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch
from torch._inductor import config as inductor_config

from zoo import machine
from zoo.compare.measure import Runner
from zoo.compare.plan import Cell, Plan

__all__ = ["run_plan"]

Results = dict[str, Any]


def run_plan(plan: Plan, announce: Callable[[int, Cell], None], keep: Callable[[Results], None]) -> Results:
    """Measure every cell.

    Args:
        plan: what to measure.
        announce: told the number of each cell before it runs.
        keep: given all results so far after each cell, and once more when they are complete.

    Returns:
        {"machine": header, "settings": ..., "complete": ..., "rows": [one mapping per cell]}. A cell that failed has an
        "error" and no figures, and the others go on.
    """
    settings = {
        "dtype": str(plan.dtype).removeprefix("torch."),
        "tokens_per_step": plan.tokens_per_step,
        "warmup": plan.warmup,
        "steps": plan.steps,
        "seed": plan.seed,
        "text_bytes": plan.text.shape[0],
        "dynamic_shapes": len(plan.lengths) > 1,
    }
    results: Results = {"machine": machine.describe(plan.device), "settings": settings, "complete": False, "rows": []}
    # Caches off: every compile time is that of a first compilation, whatever ran before.
    with inductor_config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
        for cell, row in _rows(plan, announce):
            results["rows"].append(asdict(cell) | row)
            keep(results)
    results["complete"] = True
    keep(results)
    return results


def _rows(plan: Plan, announce: Callable[[int, Cell], None]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    number = 0
    for _, group in groupby(plan.cells(), key=lambda cell: (cell.recipe, cell.mode, cell.compiled)):
        runner = None
        for cell in group:
            number += 1
            announce(number, cell)
            with _released(plan.device):
                try:
                    runner = runner or Runner(plan, cell)
                    row = runner.run(cell)
                except Exception as error:  # one broken architecture must not lose the rest
                    runner, row = None, {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
            yield cell, row


@contextmanager
def _released(device: torch.device) -> Iterator[None]:
    yield
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
