"""A batch as rows, as the Triton kernels read it: row b * T + t.

Shapes: B batch, T tokens.
"""

import torch
from torch import Tensor

__all__ = ["rows"]


def rows(x: Tensor) -> Tensor:
    """[B, T, ..., d] -> [B * T, ..., d] with adjacent d, a view if there is one, whose row stride is free of T."""
    if x.shape[1] == 1 or x.stride(-1) != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.reshape(-1, *x.shape[2:])
