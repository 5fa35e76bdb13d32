"""Inverses of unit lower triangular tiles by block recursion: blocks of 2, 4, ... are merged by products.

Powers of the matrix would lose everything where its rows are alike.
"""

import triton
import triton.language as tl

__all__ = ["unit_lower_inverse", "unit_lower_inverse_half"]


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
def unit_lower_inverse_half(a, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """The same with float16 products, which what they make must fit, and a Newton step X + (I - X (I + a)) X.

    The step squares their error, which would be a hundred times as large and more. In the residual a is the sum of two
    float16 numbers, and X is exact.
    """
    index = tl.arange(0, SIZE)
    apart = index[:, None] ^ index[None, :]
    high = a.to(tl.float16)
    low = (a - high.to(tl.float32)).to(tl.float16)
    x = tl.where(apart == 0, 1.0, tl.where(apart == 1, -a, 0.0)).to(tl.float16)
    for level in tl.static_range(1, LEVELS):
        y = tl.dot(tl.dot(x, high).to(tl.float16), x)
        x = tl.where((apart >> level) == 1, (-y).to(tl.float16), x)
    product = tl.dot(x, low, tl.dot(x, high))
    residual = tl.where(apart == 0, 1.0, 0.0) - x.to(tl.float32) - product
    return tl.dot(residual.to(tl.float16), x, x.to(tl.float32))
