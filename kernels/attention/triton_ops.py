"""torch.library ops of attention's Triton kernels: functional, fixed outputs, the backward as its own op.

Shapes: B batch, T tokens, H query heads, G key/value heads, D and D_v their sizes, N documents.
"""

import torch
from torch import Tensor

from zoo.kernels.attention.autograd import register_gradients
from zoo.kernels.attention.schedule import num_places

__all__ = ["attention", "attention_backward"]

# The kernels, and Triton with them, are imported at the first call: registering the ops needs neither.


@torch.library.custom_op("zoo::attention_triton", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None, scale: float, save: bool
) -> tuple[Tensor, Tensor]:
    """`attention_forward` as an op. Inputs are checked and of one dtype already: the public function does that."""
    from zoo.kernels.attention.launch import attention_forward

    with torch.cuda.device_of(q):
        return attention_forward(q, k, v, cu_seqlens, window, scale, save=save)


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None, scale: float, save: bool
) -> tuple[Tensor, Tensor]:
    batch, seq_len, heads, _ = q.shape
    lse = v.new_empty((batch, heads, num_places(q, v, cu_seqlens)) if save else (0,), dtype=torch.float32)
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
    from zoo.kernels.attention.launch import attention_backward as launch

    assert lse.ndim == 3, "the forward was told that no backward follows"
    with torch.cuda.device_of(q):
        return launch(grad_o, q, k, v, cu_seqlens, o, lse, window, scale)


register_gradients(attention, attention_backward)
