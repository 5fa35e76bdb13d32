"""torch.library ops of the chunked write: functional, fixed outputs, the backward as its own op.

Shapes: B batch, T tokens, S tokens of a prefix, H heads of w, G key/value heads, D and D_v their sizes, N documents.
"""

from typing import Any

import torch
from torch import Tensor

from zoo.kernels.deltaformer.chunk import Strips, write_backward, write_forward
from zoo.kernels.precision import precise_dtype, without_autocast

__all__ = ["deltaformer_write", "deltaformer_write_backward"]


@torch.library.custom_op("zoo::deltaformer_write_torch", mutates_args=())
def deltaformer_write(
    w: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    prefix_u: Tensor,
    prefix_lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    kappa1: str,
    round_decimals: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`write_forward` as an op. Inputs are checked and of one dtype already: the public function does that."""
    with without_autocast(w.device):
        strips = Strips(w, k, prefix_lengths, cu_seqlens, kappa1, round_decimals, scale)
        return write_forward(strips, v, alpha, beta, prefix_u)


@deltaformer_write.register_fake
def _(w: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(*w.shape[:3], v.shape[3]), v.new_empty(w.shape[:3], dtype=precise_dtype(v.dtype))


@torch.library.custom_op("zoo::deltaformer_write_torch_backward", mutates_args=())
def deltaformer_write_backward(
    grad_u: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    prefix_u: Tensor,
    prefix_lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    u: Tensor,
    lse: Tensor,
    kappa1: str,
    round_decimals: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`write_backward` as an op."""
    with without_autocast(w.device):
        strips = Strips(w, k, prefix_lengths, cu_seqlens, kappa1, round_decimals, scale)
        return write_backward(strips, grad_u, v, alpha, beta, prefix_u, u, lse)


@deltaformer_write_backward.register_fake
def _(grad_u: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:6])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.kappa1, ctx.round_decimals, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_u: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = deltaformer_write_backward(grad_u, *ctx.saved_tensors, ctx.kappa1, ctx.round_decimals, ctx.scale)
    return *grads, None, None, None, None, None


deltaformer_write.register_autograd(_backward, setup_context=_save)
