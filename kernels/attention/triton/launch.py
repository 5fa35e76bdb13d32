"""Attention on CUDA: allocates, and launches the kernels, forward and backward.

Shapes: B batch, T tokens, H query heads, G key/value heads, D and D_v their sizes, N documents.
"""

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zoo.kernels.attention.schedule import Configuration, configuration
from zoo.kernels.attention.triton.forward import attention_kernel
from zoo.kernels.attention.triton.gradients import key_gradients_kernel, row_gradients_kernel
from zoo.kernels.rows import rows
from zoo.kernels.tiling import Tiles
from zoo.kernels.triton.documents import cut

_ALIGNMENT = 16  # bytes, of what a descriptor reads
_WIDEST = 1 << 30  # window: all there is, and int32 holds it with a position added


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
        o [B, T, H, D_v] in the dtype of v, and [B, H, T] fp32, the log-sum-exp of each row's logits to the base 2.
    """
    run = _Run(q, k, v, cu_seqlens, window, scale)
    o = v.new_empty(*q.shape[:3], v.shape[3])
    lse = v.new_empty((run.batch, run.heads, run.seq_len) if save else (0,), dtype=torch.float32)
    run.forward(o, lse if save else None)
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
    run = _Run(q, k, v, cu_seqlens, window, scale, grad_o)
    grad_q, totals = run.row_gradients(o, lse, grad_o)
    grad_k, grad_v = run.key_gradients(lse, grad_o, totals)
    return grad_q, grad_k, grad_v


class _Run:
    """The launches over one batch; `others` are rows that they read, too."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None,
        window: int | None,
        scale: float,
        *others: Tensor,
    ) -> None:
        self.batch, self.seq_len, self.heads, self.key_dim = q.shape
        self.groups, self.value_dim = v.shape[2:]
        self.q, self.k, self.v = rows(q), rows(k), rows(v)
        self.cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        self.window, self.scale = window, scale
        self.configuration: Configuration = configuration(self.key_dim, self.value_dim, v.dtype)
        self.described = v.dtype != torch.float32 and all(map(_can_be_described, (self.q, self.k, self.v, *others)))

    def forward(self, o: Tensor, lse: Tensor | None) -> None:
        tiles = self.configuration.forward
        blocks, count = cut(self.seq_len, self.cu_seqlens, tiles.rows)
        attention_kernel[self.batch * self.heads * count,](
            *self._inputs(tiles), blocks, o, lse, *self._numbers(count), **self._sizes(tiles)
        )

    def row_gradients(self, o: Tensor, lse: Tensor, grad_o: Tensor) -> tuple[Tensor, Tensor]:
        """Of q, and do . o [B, H, T]."""
        tiles = self.configuration.rows
        grad_q = o.new_empty(self.batch, self.seq_len, self.heads, self.key_dim)
        totals = torch.empty_like(lse)
        blocks, count = cut(self.seq_len, self.cu_seqlens, tiles.rows)
        row_gradients_kernel[self.batch * self.heads * count,](
            *self._inputs(tiles),
            blocks,
            o,
            lse,
            grad_o,
            totals,
            grad_q,
            *self._numbers(count),
            **self._sizes(tiles),
        )
        return grad_q, totals

    def key_gradients(self, lse: Tensor, grad_o: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
        """Of k and v."""
        tiles = self.configuration.keys
        grad_k, grad_v = (
            grad_o.new_empty(self.batch, self.seq_len, self.groups, size) for size in (self.key_dim, self.value_dim)
        )
        blocks, count = cut(self.seq_len, self.cu_seqlens, tiles.keys)
        grad = self._tile(grad_o, tiles.rows, self.configuration.block_v)
        key_gradients_kernel[self.batch * self.groups * count,](
            *self._inputs(tiles),
            blocks,
            lse,
            grad,
            totals,
            grad_k,
            grad_v,
            *self._numbers(count),
            **self._sizes(tiles),
        )
        return grad_k, grad_v

    def _inputs(self, tiles: Tiles) -> tuple[Any, Any, Any]:
        block_k, block_v = self.configuration[:2]
        return (
            self._tile(self.q, tiles.rows, block_k),
            self._tile(self.k, tiles.keys, block_k),
            self._tile(self.v, tiles.keys, block_v),
        )

    def _tile(self, x: Tensor, num_rows: int, columns: int) -> Any:
        """What the kernels read x by: a descriptor of [heads, B, T, columns], or x."""
        if not self.described:
            return x
        x = x.unflatten(0, (self.batch, self.seq_len)).permute(2, 0, 1, 3)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, num_rows, columns])

    def _numbers(self, count: int) -> tuple[int, int, int, float, int, int, int]:
        strides = self.q.stride(1), self.k.stride(1), self.v.stride(1)
        window = _WIDEST if self.window is None else min(self.window, _WIDEST)
        return self.seq_len, count, window, self.scale, *strides

    def _sizes(self, tiles: Tiles) -> dict[str, Any]:
        return {
            "HEADS": self.heads,
            "REPEAT": self.heads // self.groups,
            "Q_ROW": self.q.stride(0),
            "K_ROW": self.k.stride(0),
            "V_ROW": self.v.stride(0),
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
            "BLOCK_K": self.configuration.block_k,
            "BLOCK_V": self.configuration.block_v,
            "ROWS": tiles.rows,
            "KEYS": tiles.keys,
            "STAGES": tiles.stages,
            "WINDOWED": self.window is not None,
            "DESCRIBED": self.described,
            "num_warps": tiles.warps,
        }


def _can_be_described(x: Tensor) -> bool:
    """Whether a tensor's address and strides are such that a descriptor can read it."""
    places = x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1])
    return x.numel() > 0 and all(place > 0 and place % _ALIGNMENT == 0 for place in places)
