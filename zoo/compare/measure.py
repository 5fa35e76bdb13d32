"""Measuring one cell: time, memory, compilation. It expects a process of its own.

Shapes: B batch, T sequence length.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import cycle, islice, pairwise
from math import ceil
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from zoo.builder import construct
from zoo.compare import peers
from zoo.compare.plan import DECODING, Cell, Plan
from zoo.compilation import compile
from zoo.decoding import Decoder
from zoo.hardware import peak_flops
from zoo.memory import give_back, peak_cpu_bytes, total_bytes
from zoo.results import Row
from zoo.text import batches, read_bytes
from zoo.timing import matmul_rate

__all__ = ["compile_ahead", "dtype_of", "matmul_flops", "measure", "profile"]

_LEARNING_RATE = 1e-3
_SHORTEST = 0.01  # seconds of what is timed; of shorter steps several are timed together
_MOST_TOGETHER = 100

Step = Callable[[], Tensor | None]


def measure(plan: Plan, cell: Cell) -> Row:
    """The figures of a cell.

    Returns:
        Times are medians over steps that follow each other without a wait between them, as in training, or over means
        of several, where one is short. ``first_step_s`` is the first one's, which compiles with what caches there are,
        and ``compile_s`` how much longer that took; ``dynamic`` says whether graphs have symbols for sizes; ``graphs``
        and ``graph_breaks`` are counted, None where nothing compiles. ``peak_bytes`` counts tensors: parameters,
        optimiser state and activations; ``state_bytes`` the state of decoding of all rows. Where that alone is more
        than there is memory for, or some mixer cannot decode, the row has that as "skipped" instead.
    """
    state_bytes = (
        None if cell.peer else cell.batch_size * plan.config(cell).state_bytes(cell.length, dtype_of(cell.dtype))
    )
    if cell.mode in DECODING and state_bytes and state_bytes > (total := total_bytes(plan.device)):
        return {"skipped": f"a state of {state_bytes:,} bytes does not fit into memory of {total:,}"}
    subject = _Subject(plan, cell)
    if cell.mode in DECODING and "decode" in subject.model.lacking:
        return {"skipped": f"{subject.model.lacking['decode']} does not support 'decode'"}
    step = subject.step(cell)
    first, _ = _time(step, plan.device)
    second = first
    for _ in range(plan.warmup - 1):
        second, _ = _time(step, plan.device)
    # Not of training, whose loss is comparable only after as many steps.
    together = 1 if cell.mode == "train" else min(_MOST_TOGETHER, ceil(_SHORTEST / second))
    seconds, loss = _times(step, plan.device, together, plan.steps)
    typical = median(seconds)
    low, *_, high = quantiles(seconds, n=5, method="inclusive") if len(seconds) > 1 else seconds * 2
    tokens = cell.batch_size * (1 if cell.mode == "decode" else cell.length)
    return {
        "tokens_per_s": tokens / typical,
        "tokens_per_s_p20": tokens / high,
        "tokens_per_s_p80": tokens / low,
        "step_ms": typical * 1e3,
        **_utilisation(plan, cell, tokens / typical),
        "peak_bytes": subject.peak_bytes(step),
        "state_bytes": state_bytes,
        "first_step_s": first,
        "compile_s": None if cell.compile == "none" else max(first - typical, 0.0),
        "dynamic": None if cell.compile == "none" else bool(plan.dynamic(cell)),
        "graphs": None if cell.compile == "none" else counters["stats"]["unique_graphs"],
        "graph_breaks": None if cell.compile == "none" else sum(counters["graph_break"].values()),
        "params": sum(parameter.numel() for parameter in subject.model.parameters()),
        "loss": None if loss is None or not loss.isfinite() else loss.item(),
    }


def compile_ahead(plan: Plan, cells: Sequence[Cell]) -> Row:
    """Compile what the cells of a group need, with caches that are empty: for each its first step, and a second.

    A cell that fails here, for memory, say, is left out, as long as another does not.

    Returns:
        The seconds that the first cell's first step took longer than its second, and those of the others, which can use
        its graphs; all graphs and breaks, and how many graphs came after those of the first cell.
    """
    counters.clear()
    subject = _Subject(plan, cells[0])
    seconds, graphs = [], []
    for cell in cells:
        try:
            first, second = _first_steps(subject, cell)
        except Exception:
            if cell == cells[-1] and not seconds:
                raise
            traceback.print_exc()
            subject.model.zero_grad()  # of a step that ended early
        else:
            seconds.append(max(first - second, 0.0))
            print(f"{cell}: first step {first:.1f} s, second {second:.3f} s", flush=True)
        graphs.append(counters["stats"]["unique_graphs"])
        give_back(plan.device)
    return {
        "compile_cold_s": seconds[0],
        "recompile_s": sum(seconds[1:]),
        "graphs": graphs[-1],
        "graph_breaks": sum(counters["graph_break"].values()),
        "recompilations": graphs[-1] - graphs[0],
    }


def _first_steps(subject: "_Subject", cell: Cell) -> tuple[float, float]:
    step, device = subject.step(cell), subject.plan.device
    return _time(step, device)[0], _time(step, device)[0]


def profile(plan: Plan, cell: Cell, trace: Path) -> Row:
    """Where the time of the cell's steps goes; see `profile_step`. What is compiled is compiled anew.

    Args:
        plan: the comparison.
        cell: of it.
        trace: where a Chrome trace goes.
    """
    from zoo.profiling import profile_step, provenance  # few need it

    with provenance():
        subject = _Subject(plan, cell)
        step = subject.step(cell)
        for _ in range(plan.warmup):
            step()
        return profile_step(step, subject.model, plan.device, trace)


def matmul_flops(plan: Plan) -> float:
    """What a large product reaches on the plan's device, in its first dtype."""
    with torch.cuda.device(plan.device) if plan.device.type == "cuda" else nullcontext():
        return matmul_rate(plan.device, dtype_of(plan.dtypes[0]))


