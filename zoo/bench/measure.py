"""Measuring attention: every cell's errors, memory and time, results kept as they come.

Shapes: B batch, T sequence length, H query heads, G key/value heads, D head dim, R = H / G query heads of a group.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import groupby
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from zoo.bench.failures import LARGEST_ERROR, failure
from zoo.bench.plan import FORCED, Cell, Plan, visible_pairs
from zoo.bench.ranking import rank
from zoo.kernels.attention import Mask, attention, attention_mask
from zoo.machine import describe
from zoo.memory import give_back, peak_bytes
from zoo.results import Results, Row, collect
from zoo.timing import milliseconds, rounded

__all__ = ["attend", "run_plan"]

_TENSORS = ("o", "dq", "dk", "dv")
_CANNOT = ("No available kernel", "No viable backend")  # how PyTorch says that a forced kernel does not take a call


def run_plan(plan: Plan, announce: Callable[[str], None], keep: Callable[[Results], None]) -> Results:
    """Measure every cell.

    Args:
        plan: what to measure.
        announce: told of each cell before it runs, in a line.
        keep: given all results so far after each cell, and once more when they are complete.

    Returns:
        See `collect`; a "ranking" (see `rank`) is added. A cell that its backend cannot serve has the reason as
        "skipped", one that failed has an "error"; they have no figures, and the others go on. See `_measure` for the
        figures.
    """
    settings = {
        "dtype": str(plan.dtype).removeprefix("torch."),
        "tokens": plan.tokens,
        "seed": plan.seed,
        "largest_error": LARGEST_ERROR[plan.dtype],
    }
    with torch.cuda.device(plan.device) if plan.device.type == "cuda" else nullcontext():
        return collect(
            describe(plan.device),
            settings,
            _rows(plan, announce),
            keep,
            cells=plan.cells(),
            conclude=lambda rows: {"ranking": rank(rows)},
        )


def _rows(plan: Plan, announce: Callable[[str], None]) -> Iterator[tuple[Cell, Row]]:
    number, total = 0, len(plan.cells())
    for _, group in groupby(plan.cells(), key=lambda cell: (cell.head_dim, cell.length, cell.window)):
        inputs = None
        for cell in group:
            number += 1
            announce(f"[{number}/{total}] {cell}")
            try:
                inputs = inputs or _Inputs(plan, cell)
                row = _measure(plan, cell, inputs)
            except Exception as error:  # one broken backend must not lose the rest
                row = failure(error)
            torch.compiler.reset()  # each cell has graphs of its own, as many as there are cells
            give_back(plan.device)
            yield cell, row


class _Inputs:
    """The tensors of all cells of one head dim, length and window, and what is exact for them.

    Args:
        plan: the benchmark.
        cell: any of those cells.
    """

    def __init__(self, plan: Plan, cell: Cell) -> None:
        B, H, G = plan.shape(cell)
        generator = torch.Generator(plan.device).manual_seed(plan.seed)
        self.window = cell.window
        self.q, self.k, self.v, self.gradient = (
            torch.randn(B, cell.length, heads, cell.head_dim, generator=generator, device=plan.device, dtype=plan.dtype)
            for heads in (H, G, G, H)
        )
        self.cu_seqlens = torch.arange(B + 1, dtype=torch.int32, device=plan.device) * cell.length

    def views(self, cell: Cell) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Fresh leaves q, k and v, the gradient of the output, and cu_seqlens, as a layout has them."""
        tensors = (self.q, self.k, self.v, self.gradient)
        if cell.layout == "packed":
            tensors = tuple(x.view(1, -1, *x.shape[2:]) for x in tensors)
        *leaves, gradient = (x.detach() for x in tensors)
        return [x.requires_grad_() for x in leaves], gradient, self.cu_seqlens if cell.layout == "packed" else None

    @cached_property
    def exact(self) -> list[tuple[int, int, dict[str, Tensor]]]:
        """Sequence, group, and their output and gradients by the reference, of the first ones and the last."""
        B, _, G, _ = self.k.shape
        return [(*place, self._exact(*place)) for place in dict.fromkeys([(0, 0), (B - 1, G - 1)])]

    def _exact(self, sequence: int, group: int) -> dict[str, Tensor]:
        """One query head at a time."""
        precise = torch.float64 if self.q.dtype == torch.float32 else torch.float32
        R = self.q.shape[2] // self.k.shape[2]
        q, k, v, gradient = (x[sequence, None].to(precise) for x in (self.q, self.k, self.v, self.gradient))
        k, v = k[:, :, group, None], v[:, :, group, None]
        call = partial(attention, window=self.window, impl="reference")
        heads = []
        for head in range(group * R, (group + 1) * R):
            leaves = [x.detach().requires_grad_() for x in (q[:, :, head, None], k, v)]
            heads.append(_forward_backward(call, leaves, gradient[:, :, head, None]))
        o, dq, dk, dv = zip(*heads, strict=True)
        return {
            "o": torch.cat(o, 2),
            "dq": torch.cat(dq, 2),
            "dk": torch.stack(dk).sum(0),
            "dv": torch.stack(dv).sum(0),
        }

    def errors(self, found: tuple[Tensor, ...]) -> dict[str, float]:
        """The largest |found - exact| / |exact| of each tensor, or difference where that is zero; inf if not finite."""
        B, T = self.q.shape[:2]
        errors = {name: 0.0 if x.isfinite().all() else inf for name, x in zip(_TENSORS, found, strict=True)}
        for sequence, group, tensors in self.exact:
            for (name, exact), x in zip(tensors.items(), found, strict=True):
                heads = slice(group * exact.shape[2], (group + 1) * exact.shape[2])
                difference = x.reshape(B, T, *x.shape[2:])[sequence, None, :, heads].to(exact.dtype) - exact
                errors[name] = max(errors[name], (difference.norm() / (exact.norm().item() or 1.0)).item())
        return errors


