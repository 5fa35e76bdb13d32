"""What the backends that others have made need of tensors' memory.

Shapes: B batch, T tokens, H query heads, G key/value heads, D and D_v their sizes.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["aligned", "whole_heads", "with_contiguous_gradient"]

_ALIGNED = 16  # bytes, which fused kernels load at a time


def aligned(x: Tensor) -> Tensor:
    """x [B, T, H, D] in rows that FlashAttention 2 and cuDNN can load: a copy where it does not lie so, but could.

    In a graph, which cannot know where it lies, a copy unless it is contiguous.
    """
    if x.shape[-1] * x.element_size() % _ALIGNED:
        return x
    if torch.compiler.is_compiling():
        return x.contiguous()
    places = x.storage_offset(), *x.stride()[:-1]
    if x.stride(-1) == 1 and all(place * x.element_size() % _ALIGNED == 0 for place in places):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def with_contiguous_gradient(o: Tensor) -> Tensor:
    """o [B, T, H, D_v], whose backward is given a contiguous and aligned gradient, whatever comes from above.

    With another layout than o's, cuDNN's gradients in PyTorch 2.11 are wrong without a word; where rows are not
    aligned, it and FlashAttention 2 fail.
    """
    return _ContiguousGradient.apply(o) if o.requires_grad else o


class _ContiguousGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(o: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return o.view_as(o)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """There is nothing to save."""

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return aligned(grad_o.contiguous())


def whole_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With a key/value head for each query head.

    Args:
        q: [B, T, H, D].
        k: [B, T, G, D].
        v: [B, T, G, D_v].
    """
    if q.shape[2] != k.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    return q, k, v
