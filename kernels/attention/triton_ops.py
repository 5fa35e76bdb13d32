"""torch.library ops of attention's Triton kernels: functional, fixed outputs, the backward as its own op.

Shapes: B batch, T tokens, H query heads, G key/value heads, D and D_v their sizes, N documents.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["attention", "attention_backward"]

# The kernels, and Triton with them, are imported at the first call: registering the ops needs neither.


@torch.library.custom_op("zoo::attention_triton", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None, scale: float, save: bool
) -> tuple[Tensor, Tensor]:
    """`attention_forward` as an op. Inputs are checked and of one dtype already: the public function does that."""
    from zoo.kernels.attention.triton.launch import attention_forward

    with torch.cuda.device_of(q):
        return attention_forward(q, k, v, cu_seqlens, window, scale, save=save)


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None, scale: float, save: bool
) -> tuple[Tensor, Tensor]:
    batch, seq_len, heads, _ = q.shape
    lse = v.new_empty((batch, heads, seq_len) if save else (0,), dtype=torch.float32)
    return v.new_empty(batch, seq_len, heads, v.shape[3]), lse


@torch.library.custom_op("zoo::attention_triton_backward", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def attention_backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    o: Tensor,
    lse: Tensor,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_backward` as an op."""
    from zoo.kernels.attention.triton.launch import attention_backward as launch

    assert lse.ndim == 3, "the forward was told that no backward follows"
    with torch.cuda.device_of(q):
        return launch(grad_o, q, k, v, cu_seqlens, o, lse, window, scale)


@attention_backward.register_fake
def _(grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_o: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_o is None:
        return (None,) * 7
    return *attention_backward(grad_o, *ctx.saved_tensors, ctx.window, ctx.scale), *(None,) * 4


attention.register_autograd(_backward, setup_context=_save)
