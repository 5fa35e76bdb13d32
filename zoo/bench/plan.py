"""What a benchmark of attention will measure, decided and checked before anything runs."""

from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch.nn.attention import SDPBackend

from zoo import machine

__all__ = [
    "BACKENDS",
    "FORCED",
    "LAYOUTS",
    "PYTORCH",
    "Cell",
    "Layout",
    "Plan",
    "check_range",
    "make_plan",
    "visible_pairs",
]

FORCED = {"cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION}  # of those that sdpa has
BACKENDS = ("auto", "sdpa", "cudnn", "sdpa-flash", "flash", "flex", "xformers", "triton")
PYTORCH = ("sdpa", *FORCED, "flash", "flex")  # what PyTorch brings
Layout = Literal["dense", "packed"]
LAYOUTS: tuple[Layout, ...] = ("dense", "packed")
_MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement.

    Attributes:
        backend: of `BACKENDS`.
        length: tokens in a sequence.
        window: visible keys of a token, itself included; None for all before.
        head_dim: of queries, keys and values.
        layout: "dense" (sequences as rows) or "packed" (the same tokens as documents of one row).
    """

    backend: str
    length: int
    window: int | None
    head_dim: int
    layout: Layout

    def __str__(self) -> str:
        return f"{self.backend}  T {self.length}  window {self.window or 'full'}  D {self.head_dim}  {self.layout}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole benchmark.

    Attributes:
        backends: of `BACKENDS`.
        lengths: tokens in a sequence, each.
        windows: visible keys, each; None for all. One that no token of a sequence fills is left out.
        head_dims: of queries, keys and values, each.
        layouts: of `LAYOUTS`.
        num_heads: query heads; None for as many as make 2048 channels.
        num_kv_heads: key/value heads; None for as many as query heads.
        tokens: of a call, rounded down to whole sequences, but at least one.
        seed: of the tensors' values.
    """

    backends: tuple[str, ...]
    lengths: tuple[int, ...]
    windows: tuple[int | None, ...]
    head_dims: tuple[int, ...]
    layouts: tuple[Layout, ...]
    num_heads: int | None
    num_kv_heads: int | None
    tokens: int
    seed: int
    device: torch.device
    dtype: torch.dtype

    def cells(self) -> list[Cell]:
        """Every measurement; those that share their tensors stand together."""
        return [
            Cell(backend, length, window, head_dim, layout)
            for head_dim, length, window in product(self.head_dims, self.lengths, self.windows)
            if window is None or window < length
            for layout, backend in product(self.layouts, self.backends)
        ]

    def shape(self, cell: Cell) -> tuple[int, int, int]:
        """Sequences, query heads and key/value heads of a cell."""
        num_heads = self.num_heads or max(1, 2048 // cell.head_dim)
        return max(1, self.tokens // cell.length), num_heads, self.num_kv_heads or num_heads


def visible_pairs(length: int, window: int | None) -> int:
    """How many keys the tokens of a sequence see, together."""
    visible = min(window or length, length)
    return length * visible - visible * (visible - 1) // 2


def check_range(options: dict[str, int | None], least: int = 1) -> None:
    """Refuse what is out of range.

    Args:
        options: by name; None for one that was not given.
        least: that is allowed.

    Raises:
        ValueError: as it says.
    """
    for name, value in options.items():
        if value is not None and not least <= value <= _MOST:
            raise ValueError(f"--{name}: got {value}, allowed: from {least} to {_MOST}")


def make_plan(
    *,
    backends: tuple[str, ...] = BACKENDS,
    lengths: tuple[int, ...] | None = None,
    windows: tuple[int | None, ...] | None = None,
    head_dims: tuple[int, ...] | None = None,
    layouts: tuple[Layout, ...] = LAYOUTS,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> Plan:
    """Fill in what was left open, and refuse what cannot run.

    Args:
        backends: of `BACKENDS`.
        lengths: 256 and 512 on a CPU; 512, 1k, 4k, 16k and 32k on CUDA, if None.
        windows: full and 64 on a CPU; full, 256, 1024 and 4096 on CUDA, if None.
        head_dims: 32 on a CPU, 64 and 128 on CUDA, if None.
        layouts: of `LAYOUTS`.
        num_heads: 4 on a CPU, 2048 channels' on CUDA, if None.
        num_kv_heads: as many as query heads, if None.
        tokens: 512 on a CPU, 16384 on CUDA, if None.
        seed: of the tensors' values.
        device: CUDA when there is one, if None.
        dtype: fp32 on a CPU, bf16 on CUDA, if None.

    Raises:
        ValueError: an option is out of range or unfit.
    """
    where = machine.find(device)
    on_cuda = where.type == "cuda"
    check_range({"heads": num_heads, "kv-heads": num_kv_heads, "tokens": tokens})
    check_range({"seed": seed}, least=0)
    check_range({"lengths": max(lengths or (1,)), "head-dims": max(head_dims or (1,))})
    plan = Plan(
        backends=backends,
        lengths=lengths or ((512, 1024, 4096, 16384, 32768) if on_cuda else (256, 512)),
        windows=windows or ((None, 256, 1024, 4096) if on_cuda else (None, 64)),
        head_dims=head_dims or ((64, 128) if on_cuda else (32,)),
        layouts=layouts,
        num_heads=num_heads if on_cuda else num_heads or 4,
        num_kv_heads=num_kv_heads,
        tokens=tokens or (16384 if on_cuda else 512),
        seed=seed,
        device=where,
        dtype=dtype or (torch.bfloat16 if on_cuda else torch.float32),
    )
    cells = plan.cells()
    if not cells:
        got, longest = ",".join(map(str, plan.windows)), max(plan.lengths)
        raise ValueError(f"--windows: got {got}, allowed: full, or below the longest sequence, which has {longest}")
    for cell in cells:
        _, heads, kv_heads = plan.shape(cell)
        if heads % kv_heads:
            raise ValueError(f"--kv-heads: got {kv_heads}, allowed: divisors of the {heads} query heads")
    return plan
