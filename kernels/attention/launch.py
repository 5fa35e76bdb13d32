"""Attention by this library's kernels: allocates what they write, and calls those for the device.

Shapes: B batch, T tokens, H query heads, G key/value heads, D and D_v their sizes, N documents, P places for numbers of
rows: each block of rows has places of its own, as many as a whole one needs.
"""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from zoo.kernels.attention.schedule import WIDEST, configuration
from zoo.kernels.rows import rows
from zoo.kernels.triton.documents import cut

__all__ = ["Batch", "attention_backward", "attention_forward"]

_ALIGNMENT = 16  # bytes, of what a descriptor reads
_HOPPER = 9  # major compute capability


class Batch:
    """What the kernels are told of a call.

    Attributes:
        batch: B, and so on for the other sizes.
        q: [B * T, H, D], like k and v with their sizes.
        window: keys that a token sees.
        windowed: whether there are fewer of them than all.
        blocks: see `cut`.
        count: blocks that a row of the batch has room for; packed, it may have fewer.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None, scale: float
    ) -> None:
        self.batch, self.seq_len, self.heads, self.key_dim = q.shape
        self.groups, self.value_dim = v.shape[2:]
        self.q, self.k, self.v = rows(q), rows(k), rows(v)
        self.window = WIDEST if window is None else min(window, WIDEST)
        self.windowed = window is not None
        self.scale = scale
        self.configuration = configuration(self.key_dim, self.value_dim, v.dtype)
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        parts = self.configuration.parts
        self.blocks, count = cut(self.seq_len, cu_seqlens, self.configuration.tile * parts)
        self.count = count * parts

    def counter(self) -> Tensor:
        """An int32 0, the first there, for one kernel to count in: of a packed row the end of its table, there once."""
        return self.v.new_zeros(1, dtype=torch.int32) if self.blocks is None else self.blocks[-1]

    def new_numbers(self) -> Tensor:
        """[B, H, P] fp32; of a packed row 0, as not all places may be used."""
        shape = self.batch, self.heads, self.count * self.configuration.tile
        new = self.v.new_empty if self.blocks is None else self.v.new_zeros
        return new(shape, dtype=torch.float32)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None, scale: float, *, save: bool
) -> tuple[Tensor, Tensor]:
    """Causal attention.

    Args:
        q: [B, T, H, D].
        k: [B, T, G, D].
        v: [B, T, G, D_v].
        cu_seqlens: [N + 1], or None.
        window: keys that a token sees, itself included; None for all.
        scale: of the logits, positive.
        save: whether a backward follows: without it the log-sum-exp is of size 0.

    Returns:
        o [B, T, H, D_v] in the dtype of v, and [B, H, P] fp32, the log-sum-exp of each row's logits to the base 2.
    """
    batch = Batch(q, k, v, cu_seqlens, window, scale)
    o = v.new_empty(*q.shape[:3], v.shape[3])
    lse = batch.new_numbers() if save else v.new_empty(0, dtype=torch.float32)
    _kernels(batch).forward(batch, o, lse if save else None)
    return o, lse


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
    """The gradients of `attention_forward`.

    Args:
        grad_o: [B, T, H, D_v].
        q: [B, T, H, D].
        k: [B, T, G, D].
        v: [B, T, G, D_v].
        cu_seqlens: [N + 1], or None.
        o: from the forward, like the next.
        lse: see `attention_forward`.
        window: keys that a token sees, itself included; None for all.
        scale: of the logits, positive.

    Returns:
        The gradients of q, k and v.
    """
    grad_o = rows(grad_o.contiguous())
    batch = Batch(q, k, v, cu_seqlens, window, scale)
    kernels, totals = _kernels(batch, grad_o), torch.empty_like(lse)
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    kernels.row_gradients(batch, o, lse, grad_o, totals, grad_q)
    kernels.key_gradients(batch, lse, grad_o, totals, grad_k, grad_v)
    return grad_q, grad_k, grad_v


def _kernels(batch: Batch, *others: Tensor) -> ModuleType:
    """What launches the kernels: those for Hopper where they can run, reading `others`, too."""
    from zoo.kernels.attention.triton import launch

    wide = max(batch.configuration[:2]) > 128
    if batch.v.dtype == torch.float32 or wide or not _on_hopper(batch.v.device):
        return launch
    if not all(map(_can_be_described, (batch.q, batch.k, batch.v, *others))):
        return launch
    from zoo.kernels.attention.hopper import launch as hopper_launch  # Gluon, which only these need

    return hopper_launch


@cache
def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER


def _can_be_described(x: Tensor) -> bool:
    """Whether a tensor's address and strides are such that a descriptor can read it."""
    places = x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1])
    return x.numel() > 0 and all(place > 0 and place % _ALIGNMENT == 0 for place in places)
