"""The depthwise causal convolution of a few taps: the public function. Validation, then dispatch.

Shapes: B batch, T tokens, C channels, K taps.
"""

from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from zoo.kernels.checks import check_shape, check_tensors
from zoo.kernels.short_convolution import ops
from zoo.kernels.short_convolution.reference import short_convolution_reference

__all__ = ["Activation", "short_convolution"]

Activation = Literal["silu"]
"""What may follow a convolution."""

_IMPLS = ("auto", "torch", "triton")
_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_HAS_TRITON = find_spec("triton") is not None
_MAX_TAPS = 16  # for which the kernels' registers suffice


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    positions: Tensor | None = None,
    taps: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """y_t = phi(bias + sum_{j < K} weight_j x_{t-j}), channel by channel, never across a document's start.

    Differentiable in x, weight, bias and, in PyTorch, taps. Triton computes in float32 and rounds once; PyTorch
    computes in the dtype that x and weight promote to, and rounds before phi.

    Args:
        x: [B, T, C] with T >= 1, floating point, any strides, like all the tensors here.
        weight: [K, C]: weight_0 is that of the token itself.
        bias: [C]; none if None.
        activation: phi: "silu", or the identity if None.
        positions: [1, T] int32 or int64 within each document for packed sequences, with B = 1; their values are not
            checked.
        taps: [B, K - 1, C], the tokens before x; zeros if None.
        impl: "triton", CUDA kernels for half precision and float32 with K <= 16 and no taps; "torch", plain PyTorch on
            any device; or "auto": PyTorch, until the kernels have been measured to be faster. An explicit choice never
            falls back.

    Returns:
        y [B, T, C] in the dtype of x.

    Raises:
        ValueError: an argument is not as above; the message names it, what was expected and what came.
    """
    _check(x, weight, bias, activation, positions, taps, impl)
    silu = activation == "silu"
    if impl == "triton":
        _check_triton(x, weight, taps)
        return ops.short_convolution(x, weight, bias, positions, silu)
    return short_convolution_reference(x, weight, bias, positions, taps, silu=silu)


def _check_triton(x: Tensor, weight: Tensor, taps: Tensor | None) -> None:
    if not _HAS_TRITON:
        missing = "the package triton, which is not installed"
    elif x.device.type != "cuda":
        missing = f"CUDA tensors, got {x.device}"
    elif x.dtype not in _TRITON_DTYPES:
        missing = f"x in bfloat16, float16 or float32, got {x.dtype}"
    elif weight.shape[0] > _MAX_TAPS:
        missing = f"K of at most {_MAX_TAPS}, got {weight.shape[0]}"
    elif taps is not None:
        missing = f"taps to be None, got {list(taps.shape)}"
    else:
        return
    raise ValueError(f"impl: 'triton' needs {missing}")


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    positions: Tensor | None,
    taps: Tensor | None,
    impl: str,
) -> None:
    if impl not in _IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(map(repr, _IMPLS))}, got {impl!r}")
    if activation not in (None, "silu"):
        raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")
    if x.ndim != 3 or x.shape[1] < 1:
        raise ValueError(f"x: expected [B, T, C] with T >= 1, got {list(x.shape)}")
    batch, length, channels = x.shape
    if weight.ndim != 2 or weight.shape[0] < 1:
        raise ValueError(f"weight: expected [K, C] with K >= 1, got {list(weight.shape)}")
    size = weight.shape[0]
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
