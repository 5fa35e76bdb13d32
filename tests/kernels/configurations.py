"""The configurations of kernels that tests go through."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["SIZES", "distinct", "with_warps"]

SIZES = (16, 32, 64, 128, 256)


def distinct(configuration: Callable[..., Any]) -> list[tuple[torch.dtype, tuple[int, int]]]:
    """The dtypes and head dims that between them need every configuration there is."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        dims = {configuration(*each, dtype): each for each in ((a, b) for a in SIZES for b in SIZES)}
        found += [(dtype, each) for each in dims.values()]
    return found


def with_warps(configuration: Callable[..., Any], warps: int, *kernels: str) -> Callable[..., Any]:
    """The configurations with so many warps for programs of these kernels."""

    def changed(*sizes: Any) -> Any:
        chosen = configuration(*sizes)
        return chosen._replace(**{name: getattr(chosen, name)._replace(warps=warps) for name in kernels})

    return changed
