"""The kernels kappa(x, y) that compare two vectors, as functions of their logit scale * x . y (arXiv 2505.19488)."""

from collections.abc import Callable
from types import NoneType
from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = ["KAPPAS", "Kappa", "check_kappa", "default_scale", "kappa_of", "weigh"]

Kappa = Literal["softmax", "linear", "relu", "exp", "round"]
"""softmax is normalised over the visible keys; the others take each logit alone: itself, max(0, x), e^x, the nearest
value of so many decimals."""
KAPPAS: tuple[str, ...] = get_args(Kappa)
MAX_DECIMALS = 6
"""float32 has no more."""


def check_kappa(name: str, kappa: str, round_decimals: int, scale: float | None) -> None:
    """Refuse a kernel that does not exist.

    Args:
        name: of the argument.
        kappa: its value.
        round_decimals: given with it.
        scale: of its logits, likewise.

    Raises:
        ValueError: as it says.
    """
    if kappa not in KAPPAS:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, KAPPAS))}, got {kappa!r}")
    if not isinstance(round_decimals, int) or not 0 <= round_decimals <= (MAX_DECIMALS if kappa == "round" else 0):
        allowed = f"a whole number from 0 to {MAX_DECIMALS}" if kappa == "round" else f"0, for {kappa!r} does not round"
        raise ValueError(f"round_decimals: expected {allowed}, got {round_decimals!r}")
    if not isinstance(scale, (int, float, NoneType)):
        raise ValueError(f"scale: expected a number, got {scale!r}")


def default_scale(kappa: str, head_dim: int) -> float:
    """Of the logits: head_dim^-1/2 for softmax, as in attention, and 1 for the others."""
    return head_dim**-0.5 if kappa == "softmax" else 1.0


def weigh(logits: Tensor, hidden: Tensor, kappa: str, round_decimals: int) -> Tensor:
    """kappa of the visible logits and 0 for the hidden ones, differentiable; a row that sees no key is 0.

    Args:
        logits: [..., keys], scaled.
        hidden: bool, broadcastable to the logits.
        kappa: one of `KAPPAS`.
        round_decimals: that "round" keeps; its gradient is that of "linear" (straight-through).

    Returns:
        [..., keys].
    """
    lowest = torch.finfo(logits.dtype).min  # -inf would make NaN of a row that sees no key
    return kappa_of(logits.masked_fill(hidden, lowest), kappa, round_decimals).masked_fill(hidden, 0)


def kappa_of(logits: Tensor, kappa: str, round_decimals: int) -> Tensor:
    """kappa of logits [..., keys] that are all visible; arguments and result as in `weigh`."""
    return _FUNCTIONS[kappa](logits, round_decimals)


def _round(x: Tensor, decimals: int) -> Tensor:
    return torch.round(x, decimals=decimals).detach() + (x - x.detach())


_FUNCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "softmax": lambda x, _: x.softmax(-1),
    "linear": lambda x, _: x,
    "relu": lambda x, _: x.relu(),
    "exp": lambda x, _: x.exp(),
    "round": _round,
}
