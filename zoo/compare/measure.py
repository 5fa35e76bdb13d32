"""Measuring one architecture: time, memory, compilation, in one mode.

Shapes: B batch, T sequence length.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from zoo.builder import construct
from zoo.compare.plan import Cell, Plan
from zoo.memory import peak_cpu_bytes
from zoo.text import batches

__all__ = ["Runner"]

_LEARNING_RATE = 1e-3


class Runner:
    """Runs the cells of one recipe, mode and compilation on one model, so that lengths can share a graph.

    Args:
        plan: the comparison.
        cell: any of those cells.
    """

    def __init__(self, plan: Plan, cell: Cell) -> None:
        self.plan = plan
        torch.compiler.reset()
        counters.clear()
        self.model = construct(plan.configs[cell.recipe], plan.device, plan.dtype, plan.seed)
        self.initial = {name: tensor.to("cpu", copy=True) for name, tensor in self.model.state_dict().items()}
        self.call: Callable[..., Tensor] = self.model
        if cell.compiled:
            self.call = torch.compile(self.model, dynamic=True if len(plan.lengths) > 1 else None)

    def run(self, cell: Cell) -> dict[str, Any]:
        """Measure.

        Returns:
            One row of the results: see `Plan` for the settings, and the keys below for the figures. Times are
            medians over the steps; ``peak_bytes`` counts tensors: parameters, optimiser state and activations.
        """
        plan, config = self.plan, self.plan.configs[cell.recipe]
        batch_size = max(1, plan.tokens_per_step // cell.length)
        step = self._step(cell, batches(plan.text, batch_size, cell.length))
        first, _ = self._time(step)
        for _ in range(plan.warmup - 1):
            step()
        timed = [self._time(step) for _ in range(plan.steps)]
        seconds = [time for time, _ in timed]
        typical = median(seconds)
        low, *_, high = quantiles(seconds, n=5) if len(seconds) > 1 else seconds * 2
        tokens = batch_size * cell.length
        flops = config.flops_per_token(cell.length) * (3 if cell.mode == "train" else 1)
        return {
            "batch_size": batch_size,
            "tokens_per_s": tokens / typical,
            "tokens_per_s_p20": tokens / high,
            "tokens_per_s_p80": tokens / low,
            "step_ms": typical * 1e3,
            "peak_bytes": self._peak_bytes(step),
            "compile_s": max(first - typical, 0.0) if cell.compiled else None,
            "graphs": counters["stats"]["unique_graphs"] if cell.compiled else None,
            "graph_breaks": sum(counters["graph_break"].values()) if cell.compiled else None,
            "params": sum(parameter.numel() for parameter in self.model.parameters()),
            "flops_per_token": flops,
            "loss": timed[-1][1],
        }

    def _step(self, cell: Cell, data: Iterator[tuple[Tensor, Tensor]]) -> Callable[[], Tensor | None]:
        """One step as a call; training starts from the initial weights again."""
        ready = self._on_device(data)
        if cell.mode == "forward":

            def forward() -> None:
                with torch.no_grad():
                    self.call(next(ready)[0])

            return forward
        self.model.load_state_dict(self.initial)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, fused=True)

        def train() -> Tensor:
            tokens, labels = next(ready)
            loss = self.call(tokens, labels=labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

        return train

    def _on_device(self, data: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches that are there already when a step is timed."""
        needed = self.plan.warmup + self.plan.steps + 2
        ready = [tuple(part.to(self.plan.device) for part in batch) for batch in islice(data, needed)]
        return iter(ready)  # pyright: ignore[reportReturnType]

    def _time(self, step: Callable[[], Tensor | None]) -> tuple[float, float | None]:
        """Seconds of one step, and its loss."""
        self._synchronize()
        start = perf_counter()
        loss = step()
        self._synchronize()
        return perf_counter() - start, None if loss is None else loss.item()

    def _synchronize(self) -> None:
        if self.plan.device.type == "cuda":
            torch.cuda.synchronize(self.plan.device)

    def _peak_bytes(self, step: Callable[[], Tensor | None]) -> int:
        """The most bytes that tensors take during a step."""
        if self.plan.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.plan.device)
            step()
            return torch.cuda.max_memory_allocated(self.plan.device)
        return self._lasting_bytes() + peak_cpu_bytes(step)

    def _lasting_bytes(self) -> int:
        """Parameters and optimiser state, which live across steps."""
        tensors = list(self.model.parameters())
        if hasattr(self, "optimizer"):
            states = self.optimizer.state.values()
            tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.nbytes for tensor in tensors)
