"""What every Triton kernel here needs of a call."""

from importlib.util import find_spec

import torch
from torch import Tensor

__all__ = ["missing_for_triton"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INSTALLED = find_spec("triton") is not None


def missing_for_triton(name: str, x: Tensor) -> str | None:
    """What a call lacks, or None.

    Args:
        name: of the argument whose dtype the kernels take.
        x: its value.
    """
    if not _INSTALLED:
        return "the package triton, which is not installed"
    if x.device.type != "cuda":
        return f"CUDA tensors, got {x.device}"
    if x.dtype not in _DTYPES:
        return f"{name} in bfloat16, float16 or float32, got {x.dtype}"
    return None
