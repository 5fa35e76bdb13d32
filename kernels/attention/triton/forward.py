"""o_t = sum_i softmax_i(scale * q_t . k_i) v_i, block by block with a running maximum (arXiv 2205.14135, 2307.08691).

Blocks of keys that every row of a block sees whole need no mask: those at the diagonal and at the window's edge do.
"""

import triton
import triton.language as tl

from zoo.kernels.attention.triton.tiles import blocks_of_keys, logit_factor, visible_keys
from zoo.kernels.triton.documents import place_of_block, place_of_head
from zoo.kernels.triton.tiles import dot, load_rows, store_rows


@triton.jit(do_not_specialize=["seq_len", "num_blocks", "window"])
def attention_kernel(
    q,
    k,
    v,
    blocks,
    o,
    lse,
    seq_len,
    num_blocks,
    window,
    scale,
    q_head,
    k_head,
    v_head,
    HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """One program a block of rows and query head; also the log-sum-exp of each row, to the base 2."""
    O_ROW: tl.constexpr = HEADS * VALUE_DIM
    at_head = tl.program_id(0) // num_blocks
    number = num_blocks - 1 - tl.program_id(0) % num_blocks  # in a dense batch the longest first
    document, length, row = place_of_block(blocks, number, seq_len, TILE, PARTS)
    if row >= length:
        return
    head, group, zero, _ = place_of_head(at_head, document, seq_len, HEADS, REPEAT)
    rows = row + tl.arange(0, TILE)
    column = tl.arange(0, TILE)
    query = load_rows(q + zero * Q_ROW + head * q_head, row, length, Q_ROW, KEY_DIM, TILE, BLOCK_K)
    k += zero * K_ROW + group * k_head
    v += zero * V_ROW + group * v_head
    factor = logit_factor(scale)

    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    read = tl.zeros([TILE, BLOCK_V], tl.float32)
    first, whole, whole_end, end = blocks_of_keys(row, window, TILE, TILE, WINDOWED)
    for j in tl.range(first, end, num_stages=STAGES):
        key = load_rows(k, j * TILE, length, K_ROW, KEY_DIM, TILE, BLOCK_K)
        value = load_rows(v, j * TILE, length, V_ROW, VALUE_DIM, TILE, BLOCK_V)
        products = dot(query, tl.trans(key))
        if (j < whole) | (j >= whole_end):
            visible = visible_keys((j * TILE + column)[None, :], rows[:, None], window, WINDOWED)
            products = tl.where(visible, products, float("-inf"))
        higher = tl.maximum(largest, tl.max(products, 1) * factor)  # which is positive
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing so far
        weights = tl.exp2(products * factor - base[:, None])
        correction = tl.exp2(largest - base)
        total = total * correction + tl.sum(weights, 1)
        read = read * correction[:, None] + dot(weights.to(value.dtype), value)
        largest = higher

    store_rows(o + zero * O_ROW + head * VALUE_DIM, read / total[:, None], row, length, O_ROW, VALUE_DIM, TILE, BLOCK_V)
    if lse is not None:
        log_sum = tl.where(rows < length, largest + tl.log2(total), float("inf"))
        tl.store(lse + (at_head.to(tl.int64) * num_blocks + number) * TILE + (rows - row), log_sum)
