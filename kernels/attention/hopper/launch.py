"""Launches the kernels for Hopper.

Shapes: B batch, T tokens, H query heads, G key/value heads, D and D_v their sizes, P places for numbers of rows.
"""

from typing import Any

from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from zoo.kernels.attention.hopper.forward import attention_kernel
from zoo.kernels.attention.hopper.gradients import key_gradients_kernel, row_gradients_kernel
from zoo.kernels.attention.hopper.tiles import TILE, WARPS
from zoo.kernels.attention.launch import Batch

__all__ = ["forward", "key_gradients", "row_gradients"]

_STAGES = 2
_SWIZZLE = 128  # bytes
_NARROWEST = 64  # columns of a block: with 32 the compiler lets no two products run at once


def forward(x: Batch, o: Tensor, lse: Tensor | None) -> None:
    """Write o [B, T, H, D_v] and, if wanted, the log-sum-exp [B, H, P]."""
    attention_kernel[x.batch * x.heads * x.count,](
        *_inputs(x),
        x.blocks,
        o,
        lse,
        *_numbers(x),
        **_sizes(x),
        V_STAGES=1 if max(_blocks(x)) > 64 else _STAGES,  # so that a multiprocessor has room for three programs
    )


def row_gradients(x: Batch, o: Tensor, lse: Tensor, grad_o: Tensor, totals: Tensor, grad_q: Tensor) -> None:
    """Write the gradient of q [B, T, H, D], and do . o [B, H, P]; grad_o is [B * T, H, D_v]."""
    grad = _describe(x, grad_o, _blocks(x)[1])
    row_gradients_kernel[x.batch * x.heads * x.count,](
        *_inputs(x),
        grad,
        x.blocks,
        o,
        grad_o,
        lse,
        totals,
        grad_q,
        *_numbers(x),
        **_sizes(x),
        KEY_DIM=x.key_dim,
        K_STAGES=_STAGES + 1,  # keys are read twice
    )


def key_gradients(x: Batch, lse: Tensor, grad_o: Tensor, totals: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
    """Write the gradients of k [B, T, G, D] and v [B, T, G, D_v]."""
    grad = _describe(x, grad_o, _blocks(x)[1])
    numbers = map(_describe_numbers, (lse, totals))
    key_gradients_kernel[x.batch * x.groups * x.count,](
        *_inputs(x), grad, *numbers, x.blocks, grad_k, grad_v, *_numbers(x), **_sizes(x), KEY_DIM=x.key_dim
    )


def _inputs(x: Batch) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    block_k, block_v = _blocks(x)
    return _describe(x, x.q, block_k), _describe(x, x.k, block_k), _describe(x, x.v, block_v)


def _blocks(x: Batch) -> tuple[int, int]:
    """Columns of blocks of keys and of values."""
    block_k, block_v = x.configuration[:2]
    return max(block_k, _NARROWEST), max(block_v, _NARROWEST)


def _describe(x: Batch, matrix: Tensor, columns: int) -> TensorDescriptor:
    """A descriptor of [heads, B, T, columns] for [B * T, heads, ...]: beyond these there are zeros."""
    layout = NVMMASharedLayout(swizzle_byte_width=_SWIZZLE, element_bitwidth=16, rank=4)
    matrix = matrix.unflatten(0, (x.batch, x.seq_len)).permute(2, 0, 1, 3)
    return TensorDescriptor(
        matrix, list(matrix.shape), list(matrix.stride()), [1, 1, TILE.value, columns], layout=layout
    )


def _describe_numbers(numbers: Tensor) -> TensorDescriptor:
    """A descriptor of [B * H, P]."""
    layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    numbers = numbers.flatten(0, 1)
    return TensorDescriptor(numbers, list(numbers.shape), list(numbers.stride()), [1, TILE.value], layout=layout)


def _numbers(x: Batch) -> tuple[int, int, int, float]:
    return x.seq_len, x.count, x.window, x.scale


def _sizes(x: Batch) -> dict[str, Any]:
    assert x.configuration.tile == TILE.value
    block_k, block_v = _blocks(x)
    return {
        "HEADS": x.heads,
        "REPEAT": x.heads // x.groups,
        "VALUE_DIM": x.value_dim,
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
        "STAGES": _STAGES,
        "WINDOWED": x.windowed,
        "num_warps": WARPS.value,
    }