class _Subject:
    """The model of a cell's group, and what a step of it is.

    Args:
        plan: the comparison.
        cell: any of the group.
    """

    def __init__(self, plan: Plan, cell: Cell) -> None:
        self.plan, config = plan, plan.config(cell)
        if plan.device.type == "cuda":
            torch.cuda.set_device(plan.device)  # where Triton launches
        self.state = self.optimizer = None
        self.model: Any
        if cell.peer is None:
            self.model = construct(config, plan.device, dtype_of(cell.dtype), plan.seed)
            self.call = self.model
            if cell.compile == "block" or (cell.compile == "model" and cell.mode != "decode"):  # of which see `Decoder`
                self.call = compile(self.model, cell.compile, dynamic=plan.dynamic(cell), fullgraph=False)
        else:
            torch.manual_seed(plan.seed)
            with plan.device:
                self.model = peers.make(cell.peer, config).to(dtype_of(cell.dtype))
            self.call = self.model if cell.compile == "none" else torch.compile(self.model, dynamic=plan.dynamic(cell))

    def step(self, cell: Cell) -> Step:
        """One step as a call."""
        if cell.mode == "decode":
            return self._decode(cell)
        if cell.mode == "prefill":
            tokens = self._random_tokens(cell, cell.length)
            return partial(self._prefill, tokens)
        needed = self.plan.warmup + self.plan.steps
        data = batches(read_bytes(self.plan.text), cell.batch_size, cell.length)
        ready = cycle([tuple(part.to(self.plan.device) for part in batch) for batch in islice(data, needed)])
        if cell.mode == "forward":
            return partial(self._forward, ready)
        self.optimizer = self.optimizer or torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, fused=True)
        return partial(self._train, ready, self.optimizer)

    def _train(self, ready: Iterator[tuple[Tensor, ...]], optimizer: torch.optim.Optimizer) -> Tensor:
        tokens, labels = next(ready)
        loss = self.call(tokens, labels=labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def _forward(self, ready: Iterator[tuple[Tensor, ...]]) -> None:
        with torch.no_grad():
            self.call(next(ready)[0])

    def _prefill(self, tokens: Tensor) -> None:
        self.call(tokens, max_length=tokens.shape[1], last=True)

    def _decode(self, cell: Cell) -> Step:
        """One token of each row with ``length - 1`` tokens before it; what these are does not matter."""
        tokens = self._random_tokens(cell, 1)[:, 0]
        self.state = state = self.model.init_state(cell.batch_size, cell.length)
        generator = torch.Generator(self.plan.device).manual_seed(self.plan.seed)
        for tensor in state["layers"].values(True, True):
            if tensor.is_floating_point():
                tensor.normal_(std=0.1, generator=generator)
        decoder = Decoder(self.model, state, compile=cell.compile == "model")

        def decode() -> None:
            decoder.pretend(cell.length - 1)
            decoder(tokens)

        return decode

    def _random_tokens(self, cell: Cell, length: int) -> Tensor:
        generator = torch.Generator(self.plan.device).manual_seed(self.plan.seed)
        shape = cell.batch_size, length
        return torch.randint(self.model.vocab_size, shape, generator=generator, device=self.plan.device)

    def peak_bytes(self, step: Step) -> int:
        """The most bytes that tensors take during a step."""
        if self.plan.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.plan.device)
            step()
            return torch.cuda.max_memory_allocated(self.plan.device)
        return self._lasting_bytes() + peak_cpu_bytes(step)

    def _lasting_bytes(self) -> int:
        """Parameters, optimiser state and the state of decoding, which live across steps."""
        tensors: list[Any] = list(self.model.parameters())
        if self.state is not None:
            tensors += self.state.values(True, True)
        if self.optimizer is not None:
            tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a cell names."""
    return getattr(torch, name)


def _time(step: Step, device: torch.device) -> tuple[float, Tensor | None]:
    """Seconds of a step alone, and its loss."""
    _synchronize(device)
    start = perf_counter()
    loss = step()
    _synchronize(device)
    return perf_counter() - start, loss


def _times(step: Step, device: torch.device, together: int, count: int) -> tuple[list[float], Tensor | None]:
    """Seconds of a step, ``count`` times as the mean of so many together, and the last one's loss."""
    marks, loss = [_Mark(device)], None
    for _ in range(count):
        for _ in range(together):
            loss = step()
        marks.append(_Mark(device))
    _synchronize(device)
    return [end.since(start) / together for start, end in pairwise(marks)], loss


