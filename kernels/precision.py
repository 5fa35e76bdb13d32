"""In what precision the references and the states compute."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["layers_dtype", "precise", "precise_dtype", "without_autocast"]


def precise_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def precise(x: Tensor) -> Tensor:
    """x in that dtype."""
    return x.to(precise_dtype(x.dtype))


def layers_dtype(x: Tensor) -> torch.dtype:
    """The dtype that linear layers give to what they make of x: autocast's, or that of x."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast off: it reaches into ops and references, and would turn their float32 products into bfloat16 ones."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
