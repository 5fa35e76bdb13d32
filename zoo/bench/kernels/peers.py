"""Other libraries, where they are installed."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from zoo.bench.failures import Skipped

__all__ = ["fla_module"]


def fla_module(name: str, device: torch.device) -> Any:
    """A module of flash-linear-attention.

    Args:
        name: of it, below ``fla``.
        device: which its functions shall run on.

    Raises:
        Skipped: it cannot be had, or not there.
    """
    if find_spec("fla") is None:
        raise Skipped("flash-linear-attention is not installed")
    if device.type != "cuda":
        raise Skipped(f"flash-linear-attention needs CUDA tensors, got {device}")
    try:
        return import_module(f"fla.{name}")
    except ImportError as error:
        raise Skipped(f"flash-linear-attention has no fla.{name} that can be imported: {error}") from error
