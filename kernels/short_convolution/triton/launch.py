"""The short convolution on CUDA: allocates, and launches the kernels, forward and backward.

Shapes: B batch, T tokens, C channels, K taps.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from zoo.kernels.rows import rows
from zoo.kernels.short_convolution.triton.kernels import backward_kernel, forward_kernel

# Rows of a run, and rows read at once: the fastest of 36 combinations on an H200 (B 16 T 2048 C 3072 K 4, bf16).
_FORWARD, _BACKWARD = (32, 4), (128, 2)
_WARPS, _PER_THREAD = 2, 4


def convolution_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    widths: list[int],
    *,
    silu: bool,
) -> list[Tensor]:
    """The convolution.

    Args:
        x: [B, T, C].
        weight: [K, C].
        bias: [C], or None.
        positions: [1, T] within each document, with B = 1, or None.
        widths: of the parts of y, C in all.
        silu: whether SiLU follows.

    Returns:
        The parts of y, [B, T, width] in the dtype of x.
    """
    parts = [x.new_empty(*x.shape[:2], width) for width in widths]
    grid, sizes = _schedule(x, weight, widths, *_FORWARD)
    x_rows = rows(x)
    inputs = x_rows, *(None if z is None else z.contiguous() for z in (weight, bias, positions))
    forward_kernel[grid](*inputs, tuple(parts), x_rows.shape[0], x.shape[1], X_ROW=x_rows.stride(0), SILU=silu, **sizes)
    return parts


def convolution_backward(
    grad_parts: list[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    *,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `convolution_forward`.

    Args:
        grad_parts: [B, T, width] of each part.
        x: [B, T, C].
        weight: [K, C].
        bias: [C], or None.
        positions: [1, T], or None.
        silu: whether SiLU follows.

    Returns:
        The gradients of x, weight and bias (of size 0 if that is None), each in the dtype of its own.
    """
    taps, channels = weight.shape
    grid, sizes = _schedule(x, weight, [part.shape[2] for part in grad_parts], *_BACKWARD)
    x_rows = rows(x)
    runs = triton.cdiv(x_rows.shape[0], _BACKWARD[0])
    grad_x = x.new_empty(x.shape)
    partial = x.new_empty(runs, taps + (bias is not None), channels, dtype=torch.float32)
    inputs = x_rows, *(None if z is None else z.contiguous() for z in (weight, bias, positions))
    backward_kernel[grid](
        tuple(part.contiguous() for part in grad_parts),
        *inputs,
        grad_x,
        partial,
        x_rows.shape[0],
        x.shape[1],
        X_ROW=x_rows.stride(0),
        SILU=silu,
        **sizes,
    )
    grad_weight = partial[:, :taps].sum(0).to(weight.dtype)
    grad_bias = weight.new_empty(0) if bias is None else partial[:, taps].sum(0).to(bias.dtype)
    return grad_x, grad_weight, grad_bias


def _schedule(x: Tensor, weight: Tensor, widths: list[int], run: int, step: int) -> tuple[tuple[int], dict[str, Any]]:
    """The grid and the compiled sizes: the more taps, the fewer channels a thread has."""
    taps, channels = weight.shape
    per_thread = max(1, _PER_THREAD // (1 if taps <= 4 else 2 if taps <= 8 else 4))
    block = min(32 * _WARPS * per_thread, triton.next_power_of_2(max(widths)))
    blocks = sum(triton.cdiv(width, block) for width in widths)
    sizes = {"CHANNELS": channels, "WIDTHS": tuple(widths), "BLOCKS": blocks, "TAPS": taps}
    sizes |= {"ROWS": run, "STEP": step, "BLOCK": block, "num_warps": _WARPS}
    return (triton.cdiv(x.shape[0] * x.shape[1], run) * blocks,), sizes
