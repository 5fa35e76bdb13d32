"""torch.library ops of the write's Triton kernels: functional, fixed outputs, the backward as its own op.

Shapes: B batch, T tokens, H heads of w, G key/value heads, D and D_v their sizes, N documents.
"""

from typing import Any

import torch
from torch import Tensor

from zoo.kernels.deltaformer.schedule import saved_shapes

__all__ = ["deltaformer_write", "deltaformer_write_backward"]

# The kernels, and Triton with them, are imported at the first call: registering the ops needs neither.


@torch.library.custom_op("zoo::deltaformer_write_triton", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def deltaformer_write(
    w: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    kappa1: str,
    round_decimals: int,
    scale: float,
    bounded: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`write_forward` as an op. Inputs are checked and of one dtype already: the public function does that."""
    from zoo.kernels.deltaformer.triton.launch import write_forward

    with torch.cuda.device_of(w):
        return write_forward(
            w, k, v, alpha, beta, cu_seqlens, kappa1, round_decimals, scale, bounded=bounded, save=save
        )


@deltaformer_write.register_fake
def _(
    w: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    kappa1: str,
    round_decimals: int,
    scale: float,
    bounded: bool,
    save: bool,
) -> tuple[Tensor, ...]:
    saved = saved_shapes(w, v, cu_seqlens, kappa1, save=save)
    return v.new_empty(*w.shape[:3], v.shape[3]), *(v.new_empty(shape, dtype=dtype) for shape, dtype in saved)


@torch.library.custom_op(
    "zoo::deltaformer_write_triton_backward", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,)
)
def deltaformer_write_backward(
    grad_u: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    u: Tensor,
    lse: Tensor,
    inverse: Tensor,
    rest: Tensor,
    kappa1: str,
    round_decimals: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`write_backward` as an op."""
    from zoo.kernels.deltaformer.triton.launch import write_backward

    assert inverse.numel(), "the forward was told that no backward follows"
    with torch.cuda.device_of(w):
        return write_backward(
            grad_u, w, k, v, alpha, beta, cu_seqlens, u, lse, inverse, rest, kappa1, round_decimals, scale
        )


@deltaformer_write_backward.register_fake
def _(grad_u: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.kappa1, ctx.round_decimals, ctx.scale, _, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_u: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_u is None:
        return (None,) * 11
    grads = deltaformer_write_backward(grad_u, *ctx.saved_tensors, ctx.kappa1, ctx.round_decimals, ctx.scale)
    return *grads, *(None,) * 6


deltaformer_write.register_autograd(_backward, setup_context=_save)