class _Mark:
    """A moment: on CUDA when the device comes to it."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.time = perf_counter()
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(device))

    def since(self, earlier: "_Mark") -> float:
        """Seconds, of marks that the device has come to."""
        if self.event is None or earlier.event is None:
            return self.time - earlier.time
        return earlier.event.elapsed_time(self.event) / 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _utilisation(plan: Plan, cell: Cell, tokens_per_s: float) -> Row:
    """FLOPs of a token by the mixers' own counts, and the share of the device's peak that they make.

    Raises:
        RuntimeError: more than the peak, so that one of the two is wrong.
    """
    if cell.mode == "decode":
        return {"flops_per_token": None, "mfu": None}
    flops = plan.config(cell).flops_per_token(cell.length) * (3 if cell.mode == "train" else 1)
    if cell.mode == "prefill":  # the head works on one token of each row
        flops -= 2 * plan.config(cell).dim * plan.config(cell).vocab_size * (1 - 1 / cell.length)
    peak = peak_flops(plan.device, dtype_of(cell.dtype))
    mfu = None if peak is None else flops * tokens_per_s / peak
    if mfu is not None and mfu > 1:
        raise RuntimeError(
            f"{flops:,.0f} FLOPs a token would be {mfu:.0%} of the peak of this GPU: one of them is wrong"
        )
    return {"flops_per_token": flops, "mfu": mfu}
