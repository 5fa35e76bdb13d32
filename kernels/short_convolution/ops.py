"""torch.library ops of the short convolution's Triton kernels: functional, with a fixed number of outputs.

Shapes: B batch, T tokens, C channels, K taps.
"""

from typing import Any

import torch
from torch import Tensor

# The kernels, and Triton with them, are imported at the first call: registering the ops needs neither.


@torch.library.custom_op("zoo::short_convolution_triton", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor | None, widths: list[int], silu: bool
) -> list[Tensor]:
    """`convolution_forward` as an op."""
    from zoo.kernels.short_convolution.triton.launch import convolution_forward

    with torch.cuda.device_of(x):
        return convolution_forward(x, weight, bias, positions, widths, silu=silu)


@short_convolution.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor | None, widths: list[int], silu: bool
) -> list[Tensor]:
    return [x.new_empty(*x.shape[:2], width) for width in widths]


@torch.library.custom_op(
    "zoo::short_convolution_triton_backward", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,)
)
def short_convolution_backward(
    grad_parts: list[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`convolution_backward` as an op: without bias its gradient is of size 0."""
    from zoo.kernels.short_convolution.triton.launch import convolution_backward

    with torch.cuda.device_of(x):
        return convolution_backward(grad_parts, x, weight, bias, positions, silu=silu)


@short_convolution_backward.register_fake
def _(
    grad_parts: list[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    silu: bool,
) -> tuple[Tensor, ...]:
    grad_bias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, bias, positions, _, ctx.silu = inputs
    ctx.save_for_backward(x, weight, bias, positions)


def _backward(ctx: Any, grad_parts: list[Tensor]) -> tuple[Tensor | None, ...]:
    x, weight, bias, positions = ctx.saved_tensors
    grad_x, grad_weight, grad_bias = short_convolution_backward(grad_parts, x, weight, bias, positions, ctx.silu)
    return grad_x, grad_weight, None if bias is None else grad_bias, None, None, None


short_convolution.register_autograd(_backward, setup_context=_save)
