"""Parts that the kernels share, here and for Hopper: logits, weights, and which keys rows see."""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def logit_factor(scale):
    """What a product of rows is multiplied by: logits are to the base 2."""
    return scale * _LOG2E


@triton.jit
def visible_keys(keys, rows, window, WINDOWED: tl.constexpr):
    """Which keys a row sees: its own and those before it, in all `window` of them if WINDOWED."""
    visible = keys <= rows
    if WINDOWED:
        visible = visible & (rows - keys < window)
    return visible


@triton.jit
def weights_of(products, log_sum, factor, rows, keys, window, masked, WINDOWED: tl.constexpr):
    """P; if `masked` 0 where a row does not see a key; 0 in rows whose `log_sum` is infinite."""
    weights = tl.exp2(products * factor - log_sum)
    if masked:
        weights = tl.where(visible_keys(keys, rows, window, WINDOWED), weights, 0.0)
    return weights


@triton.jit
def blocks_of_keys(row, window, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr):
    """Of the blocks of KEYS keys that a block of rows sees: the first, bounds of those that all see whole, the end.

    The rows are [row, row + ROWS).
    """
    whole_end = (row + 1) // KEYS
    if WINDOWED:
        first = tl.maximum(row - window + 1, 0) // KEYS
        whole = tl.minimum(tl.maximum(tl.cdiv(row + ROWS - window, KEYS), first), whole_end)
    else:
        first = 0
        whole = 0
    return first, whole, whole_end, tl.cdiv(row + ROWS, KEYS)


@triton.jit
def blocks_of_rows(key, length, window, TILE: tl.constexpr, WINDOWED: tl.constexpr):
    """Of the blocks of rows that see a block of keys: the first, bounds of those that see all, the end.

    The keys are [key, key + TILE), and `key` a multiple of TILE, as the first row of each block is.
    """
    own = key // TILE
    if WINDOWED:
        end = tl.cdiv(tl.minimum(key + TILE - 1 + window, length), TILE)
        whole_end = tl.maximum(tl.minimum((key + window) // TILE, end), own + 1)
    else:
        end = tl.cdiv(length, TILE)
        whole_end = end
    return own, own + 1, whole_end, end
