"""o_t = sum_i softmax_i(scale * q_t . k_i) v_i, block by block with a running maximum (arXiv 2205.14135, 2307.08691).

Blocks of keys that every row of a block sees whole need no mask: those at the diagonal and at the window's edge do.
"""

import triton
import triton.language as tl

from zoo.kernels.attention.triton.tiles import blocks_of_keys, load_tile, logit_factor, visible_keys
from zoo.kernels.triton.documents import place_of_block, place_of_head
from zoo.kernels.triton.tiles import dot, store_rows


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
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """One program a block of rows and query head; also the log-sum-exp of each row, to the base 2."""
    O_ROW: tl.constexpr = HEADS * VALUE_DIM
    at_head = tl.program_id(0) // num_blocks
    number = num_blocks - 1 - tl.program_id(0) % num_blocks  # in a dense batch the longest first
    document, length, row = place_of_block(blocks, number, seq_len, ROWS)
    if row >= length:
        return
    head, group, zero, head_zero = place_of_head(at_head, document, seq_len, HEADS, REPEAT)
    batch = (at_head // HEADS).to(tl.int64)
    rows = row + tl.arange(0, ROWS)
    column = tl.arange(0, KEYS)
    query = load_tile(
        q, batch, seq_len, document + row, document + length, head, q_head, Q_ROW, KEY_DIM, ROWS, BLOCK_K, DESCRIBED
    )
    factor = logit_factor(scale)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    read = tl.zeros([ROWS, BLOCK_V], tl.float32)
    first, whole, whole_end, end = blocks_of_keys(row, length, window, ROWS, KEYS, WINDOWED)
    for j in tl.range(first, end, num_stages=STAGES):
        at = document + j * KEYS
        key = load_tile(
            k, batch, seq_len, at, document + length, group, k_head, K_ROW, KEY_DIM, KEYS, BLOCK_K, DESCRIBED
        )
        value = load_tile(
            v, batch, seq_len, at, document + length, group, v_head, V_ROW, VALUE_DIM, KEYS, BLOCK_V, DESCRIBED
        )
        products = dot(query, tl.trans(key))
        if (j < whole) | (j >= whole_end):
            visible = visible_keys((j * KEYS + column)[None, :], rows[:, None], window, WINDOWED)
            products = tl.where(visible, products, float("-inf"))
        higher = tl.maximum(largest, tl.max(products, 1) * factor)  # which is positive
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing so far
        weights = tl.exp2(products * factor - base[:, None])
        correction = tl.exp2(largest - base)
        total = total * correction + tl.sum(weights, 1)
        read = read * correction[:, None] + dot(weights.to(value.dtype), value)
        largest = higher

    store_rows(o + zero * O_ROW + head * VALUE_DIM, read / total[:, None], row, length, O_ROW, VALUE_DIM, ROWS, BLOCK_V)
    if lse is not None:
        tl.store(lse + head_zero + rows, largest + tl.log2(total), mask=rows < length)
