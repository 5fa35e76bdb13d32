"""Running a plan: every cell measured, results kept as they come."""

import warnings
from collections.abc import Callable, Iterator
from itertools import groupby

from torch._inductor import config as inductor_config

from zoo.compare.measure import Runner
from zoo.compare.plan import Cell, Plan
from zoo.memory import give_back
from zoo.results import Results, Row, collect

__all__ = ["run_plan"]


def run_plan(plan: Plan, announce: Callable[[int, Cell], None], keep: Callable[[Results], None]) -> Results:
    """Measure every cell.

    Args:
        plan: what to measure.
        announce: told the number of each cell before it runs.
        keep: given all results so far after each cell, and once more when they are complete.

    Returns:
        See `collect`. A cell that failed has an "error" and no figures, and the others go on.
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
    # Caches off: every compile time is that of a first compilation, whatever ran before.
    with inductor_config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
        return collect(plan.device, settings, _rows(plan, announce), keep)


def _rows(plan: Plan, announce: Callable[[int, Cell], None]) -> Iterator[tuple[Cell, Row]]:
    number = 0
    for _, group in groupby(plan.cells(), key=lambda cell: (cell.recipe, cell.mode, cell.compiled)):
        runner = None
        for cell in group:
            number += 1
            announce(number, cell)
            try:
                runner = runner or Runner(plan, cell)
                row = runner.run(cell)
            except Exception as error:  # one broken architecture must not lose the rest
                runner, row = None, {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
            give_back(plan.device)
            yield cell, row
