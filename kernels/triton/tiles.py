"""Parts that kernels share: blocks of rows of a matrix, numbers of a vector, and products."""

import triton
import triton.language as tl

__all__ = ["dot", "load_numbers", "load_rows", "round_half_to_even", "store_rows"]

_WHOLE_FROM = tl.constexpr(8388608.0)  # float32 has no fractions from 2^23 on


@triton.jit
def load_rows(
    matrix, first, end, ROW: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, start=0
):
    """Rows [first, first + ROWS) of a matrix, and columns [start, start + BLOCK); 0 from row `end` and column DIM on.

    Without `end` all rows exist.
    """
    row = tl.arange(0, ROWS)
    dim = start + tl.arange(0, BLOCK)
    matrix += tl.full([], ROW, tl.int64) * first
    mask = (dim < DIM)[None, :]
    if end is not None:
        mask = mask & (first + row < end)[:, None]
    return tl.load(matrix + row[:, None] * ROW + dim[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(
    matrix, x, first, end, ROW: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, start=0
):
    """The counterpart of `load_rows`, in the dtype of the matrix."""
    row = tl.arange(0, ROWS)
    dim = start + tl.arange(0, BLOCK)
    matrix += tl.full([], ROW, tl.int64) * first
    mask = (dim < DIM)[None, :] & (first + row < end)[:, None]
    tl.store(matrix + row[:, None] * ROW + dim[None, :], x.to(matrix.dtype.element_ty), mask=mask)


@triton.jit
def load_numbers(vector, first, end, ROWS: tl.constexpr):
    """Numbers [first, first + ROWS) of a vector; 0 from `end` on."""
    index = first + tl.arange(0, ROWS)
    return tl.load(vector + index, mask=index < end, other=0)


@triton.jit
def dot(x, y):
    """x y, in float32's accuracy for float32."""
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def round_half_to_even(x):
    """The nearest whole number: adding 2^23 leaves no room for fractions."""
    size = tl.abs(x)
    whole = (size + _WHOLE_FROM) - _WHOLE_FROM
    return tl.where(size < _WHOLE_FROM, tl.where(x < 0, -whole, whole), x)
