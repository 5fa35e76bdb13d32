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
from zoo.compare.plan import DECODING, Cell, Plan
from zoo.decoding import Decoder
from zoo.memory import peak_cpu_bytes, total_bytes
from zoo.text import batches

__all__ = ["Runner"]

_LEARNING_RATE = 1e-3

Step = Callable[[], Tensor | None]


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
            medians over the steps; ``peak_bytes`` counts tensors: parameters, optimiser state and activations. Where
            the state of decoding alone is more than there is memory for, the row has that as "skipped" instead.
        """
        plan, config = self.plan, self.plan.configs[cell.recipe]
        decodes = cell.mode in DECODING
        state_bytes = cell.batch_size * config.state_bytes(cell.length, plan.dtype) if decodes else 0
        self.state = None
        if state_bytes > (total := total_bytes(plan.device)):
            return {"skipped": f"a state of {state_bytes:,} bytes does not fit into memory of {total:,}"}
        step = self._decoding_step(cell) if decodes else self._step(cell)
        first, _ = self._time(step)
        for _ in range(plan.warmup - 1):
            step()
        timed = [self._time(step) for _ in range(plan.steps)]
        seconds = [time for time, _ in timed]
        typical = median(seconds)
        low, *_, high = quantiles(seconds, n=5, method="inclusive") if len(seconds) > 1 else seconds * 2
        tokens = cell.batch_size * (1 if cell.mode == "decode" else cell.length)
        flops = config.flops_per_token(cell.length) * (3 if cell.mode == "train" else 1)
        return {
            "tokens_per_s": tokens / typical,
            "tokens_per_s_p20": tokens / high,
            "tokens_per_s_p80": tokens / low,
            "step_ms": typical * 1e3,
            "peak_bytes": self._peak_bytes(step),
            "compile_s": max(first - typical, 0.0) if cell.compiled else None,
            "graphs": counters["stats"]["unique_graphs"] if cell.compiled else None,
            "graph_breaks": sum(counters["graph_break"].values()) if cell.compiled else None,
            "params": sum(parameter.numel() for parameter in self.model.parameters()),
            "flops_per_token": None if cell.mode == "decode" else flops,
            "loss": timed[-1][1],
        } | ({"state_bytes": state_bytes} if decodes else {})

    def _decoding_step(self, cell: Cell) -> Step:
        """A prefill, or one token of each row with ``length - 1`` tokens before it; what these are does not matter."""
        generator = torch.Generator(self.plan.device).manual_seed(self.plan.seed)
        shape = cell.batch_size, 1 if cell.mode == "decode" else cell.length
        tokens = torch.randint(self.model.vocab_size, shape, generator=generator, device=self.plan.device)
        if cell.mode == "prefill":

            def prefill() -> None:
                self.call(tokens, max_length=cell.length, last=True)

            return prefill
        counters.clear()  # each batch and length has a graph of its own
        state = self.model.init_state(cell.batch_size, cell.length)
        for tensor in state["layers"].values(True, True):
            tensor.normal_(std=0.1, generator=generator)
        decoder, self.state = Decoder(self.model, state, compile=cell.compiled), state

        def decode() -> None:
            decoder.pretend(cell.length - 1)
            decoder(tokens[:, 0])

        return decode

    def _step(self, cell: Cell) -> Step:
        """One step as a call; training starts from the initial weights again."""
        ready = self._on_device(batches(self.plan.text, cell.batch_size, cell.length))
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

    def _time(self, step: Step) -> tuple[float, float | None]:
        """Seconds of one step, and its loss."""
        self._synchronize()
        start = perf_counter()
        loss = step()
        self._synchronize()
        return perf_counter() - start, None if loss is None else loss.item()

    def _synchronize(self) -> None:
        if self.plan.device.type == "cuda":
            torch.cuda.synchronize(self.plan.device)

    def _peak_bytes(self, step: Step) -> int:
        """The most bytes that tensors take during a step."""
        if self.plan.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.plan.device)
            step()
            return torch.cuda.max_memory_allocated(self.plan.device)
        return self._lasting_bytes() + peak_cpu_bytes(step)

    def _lasting_bytes(self) -> int:
        """Parameters, optimiser state and the state of decoding, which live across steps."""
        tensors: list[Tensor] = list(self.model.parameters())
        if self.state is not None:
            tensors += [value for value in self.state.values(True, True) if isinstance(value, Tensor)]
        if hasattr(self, "optimizer"):
            states = self.optimizer.state.values()
            tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.nbytes for tensor in tensors)
