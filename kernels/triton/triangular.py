"""Inverses of unit lower triangular tiles by block recursion: blocks of 2, 4, ... are merged by products.

Powers of the matrix would lose everything where its rows are alike.
"""

import triton
import triton.language as tl

__all__ = ["unit_lower_inverse", "unit_lower_inverse_refined"]


@triton.jit
def unit_lower_inverse(a, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """(I + a)^-1 for strictly lower a in float32, SIZE = 2^LEVELS. tf32x3 products keep float32's accuracy."""
    index = tl.arange(0, SIZE)
    apart = index[:, None] ^ index[None, :]
    x = tl.where(apart == 0, 1.0, tl.where(apart == 1, -a, 0.0))
    for level in tl.static_range(1, LEVELS):
        y = tl.dot(tl.dot(x, a, input_precision="tf32x3"), x, input_precision="tf32x3")
        x = tl.where((apart >> level) == 1, -y, x)
    return x


@triton.jit
def unit_lower_inverse_refined(a, SIZE: tl.constexpr, LEVELS: tl.constexpr, RANGE: tl.constexpr = tl.float16):
    """The same with products of numbers of 11 bits, and a Newton step X + (I - X (I + a)) X.

    The step squares their error, which would be a hundred times as large and more. In the residual a is the sum of two
    such numbers, and X is exact. RANGE is float16, which must hold what the products make, or float32, which is slower.
    """
    index = tl.arange(0, SIZE)
    apart = index[:, None] ^ index[None, :]
    high = _eleven_bits(a, RANGE)
    low = _eleven_bits(a - high.to(tl.float32), RANGE)
    x = _eleven_bits(tl.where(apart == 0, 1.0, tl.where(apart == 1, -a, 0.0)), RANGE)
    for level in tl.static_range(1, LEVELS):
        y = _product(_eleven_bits(_product(x, high), RANGE), x)
        x = tl.where((apart >> level) == 1, _eleven_bits(-y, RANGE), x)
    product = _product(x, low, _product(x, high))
    residual = tl.where(apart == 0, 1.0, 0.0) - x.to(tl.float32) - product
    return _product(_eleven_bits(residual, RANGE), x, x.to(tl.float32))


@triton.jit
def _eleven_bits(x, RANGE: tl.constexpr):
    """float32, rounded to float16 or to what a product in tf32 takes of it."""
    if tl.float16 == RANGE:
        y = x.to(tl.float16)
    else:
        y = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return y


@triton.jit
def _product(x, y, acc=None):
    return tl.dot(x, y, acc, input_precision="tf32")
