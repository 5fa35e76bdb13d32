"""The depthwise causal convolution of a few taps: the public function. Validation, then dispatch.

Shapes: B batch, T tokens, C channels, K taps.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from zoo.kernels.checks import check_shape, check_tensors
from zoo.kernels.short_convolution import ops
from zoo.kernels.short_convolution.reference import short_convolution_reference
from zoo.kernels.triton_support import missing_for_triton

__all__ = ["Activation", "short_convolution"]

Activation = Literal["silu"]
"""What may follow a convolution."""

_IMPLS = ("auto", "torch", "triton")
_MAX_TAPS = 16  # for which the kernels' registers suffice


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    positions: Tensor | None = None,
    taps: Tensor | None = None,
    widths: Sequence[int] | None = None,
    impl: str = "auto",
) -> tuple[Tensor, ...]:
    """y_t = phi(bias + sum_{j < K} weight_j x_{t-j}), channel by channel, never across a document's start.

    Differentiable in x, weight, bias and, in PyTorch, taps. Triton computes in float32 and rounds once; PyTorch
    computes in the dtype that x and weight promote to, and rounds before phi.

    Args:
        x: [B, T, C] with T and C >= 1, floating point, any strides, like all the tensors here.
        weight: [K, C]: weight_0 is that of the token itself.
        bias: [C]; none if None.
        activation: phi: "silu", or the identity if None.
        positions: [1, T] int32 or int64 within each document for packed sequences, with B = 1; their values are not
            checked.
        taps: [B, K - 1, C], the tokens before x; zeros if None.
        widths: channels of the parts that y is cut into, at least 0 each and C in all; one part if None. To cut y later
            would cost Triton's backward a copy.
        impl: "triton", CUDA kernels for half precision and float32 with K <= 16 and no taps; "torch", plain PyTorch on
            any device; or "auto": Triton where it can, else PyTorch. An explicit choice never falls back.

    Returns:
        The parts of y, [B, T, width] each, in the dtype of x.

    Raises:
        ValueError: an argument is not as above; the message names it, what was expected and what came.
    """
    _check(x, weight, bias, activation, positions, taps, widths, impl)
    parts = [x.shape[-1]] if widths is None else list(widths)
    silu = activation == "silu"
    missing = _missing(x, weight, taps)
    if impl == "triton" and missing is not None:
        raise ValueError(f"impl: 'triton' needs {missing}")
    if impl != "torch" and missing is None:
        return tuple(ops.short_convolution(x, weight, bias, positions, parts, silu))
    return short_convolution_reference(x, weight, bias, positions, taps, silu=silu).split(parts, -1)


def _missing(x: Tensor, weight: Tensor, taps: Tensor | None) -> str | None:
    """What a call lacks for Triton, or None."""
    missing = missing_for_triton("x", x.device, x.dtype)
    if missing is not None:
        return missing
    if weight.shape[0] > _MAX_TAPS:
        return f"K of at most {_MAX_TAPS}, got {weight.shape[0]}"
    if taps is not None:
        return f"taps to be None, got {list(taps.shape)}"
    return None


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    positions: Tensor | None,
    taps: Tensor | None,
    widths: Sequence[int] | None,
    impl: str,
) -> None:
    if impl not in _IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(map(repr, _IMPLS))}, got {impl!r}")
    if activation not in (None, "silu"):
        raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")
    if x.ndim != 3 or x.shape[1] < 1 or x.shape[2] < 1:
        raise ValueError(f"x: expected [B, T, C] with T and C >= 1, got {list(x.shape)}")
    batch, length, channels = x.shape
    if weight.ndim != 2 or weight.shape[0] < 1:
        raise ValueError(f"weight: expected [K, C] with K >= 1, got {list(weight.shape)}")
    size = weight.shape[0]
    if widths is not None and (sum(widths) != channels or any(width < 0 for width in widths)):
        raise ValueError(f"widths: expected numbers of at least 0, C = {channels} in all, got {list(widths)}")
    check_shape("weight", "[K, C]", weight, (size, channels))
    if bias is not None:
        check_shape("bias", "[C]", bias, (channels,))
    if taps is not None:
        check_shape("taps", "[B, K - 1, C]", taps, (batch, size - 1, channels))
    if positions is not None:
        if batch != 1:
            raise ValueError(f"positions: packed sequences are one row, expected B = 1, got B = {batch}")
        check_shape("positions", "[1, T]", positions, (1, length))
        if positions.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"positions: expected int32 or int64, got {positions.dtype}")
    check_tensors({"x": x, "weight": weight, "bias": bias, "taps": taps}, {"positions": positions})
