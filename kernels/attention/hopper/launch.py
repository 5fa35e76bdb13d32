"""Launches the kernels for Hopper.

Shapes: B batch, T tokens, H query heads, G key/value heads, D and D_v their sizes, P places for numbers of rows.
"""

from typing import Any

from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from zoo.kernels.attention.hopper.forward import KEYS, attention_kernel
from zoo.kernels.attention.hopper.key_gradients import key_gradients_kernel
from zoo.kernels.attention.hopper.row_gradients import row_gradients_kernel
from zoo.kernels.attention.hopper.tiles import TILE, WARPS
from zoo.kernels.attention.hopper.turns import READERS
from zoo.kernels.attention.launch import Batch
from zoo.kernels.triton_support import num_multiprocessors

__all__ = ["forward", "key_gradients", "row_gradients"]

_FORWARD_STAGES, _KEY_STAGES = 2, 4  # as many blocks of 128 keys, and of 64 rows, as shared memory has room for
_SWIZZLE = 128  # bytes
_NARROWEST = 64  # columns of a block: with 32 the compiler lets no two products run at once


def forward(x: Batch, o: Tensor, lse: Tensor | None) -> None:
    """Write o [B, T, H, D_v] and, if wanted, the log-sum-exp [B, H, P]."""
    grid, numbers = _turns(x, x.heads)
    attention_kernel[grid](*_inputs(x, KEYS.value), x.blocks, o, lse, *numbers, **_sizes(x), STAGES=_FORWARD_STAGES)


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
        x.seq_len,
        x.count,
        x.window,
        x.scale,
        **_sizes(x),
        KEY_DIM=x.key_dim,
        PARTS=x.configuration.parts,
        K_STAGES=3,  # keys are read twice
        STAGES=2,
    )


def key_gradients(x: Batch, lse: Tensor, grad_o: Tensor, totals: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
    """Write the gradients of k [B, T, G, D] and v [B, T, G, D_v]."""
    grid, numbers = _turns(x, x.groups)
    grad = _describe(x, grad_o, _blocks(x)[1])
    sums = map(_describe_numbers, (lse, totals))
    key_gradients_kernel[grid](
        *_inputs(x), grad, *sums, x.blocks, grad_k, grad_v, *numbers, **_sizes(x), KEY_DIM=x.key_dim, STAGES=_KEY_STAGES
    )


def _turns(x: Batch, heads: int) -> tuple[tuple[int], tuple[Tensor | float, ...]]:
    """The grid of kernels that take turns; a counter of those taken, heads in the batch, and numbers of the call."""
    count, num_heads = x.count // READERS.value, x.batch * heads
    grid = (min(num_heads * count, num_multiprocessors(x.q.device)),)
    return grid, (x.counter(), num_heads, x.seq_len, count, x.window, x.scale)


def _inputs(x: Batch, keys: int = TILE.value) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """Descriptors of q, k and v, these in blocks of so many keys."""
    block_k, block_v = _blocks(x)
    return _describe(x, x.q, block_k), _describe(x, x.k, block_k, keys), _describe(x, x.v, block_v, keys)


def _blocks(x: Batch) -> tuple[int, int]:
    """Columns of blocks of keys and of values."""
    block_k, block_v = x.configuration[:2]
    return max(block_k, _NARROWEST), max(block_v, _NARROWEST)


def _describe(x: Batch, matrix: Tensor, columns: int, rows: int = TILE.value) -> TensorDescriptor:
    """A descriptor of [heads, B, T, columns] for [B * T, heads, ...]: beyond these there are zeros."""
    layout = NVMMASharedLayout(swizzle_byte_width=_SWIZZLE, element_bitwidth=16, rank=4)
    matrix = matrix.unflatten(0, (x.batch, x.seq_len)).permute(2, 0, 1, 3)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [1, 1, rows, columns], layout=layout)


def _describe_numbers(numbers: Tensor) -> TensorDescriptor:
    """A descriptor of [B * H, P]."""
    layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    numbers = numbers.flatten(0, 1)
    return TensorDescriptor(numbers, list(numbers.shape), list(numbers.stride()), [1, TILE.value], layout=layout)


def _sizes(x: Batch) -> dict[str, Any]:
    assert x.configuration.tile == TILE.value
    assert x.configuration.parts == READERS.value
    block_k, block_v = _blocks(x)
    return {
        "HEADS": x.heads,
        "REPEAT": x.heads // x.groups,
        "VALUE_DIM": x.value_dim,
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
        "WINDOWED": x.windowed,
        "num_warps": WARPS.value,
    }
