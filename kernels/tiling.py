"""What the rules for the layout of Triton kernels have in common. Needs no Triton."""

from typing import NamedTuple

__all__ = ["Tiles", "block_size"]

_SMALLEST = 16  # that a matrix product takes


class Tiles(NamedTuple):
    """How a kernel is compiled that goes over tiles of rows and keys.

    Attributes:
        rows: in a tile.
        keys: in a tile.
        warps: of a program.
        stages: of its software pipeline.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def block_size(size: int) -> int:
    """A head's size rounded up to a power of two, at least 16."""
    return max(_SMALLEST, 1 << (size - 1).bit_length())
