"""What a benchmark of kernels will measure, decided and checked before anything runs."""

from dataclasses import dataclass
from itertools import product

import torch

from zoo import machine
from zoo.bench.kernels.kernel import Shape
from zoo.bench.kernels.table import KERNELS
from zoo.bench.plan import check_range

__all__ = ["Cell", "Plan", "make_plan"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement.

    Attributes:
        kernel: of `KERNELS`.
        side: of the kernel's.
        length: tokens in a sequence, or slots of a cache; 1 for what has neither.
        num_heads: of queries, keys and values, each.
        head_dim: of queries, keys and values, each.
    """

    kernel: str
    side: str
    length: int
    num_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.kernel}  {self.side}  T {self.length}  H {self.num_heads}  D {self.head_dim}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole benchmark.

    Attributes:
        kernels: of `KERNELS`.
        lengths: tokens in a sequence, each. One that a window covers whole is left out for what has a window.
        head_dims: each.
        heads: numbers of them, each.
        window: visible keys of a token, for what has a window.
        tokens: of a call, rounded down to whole sequences, but at least one. What does not depend on the length has
            rows of its own number.
        seed: of the tensors' values.
        device: where it runs.
        dtype: of the tensors.
    """

    kernels: tuple[str, ...]
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    heads: tuple[int, ...]
    window: int
    tokens: int
    seed: int
    device: torch.device
    dtype: torch.dtype

    def cells(self) -> list[Cell]:
        """Every measurement; those that share their tensors stand together."""
        return [
            Cell(name, side.name, length, num_heads, head_dim)
            for name in self.kernels
            for head_dim, num_heads, length in product(self.head_dims, self.heads, self._lengths(name))
            for side in KERNELS[name].sides
        ]

    def _lengths(self, name: str) -> tuple[int, ...]:
        if not KERNELS[name].by_length:
            return (1,)
        return tuple(length for length in self.lengths if not KERNELS[name].windowed or length > self.window)

    def shape(self, cell: Cell) -> Shape:
        """Of a cell's call."""
        batch_size = KERNELS[cell.kernel].batch_size or max(1, self.tokens // cell.length)
        sizes = cell.length, cell.num_heads, cell.head_dim
        return Shape(batch_size, *sizes, window=self.window, dtype=self.dtype, device=self.device)


def make_plan(
    *,
    kernels: tuple[str, ...] = tuple(KERNELS),
    lengths: tuple[int, ...] | None = None,
    head_dims: tuple[int, ...] | None = None,
    heads: tuple[int, ...] | None = None,
    window: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> Plan:
    """Fill in what was left open, and refuse what cannot run.

    Args:
        kernels: of `KERNELS`.
        lengths: 64 and 256 on a CPU; 512, 2k, 8k and 32k on CUDA, if None.
        head_dims: 32 on a CPU, 64 and 128 on CUDA, if None.
        heads: 2 on a CPU, 16 on CUDA, if None.
        window: 32 on a CPU, 1024 on CUDA, if None.
        tokens: 256 on a CPU, 16384 on CUDA, if None.
        seed: of the tensors' values.
        device: CUDA when there is one, if None.
        dtype: fp32 on a CPU, bf16 on CUDA, if None.

    Raises:
        ValueError: an option is out of range or unfit.
    """
    where = machine.find(device)
    on_cuda = where.type == "cuda"
    check_range({"window": window, "tokens": tokens})
    check_range({"seed": seed}, least=0)
    check_range(
        {name: max(sizes or (1,)) for name, sizes in (("lengths", lengths), ("head-dims", head_dims), ("heads", heads))}
    )
    plan = Plan(
        kernels=kernels,
        lengths=lengths or ((512, 2048, 8192, 32768) if on_cuda else (64, 256)),
        head_dims=head_dims or ((64, 128) if on_cuda else (32,)),
        heads=heads or ((16,) if on_cuda else (2,)),
        window=window or (1024 if on_cuda else 32),
        tokens=tokens or (16384 if on_cuda else 256),
        seed=seed,
        device=where,
        dtype=dtype or (torch.bfloat16 if on_cuda else torch.float32),
    )
    if not plan.cells():
        longest = max(plan.lengths)
        raise ValueError(f"--window: got {plan.window}, allowed: below the longest sequence, which has {longest}")
    return plan
