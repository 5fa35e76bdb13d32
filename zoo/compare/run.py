"""Running a plan: every cell measured in a process of its own, results kept as they come."""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

from zoo import machine
from zoo.compare import measure, peers
from zoo.compare.apart import Apart, ApartError
from zoo.compare.merge import has_figures, refuse_graphs, refuse_mixture
from zoo.compare.plan import Cell, Plan
from zoo.hardware import peak_flops
from zoo.results import Results, Row, collect

__all__ = ["run_plan"]

_NOTE = "ahead.json"  # beside the compiled graphs: of which cells, and what compiling them took


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
        mixed: whether those may be of another machine, version, commit, setting or configuration; the results then say
            so.

    Returns:
        See `collect` and `measure`; "mixed" lists what differs, "configs" has a hash of each configuration. A cell that
        failed has an "error" and no figures (figures too, where only its profile failed), one that cannot be measured
        has the reason as "skipped".

    Raises:
        ValueError: earlier results differ in such a way, and may not; or another run measures into the folder.
    """
    folder = folder.resolve()
    with _alone_in(folder):
        runner = _Runner(plan, folder, announce, jobs)
        header = runner.header()
        settings = plan.settings() | {"jobs": jobs}  # compiling beside others takes longer
        results: Results = {"machine": header, "settings": settings, "configs": plan.hashes()}
        differences, before = refuse_mixture(previous, results, allowed=mixed)
        cells = plan.cells()
        done = {cell: row for row in before for cell in [Cell.of_row(row)] if cell not in cells or _stands(row, plan)}
        graphs = [(cell.mode, bool(plan.dynamic(cell))) for cell in cells if cell.compile != "none"]
        graphs += [(cell.mode, row.get("dynamic")) for cell, row in done.items()]
        differences += refuse_graphs(graphs, allowed=mixed)
        runner.done = done
        runner.finds_graphs = previous is not None and not differences
        order = {cell: place for place, cell in enumerate(dict.fromkeys([*cells, *done]))}
        configs = (previous or {}).get("configs", {}) | plan.hashes()
        more = {"configs": configs, "mixed": differences}
        results = collect(
            header,
            settings,
            runner.rows(),
            lambda results: keep(results | more),
            cells=cells,
            before=done,
            conclude=lambda rows: {"rows": sorted(rows, key=lambda row: order[Cell.of_row(row)]), **more},
        )
        if results["complete"]:
            runner.forget_graphs()
        with suppress(OSError):  # some failed
            (folder / "logs").rmdir()
        return results


def _stands(row: Row, plan: Plan) -> bool:
    """Whether an earlier row is as the plan wants it: its graph has symbols for sizes, or not, as the others'."""
    return has_figures(row) and row.get("dynamic") in (None, bool(plan.dynamic(Cell.of_row(row))))


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Of two runs in one folder, each would take away the other's files.

    Raises:
        ValueError: another process is in this block.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"--out: another run measures into {folder}, allowed: another folder") from None
    except OSError:
        pass  # a file system that has no locks
    try:
        yield
    finally:
        os.close(descriptor)


