"""Parts that the kernels share: tiles of q, k and v, and which keys rows see."""

import triton
import triton.language as tl

from zoo.kernels.triton.tiles import load_rows

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(
    x,
    batch,
    seq_len,
    first,
    end,
    head,
    head_stride,
    ROW: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Tokens [first, first + ROWS) of a row of the batch, of one head.

    From memory they are 0 from token `end` and column DIM on; by a tensor's descriptor only where the row ends.
    """
    if DESCRIBED:
        tile = x.load([head.to(tl.int32), batch.to(tl.int32), first, 0]).reshape(ROWS, BLOCK)
    else:
        tile = load_rows(x + batch * seq_len * ROW + head * head_stride, first, end, ROW, DIM, ROWS, BLOCK)
    return tile


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
def blocks_of_keys(row, length, window, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr):
    """Of the blocks of keys that rows [row, row + ROWS) see: the first, bounds of those that all see whole, the end."""
    first = 0
    if WINDOWED:
        first = tl.maximum(row - window + 1, 0) // KEYS
    whole_end = tl.maximum((row + 1) // KEYS, first)
    whole = first
    if WINDOWED:
        whole = tl.minimum(tl.maximum(tl.cdiv(row + ROWS - window, KEYS), first), whole_end)
    return first, whole, whole_end, tl.cdiv(tl.minimum(row + ROWS, length), KEYS)


@triton.jit
def blocks_of_rows(key, length, window, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr):
    """Of the blocks of rows that see keys [key, key + KEYS): the first, bounds of those that see all, the end."""
    last = length
    if WINDOWED:
        last = tl.minimum(key + KEYS - 1 + window, length)
    first = key // ROWS
    end = tl.cdiv(last, ROWS)
    whole = tl.minimum(tl.maximum(tl.cdiv(key + KEYS - 1, ROWS), first + 1), end)
    whole_end = end
    if WINDOWED:
        whole_end = tl.maximum(tl.minimum((key + window) // ROWS, end), whole)
    return first, whole, whole_end, end
