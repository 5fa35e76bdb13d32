"""Packed sequences: several documents one after the other in a single row, told apart by ``cu_seqlens``."""

from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["can_read_values", "check_cu_seqlens", "num_blocks"]


def can_read_values(x: Tensor) -> bool:
    """Whether reading the values of x is free: in an eager call, with a real tensor on the CPU.

    In a graph it would break the graph, and on an accelerator it would wait for the device.
    """
    return (
        not torch.compiler.is_compiling() and x.device.type == "cpu" and not isinstance(x, torch._subclasses.FakeTensor)  # pyright: ignore[reportPrivateImportUsage]
    )


def check_cu_seqlens(cu_seqlens: Tensor, *, batch_size: int, length: int, device: torch.device) -> None:
    """Refuse cumulative lengths that do not describe one row of packed documents.

    Args:
        cu_seqlens: [N + 1] int32 or int64: 0, the end of each document, ..., ``length``; never falling.
        batch_size: rows that the caller passes with it; packing wants 1.
        length: tokens in the row.
        device: of the tokens.

    Raises:
        ValueError: not as above. Values are read only where that is free (`can_read_values`).
    """
    if batch_size != 1:
        raise ValueError(f"cu_seqlens: packed sequences are one row, expected B = 1, got B = {batch_size}")
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens: expected a tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens: expected [N + 1] int32 or int64 with N >= 1, got {list(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens: expected the tokens' device, {device}, got {cu_seqlens.device}")
    if can_read_values(cu_seqlens):
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != length or any(b < a for a, b in pairwise(ends)):
            fall = next((f"..., {a}, {b}, " for a, b in pairwise(ends) if b < a), "")
            got = ends if len(ends) <= 10 else f"{ends[0]}, {fall}..., {ends[-1]}"
            raise ValueError(f"cu_seqlens: expected to rise from 0 to T = {length}, got {got}")


def num_blocks(seq_len: int, cu_seqlens: Tensor | None, size: int) -> int:
    """How many blocks of so many rows a row of the batch has; packed, an upper bound free of documents' lengths."""
    documents = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (seq_len + (size - 1) * documents) // size
