"""Bytes of real text as language-model data.

Shapes: B batch, T sequence length.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["batches", "read_bytes"]

_ENOUGH = 4 << 20


def read_bytes(path: Path | None = None) -> Tensor:
    """The bytes of a file, or of the Python standard library's own sources.

    Args:
        path: a text file; None takes the first 4 MiB of the library's modules, in alphabetical order.

    Returns:
        [N] uint8.

    Raises:
        ValueError: the file is missing, cannot be read, or is empty.
    """
    if path is None:
        data = _standard_library()
    else:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ValueError(f"text: cannot read {path}: {error.strerror or error}") from None
    if not data:
        raise ValueError(f"text: {path} is empty")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _standard_library() -> bytes:
    data = bytearray()
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        data += module.read_bytes()
        if len(data) >= _ENOUGH:
            break
    return bytes(data[:_ENOUGH])


def batches(text: Tensor, batch_size: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of consecutive, non-overlapping pieces of the text, from the start again at its end, for ever.

    Args:
        text: [N] uint8.
        batch_size: B.
        length: T.

    Returns:
        An iterator of tokens [B, T] int64 and labels [B, T] int64, the byte after each.

    Raises:
        ValueError: the text is shorter than one sequence and its last label.
    """
    pieces = (text.shape[0] - 1) // length
    if pieces < 1:
        raise ValueError(f"text: {text.shape[0]} bytes are too few for sequences of {length} and the byte after")
    return _batches(text, batch_size, length, pieces)


def _batches(text: Tensor, batch_size: int, length: int, pieces: int) -> Iterator[tuple[Tensor, Tensor]]:
    start = 0
    while True:
        rows = (torch.arange(start, start + batch_size) % pieces * length)[:, None] + torch.arange(length + 1)
        window = text[rows].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
        start = (start + batch_size) % pieces