def _measure(plan: Plan, cell: Cell, inputs: _Inputs) -> Row:
    """The figures of one cell.

    Returns:
        Times in milliseconds, as quantiles, with a mask made beforehand where the backend wants one, as layers share
        it; ``peak_bytes`` of tensors that forward and backward make, with the mask; ``visible_pairs`` of each head;
        TFLOP/s over these pairs, a forward counting 4 D for each of them and a backward 2.5 times that; ``errors``
        relative to the reference in fp32 (fp64 for fp32), and whether they are all small enough for the dtype.
    """
    B, H, G = plan.shape(cell)
    leaves, gradient, cu_seqlens = inputs.views(cell)
    visible: dict[str, Any] = {"window": cell.window, "cu_seqlens": cu_seqlens}
    alone = partial(attend, cell.backend, **visible)
    errors = inputs.errors(_forward_backward(alone, leaves, gradient))
    peak = peak_bytes(lambda: _forward_backward(alone, leaves, gradient), plan.device)
    call = partial(attend, cell.backend, **visible, mask=_mask(cell, cu_seqlens, leaves[0]))

    def forward() -> None:
        with torch.no_grad():
            call(*leaves)

    def forward_backward() -> tuple[Tensor, ...]:
        return _forward_backward(call, leaves, gradient)

    times: dict[str, Any] = {
        "forward": milliseconds(forward, plan.device),
        "forward_backward": milliseconds(forward_backward, plan.device),
    }
    pairs = B * visible_pairs(cell.length, cell.window)
    flops = {"forward": 4 * H * cell.head_dim * pairs, "forward_backward": 14 * H * cell.head_dim * pairs}
    return {
        "batch_size": B,
        "num_heads": H,
        "num_kv_heads": G,
        **{f"{name}_ms": marks for name, marks in times.items()},
        "peak_bytes": peak,
        "visible_pairs": pairs,
        **{f"{name}_tflops": rounded(flops[name] / marks["median"] / 1e9) for name, marks in times.items()},
        "errors": {name: rounded(error) for name, error in errors.items()},
        "correct": all(error <= LARGEST_ERROR[plan.dtype] for error in errors.values()),
    }


def _mask(cell: Cell, cu_seqlens: Tensor | None, q: Tensor) -> Mask | None:
    """What a call of this kind would make to know what is visible."""
    impl, dims = "sdpa" if cell.backend in FORCED else cell.backend, (cell.head_dim, cell.head_dim)
    return attention_mask(
        q.shape[1],
        window=cell.window,
        cu_seqlens=cu_seqlens,
        head_dims=dims,
        device=q.device,
        dtype=q.dtype,
        impl=impl,
    )


def attend(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Mask | None = None,
) -> Tensor:
    """The output of one of `BACKENDS`, or of the reference, by a mask if there is one.

    Raises:
        ValueError: it cannot serve the call; the message begins with "impl:".
    """
    visible = {"window": window, "cu_seqlens": cu_seqlens} if mask is None else {"mask": mask}
    call = partial(attention, q, k, v, **visible)
    if backend not in FORCED:
        return call(impl=backend)
    if window is not None or cu_seqlens is not None:
        raise ValueError(f"impl: {backend!r} needs a full dense call, as PyTorch's kernel knows no others")
    if backend == "cudnn" and q.device.type != "cuda":
        raise ValueError(f"impl: {backend!r} needs CUDA tensors, got {q.device}")
    try:
        with sdpa_kernel(FORCED[backend]):
            return call(impl="sdpa")
    except RuntimeError as error:
        if not str(error).startswith(_CANNOT):
            raise
        kind = f"head dim {q.shape[-1]} in {str(q.dtype).removeprefix('torch.')} on this device"
        raise ValueError(f"impl: {backend!r} does not take {kind}") from error


def _forward_backward(call: Callable[..., Tensor], leaves: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of q, k and v; the autograd graph ends with the call."""
    o = call(*leaves)
    return o.detach(), *torch.autograd.grad(o, leaves, gradient)
