"""Running a plan: every cell measured in a process of its own, results kept as they come."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

from zoo import machine
from zoo.compare import measure, peers
from zoo.compare.apart import Apart, ApartError
from zoo.compare.merge import refuse_mixture
from zoo.compare.plan import Cell, Plan
from zoo.hardware import peak_flops
from zoo.results import Results, Row, collect

__all__ = ["run_plan"]

_OF_GROUP = ("compile_cold_s", "recompile_s", "graphs", "graph_breaks", "recompilations")


def run_plan(
    plan: Plan,
    folder: Path,
    announce: Callable[[str], None],
    keep: Callable[[Results], None],
    *,
    jobs: int = 1,
    previous: Results | None = None,
    mixed: bool = False,
) -> Results:
    """Measure every cell.

    First all graphs of a group of cells (`Cell.group`) are compiled with empty caches, in a process that ends then;
    each cell's process finds these caches and compiles from them.

    Args:
        plan: what to measure.
        folder: for the compiled graphs (``compiled``), for what failing processes said (``logs``) and for ``traces``.
        announce: told what comes next, in a line.
        keep: given all results so far after each cell, and once more when they are complete.
        jobs: groups that compile at a time; nothing else is measured then.
        previous: results of an interrupted run, whose cells are not measured again, unless they failed.
        mixed: whether those may be of another machine, version, commit or setting; the results then say so.

    Returns:
        See `collect` and `measure`; "mixed" lists what differs. A cell that failed has an "error" and no figures, one
        that cannot be measured has the reason as "skipped".

    Raises:
        ValueError: earlier results differ in such a way, and may not.
    """
    runner = _Runner(plan, folder, announce, jobs)
    header = runner.header()
    results: Results = {"machine": header, "settings": plan.settings()}
    differences, before = refuse_mixture(previous, results, allowed=mixed)
    done = {Cell.of_row(row): row for row in before if "error" not in row}
    runner.done = done
    cells = plan.cells()
    order = {cell: place for place, cell in enumerate(dict.fromkeys([*cells, *done]))}
    results = collect(
        header,
        plan.settings(),
        runner.rows(),
        lambda results: keep(results | {"mixed": differences}),
        total=len(order),
        before=done.values(),
        conclude=lambda rows: {"rows": sorted(rows, key=lambda row: order[Cell.of_row(row)]), "mixed": differences},
    )
    if results["complete"]:
        shutil.rmtree(folder / "compiled", ignore_errors=True)
    if not any((folder / "logs").iterdir()):
        (folder / "logs").rmdir()
    return results


class _Runner:
    def __init__(self, plan: Plan, folder: Path, announce: Callable[[str], None], jobs: int) -> None:
        self.plan, self.folder, self.announce, self.jobs = plan, folder, announce, jobs
        self.done: dict[Cell, Row] = {}

    def header(self) -> dict[str, Any]:
        """The machine, what it can do, and the peers."""
        plan = self.plan
        self.announce("measuring a large matrix product")
        try:
            with self._apart("matmul", measure.matmul_flops, plan) as call:
                rate = call.result(plan.timeout) / 1e12
            call.log.unlink(missing_ok=True)
        except ApartError:
            rate = None
        peak = peak_flops(plan.device, measure.dtype_of(plan.dtypes[0]))
        return machine.describe(plan.device) | {
            "peak_tflops": None if peak is None else peak / 1e12,
            "matmul_tflops": rate,
            "peers": {peer: peers.installed(peer) for peer in plan.peers},
        }

    def rows(self) -> Iterator[tuple[Cell, Row]]:
        """What is not done yet, group by group."""
        cells = self.plan.cells()
        numbers = {cell: number for number, cell in enumerate(cells, 1)}
        left = [cell for cell in cells if cell not in self.done]
        groups = [list(group) for _, group in groupby(left, key=lambda cell: cell.group)]
        evidence: dict[tuple[Any, ...], Row] = {}
        for place, group in enumerate(groups):
            if group[0].compile != "none" and group[0].group not in evidence:
                compiled = [some for some in groups[place:] if some[0].compile != "none"]
                evidence |= self._compile(compiled[: self.jobs])
            for cell in group:
                self.announce(f"[{numbers[cell]}/{len(cells)}] {cell}")
                yield cell, self._row(cell, evidence.get(cell.group, {}))

    def _compile(self, groups: list[list[Cell]]) -> dict[tuple[Any, ...], Row]:
        """Of each group what compiling took; nothing where it failed, which its cells will say."""
        found: dict[tuple[Any, ...], Row] = {cells[0].group: {} for cells in groups}
        with ExitStack() as stack:
            running: dict[tuple[Any, ...], Apart] = {}
            for cells in groups:
                known = [row for cell, row in self.done.items() if cell.group == cells[0].group]
                if any("compile_cold_s" in row for row in known):
                    found[cells[0].group] = {key: known[0].get(key) for key in _OF_GROUP}
                elif not self._skipped(cells[0]):
                    self.announce(f"compiling {cells[0]}{' and other sizes' if len(cells) > 1 else ''}")
                    shutil.rmtree(self._caches(cells[0]), ignore_errors=True)
                    call = self._apart(_slug(cells[0], "compile"), measure.compile_ahead, self.plan, cells, of=cells[0])
                    running[cells[0].group] = stack.enter_context(call)
            for group, call in running.items():
                try:
                    found[group] = call.result(self.plan.timeout)
                    call.log.unlink(missing_ok=True)
                except ApartError as error:
                    self.announce(f"  not compiled ahead: {error}")
        return found

    def _row(self, cell: Cell, evidence: Row) -> Row:
        if reason := self._skipped(cell):
            return {"skipped": reason}
        name = _slug(cell)
        try:
            with self._apart(name, measure.measure, self.plan, cell, of=cell) as call:
                row = call.result(self.plan.timeout)
            if "skipped" in row:
                return row
            compile_s = row.pop("compile_s")
            row |= {"compile_cold_s": compile_s, "compile_warm_s": None, "recompile_s": None, "recompilations": None}
            if evidence:
                row |= evidence | {"compile_warm_s": compile_s}
            if self.plan.profile and cell.peer is None:
                trace = self.folder / "traces" / f"{name}.json.gz"
                trace.parent.mkdir(exist_ok=True)
                with self._apart(name, measure.profile, self.plan, cell, trace) as call:
                    row["profile"] = call.result(self.plan.timeout) | {"trace": f"traces/{trace.name}"}
        except ApartError as error:
            return {"error": f"{error} (logs/{name}.txt)"}
        call.log.unlink(missing_ok=True)
        return row

    def _skipped(self, cell: Cell) -> str | None:
        if cell.peer is None or peers.installed(cell.peer):
            return None
        return f"{peers.PEERS[cell.peer].package} is not installed"

    def _apart(self, name: str, function: Callable[..., Any], *arguments: Any, of: Cell | None = None) -> Apart:
        logs = self.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        environment = {}
        if of is not None and of.compile != "none":
            caches = self._caches(of)
            environment = {
                "TORCHINDUCTOR_CACHE_DIR": f"{caches / 'inductor'}",
                "TRITON_CACHE_DIR": f"{caches / 'triton'}",
            }
        return Apart(function, *arguments, log=logs / f"{name}.txt", environment=environment)

    def _caches(self, cell: Cell) -> Path:
        return (self.folder / "compiled" / re.sub(r"[^\w.-]+", "_", " ".join(map(str, cell.group)))).resolve()


def _slug(cell: Cell, *more: str) -> str:
    """A name for the files of a cell."""
    parts = cell.recipe, cell.mode, cell.dtype, cell.compile, f"B{cell.batch_size}", f"T{cell.length}", *more
    return re.sub(r"[^\w.-]+", "_", " ".join(parts))
