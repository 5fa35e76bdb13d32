"""torch.library ops of the short convolution's Triton kernels: functional, with a fixed number of outputs.

Shapes: B batch, T tokens, C channels, K taps.
"""

from typing import Any

import torch
from torch import Tensor

# The kernels, and Triton with them, are imported at the first call: registering the ops needs neither.


@torch.library.custom_op("zoo::short_convolution_triton", mutates_args=())
def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor | None, silu: bool) -> Tensor:
    """`convolution_forward` as an op."""
    from zoo.kernels.short_convolution.triton.launch import convolution_forward

    return convolution_forward(x, weight, bias, positions, silu=silu)


@short_convolution.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor | None, silu: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("zoo::short_convolution_triton_backward", mutates_args=())
def short_convolution_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`convolution_backward` as an op: without bias its gradient is of size 0."""
    from zoo.kernels.short_convolution.triton.launch import convolution_backward

    return convolution_backward(grad_y, x, weight, bias, positions, silu=silu)


@short_convolution_backward.register_fake
def _(
    grad_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor | None, silu: bool
) -> tuple[Tensor, ...]:
    grad_bias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, positions = ctx.saved_tensors
    grad_x, grad_weight, grad_bias = short_convolution_backward(grad_y, x, weight, bias, positions, ctx.silu)
    return grad_x, grad_weight, None if bias is None else grad_bias, None, None


short_convolution.register_autograd(_backward, setup_context=_save)
