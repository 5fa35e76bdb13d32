"""Launches the kernels that run on any GPU.

Shapes: B batch, T tokens, H query heads, G key/value heads, D and D_v their sizes, P places for numbers of rows.
"""

from typing import Any

from torch import Tensor

from zoo.kernels.attention.launch import Batch
from zoo.kernels.attention.triton.forward import attention_kernel
from zoo.kernels.attention.triton.gradients import key_gradients_kernel, row_gradients_kernel

__all__ = ["forward", "key_gradients", "row_gradients"]


def forward(x: Batch, o: Tensor, lse: Tensor | None) -> None:
    """Write o [B, T, H, D_v] and, if wanted, the log-sum-exp [B, H, P]."""
    attention_kernel[x.batch * x.heads * x.count,](x.q, x.k, x.v, x.blocks, o, lse, *_numbers(x), **_sizes(x))


def row_gradients(x: Batch, o: Tensor, lse: Tensor, grad_o: Tensor, totals: Tensor, grad_q: Tensor) -> None:
    """Write the gradient of q [B, T, H, D], and do . o [B, H, P]; grad_o is [B * T, H, D_v]."""
    row_gradients_kernel[x.batch * x.heads * x.count,](
        x.q, x.k, x.v, x.blocks, o, lse, grad_o, totals, grad_q, *_numbers(x), **_sizes(x)
    )


def key_gradients(x: Batch, lse: Tensor, grad_o: Tensor, totals: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
    """Write the gradients of k [B, T, G, D] and v [B, T, G, D_v]."""
    key_gradients_kernel[x.batch * x.groups * x.count,](
        x.q, x.k, x.v, x.blocks, lse, grad_o, totals, grad_k, grad_v, *_numbers(x), **_sizes(x)
    )


def _numbers(x: Batch) -> tuple[int, int, int, float, int, int, int]:
    strides = x.q.stride(1), x.k.stride(1), x.v.stride(1)
    return x.seq_len, x.count, x.window, x.scale, *strides


def _sizes(x: Batch) -> dict[str, Any]:
    return {
        "HEADS": x.heads,
        "REPEAT": x.heads // x.groups,
        "Q_ROW": x.q.stride(0),
        "K_ROW": x.k.stride(0),
        "V_ROW": x.v.stride(0),
        "KEY_DIM": x.key_dim,
        "VALUE_DIM": x.value_dim,
        "BLOCK_K": x.configuration.block_k,
        "BLOCK_V": x.configuration.block_v,
        "TILE": x.configuration.tile,
        "PARTS": x.configuration.parts,
        "STAGES": x.configuration.stages,
        "WINDOWED": x.windowed,
        "num_warps": x.configuration.warps,
    }