class _Runner:
    def __init__(self, plan: Plan, folder: Path, announce: Callable[[str], None], jobs: int) -> None:
        self.plan, self.folder, self.announce, self.jobs = plan, folder, announce, jobs
        self.cells = plan.cells()
        self.done: dict[Cell, Row] = {}
        self.finds_graphs = False  # of an interrupted run of the same plan

    def header(self) -> dict[str, Any]:
        """The machine, what it can do, and the peers."""
        plan = self.plan
        self.announce("measuring a large matrix product")
        try:
            with self._apart(None, measure.matmul_flops, plan, name="matmul") as call:
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
        numbers = {cell: number for number, cell in enumerate(self.cells, 1)}
        left = [cell for cell in self.cells if cell not in self.done]
        groups = [list(group) for _, group in groupby(left, key=lambda cell: cell.group)]
        evidence: dict[tuple[Any, ...], Row] = {}
        for place, group in enumerate(groups):
            if _is_compiled_ahead(group[0]) and group[0].group not in evidence:
                compiled = [some for some in groups[place:] if _is_compiled_ahead(some[0])]
                evidence |= self._compile(compiled[: self.jobs])
            for cell in group:
                self.announce(f"[{numbers[cell]}/{len(self.cells)}] {cell}")
                yield cell, self._row(cell, evidence.get(cell.group, {}))

    def _compile(self, groups: list[list[Cell]]) -> dict[tuple[Any, ...], Row]:
        """Of each group what compiling took; nothing where it failed, which its cells will say."""
        found: dict[tuple[Any, ...], Row] = {cells[0].group: {} for cells in groups}
        with ExitStack() as stack:
            running: list[tuple[list[Cell], Apart]] = []
            for left in groups:
                group = left[0].group
                if known := self._noted(left):
                    found[group] = known
                    continue
                cells = [cell for cell in self.cells if cell.group == group]
                self.announce(f"compiling {cells[0]}{' and other sizes' if len(cells) > 1 else ''}")
                shutil.rmtree(self._caches(cells[0]), ignore_errors=True)
                call = self._apart(cells[0], measure.compile_ahead, self.plan, cells, name=_slug(cells[0], "compile"))
                running.append((cells, stack.enter_context(call)))
            for cells, call in running:
                try:
                    found[cells[0].group] = evidence = call.result(self.plan.timeout)
                    call.log.unlink(missing_ok=True)
                except ApartError as error:
                    self.announce(f"  not compiled ahead: {error}")
                    continue
                note = json.dumps({"cells": [str(cell) for cell in cells], "evidence": evidence})
                with suppress(OSError):  # there may be no room
                    (self._caches(cells[0]) / _NOTE).write_text(note)
        return found

    def _noted(self, cells: list[Cell]) -> Row | None:
        """What compiling took in an interrupted run, where it compiled all these cells and its graphs are there."""
        if not self.finds_graphs:
            return None
        try:
            note = json.loads((self._caches(cells[0]) / _NOTE).read_text())
        except (OSError, ValueError):
            return None
        return note["evidence"] if {str(cell) for cell in cells} <= {*note["cells"]} else None

    def _row(self, cell: Cell, evidence: Row) -> Row:
        if reason := self._skipped(cell):
            return {"skipped": reason}
        name, row = _slug(cell), Row()
        log = self.folder / "logs" / f"{name}.txt"
        try:
            if cell.compile != "none" and not evidence:  # what others left there would make it look warm
                shutil.rmtree(self._caches(cell), ignore_errors=True)
            with self._apart(cell, measure.measure, self.plan, cell, name=name) as call:
                found = call.result(self.plan.timeout)
            if "skipped" in found:
                row = found
            else:
                seconds = found.pop("compile_s")
                row = found | _compilation(seconds, evidence)
                if self.plan.profile and cell.peer is None:
                    row["profile"] = self._profile(cell, name)
        except (ApartError, OSError) as error:
            return row | {"error": f"{error} (logs/{name}.txt)"}
        log.unlink(missing_ok=True)
        return row

    def _profile(self, cell: Cell, name: str) -> Row:
        trace = self.folder / "traces" / f"{name}.json.gz"
        trace.parent.mkdir(exist_ok=True)
        with self._apart(cell, measure.profile, self.plan, cell, trace, name=name) as call:
            return call.result(self.plan.timeout) | {"trace": f"traces/{trace.name}"}

    def _skipped(self, cell: Cell) -> str | None:
        if cell.peer is None or peers.installed(cell.peer):
            return None
        return f"{peers.PEERS[cell.peer].package} is not installed"

    def _apart(self, cell: Cell | None, function: Callable[..., Any], *arguments: Any, name: str) -> Apart:
        """A call for a cell, which finds the graphs of its group, and a peer's its tuned kernels, eager or not."""
        logs = self.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        environment = {}
        if cell is not None and (cell.compile != "none" or cell.peer):
            caches = self._caches(cell)
            kernels = self.folder / "compiled" / _file_name(cell.recipe) if cell.peer else caches
            environment = {
                "TORCHINDUCTOR_CACHE_DIR": f"{caches / 'inductor'}",
                "TRITON_CACHE_DIR": f"{kernels / 'triton'}",
            }
        return Apart(function, *arguments, log=logs / f"{name}.txt", environment=environment)

    def _caches(self, cell: Cell) -> Path:
        return self.folder / "compiled" / _file_name(*cell.group)

    def forget_graphs(self) -> None:
        """Remove those of the plan; the folder may hold something else."""
        for cell in self.cells:
            shutil.rmtree(self._caches(cell), ignore_errors=True)
            if cell.peer:
                shutil.rmtree(self.folder / "compiled" / _file_name(cell.recipe), ignore_errors=True)
        with suppress(OSError):
            (self.folder / "compiled").rmdir()


def _is_compiled_ahead(cell: Cell) -> bool:
    """A peer is not: some tune their kernels in the first step, and that beside others would spoil it."""
    return cell.compile != "none" and cell.peer is None


def _compilation(seconds: float | None, evidence: Row) -> Row:
    """The columns of a cell whose own process compiled for so long: with what there was, or from nothing."""
    if evidence:
        return evidence | {"compile_warm_s": seconds}
    return {"compile_cold_s": seconds, "compile_warm_s": None, "recompile_s": None, "recompilations": None}


def _slug(cell: Cell, *more: str) -> str:
    """A name for the files of a cell."""
    size = f"B{cell.batch_size}", f"T{cell.length}"
    return _file_name(cell.recipe, cell.mode, cell.dtype, cell.compile, *size, *more)


def _file_name(recipe: str, *parts: Any) -> str:
    """Of a recipe, whose name may be long and may have any characters in it; no two have the same."""
    plain = re.sub(r"[^\w.-]+", "_", recipe, flags=re.ASCII)[:100]
    if plain != recipe:
        plain += f"_{sha256(recipe.encode()).hexdigest()[:8]}"
    return "_".join(map(str, (plain, *parts)))
