"""The gradients of attention, with the weights P made again from the log-sum-exp (arXiv 2205.14135).

    dP_ti = do_t . v_i      dS_ti = P_ti (dP_ti - do_t . o_t)
    dq = scale dS k         dk = scale dS^T q                      dv = P^T do

One kernel goes over the keys of a block of rows, the other over the rows that see a block of keys, so that nothing is
added from two programs at once, and the order of the additions is fixed.
"""

import triton
import triton.language as tl

from zoo.kernels.attention.triton.tiles import blocks_of_keys, blocks_of_rows, logit_factor, weights_of
from zoo.kernels.triton.documents import place_of_block, place_of_head
from zoo.kernels.triton.tiles import dot, load_rows, store_rows


@triton.jit(do_not_specialize=["seq_len", "num_blocks", "window"])
def row_gradients_kernel(
    q,
    k,
    v,
    blocks,
    o,
    lse,
    grad_o,
    totals,
    grad_q,
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
    """One program a block of rows and query head: dq, and do . o, which the other kernel needs."""
    O_ROW: tl.constexpr = HEADS * VALUE_DIM
    at_head = tl.program_id(0) // num_blocks
    number = num_blocks - 1 - tl.program_id(0) % num_blocks  # in a dense batch the longest first
    document, length, row = place_of_block(blocks, number, seq_len, TILE, PARTS)
    if row >= length:
        return
    head, group, zero, _ = place_of_head(at_head, document, seq_len, HEADS, REPEAT)
    index = tl.arange(0, TILE)
    rows = row + index
    column = tl.arange(0, TILE)
    query = load_rows(q + zero * Q_ROW + head * q_head, row, length, Q_ROW, KEY_DIM, TILE, BLOCK_K)
    k += zero * K_ROW + group * k_head
    v += zero * V_ROW + group * v_head
    at_values = zero * O_ROW + head * VALUE_DIM
    grad = load_rows(grad_o + at_values, row, length, O_ROW, VALUE_DIM, TILE, BLOCK_V)
    output = load_rows(o + at_values, row, length, O_ROW, VALUE_DIM, TILE, BLOCK_V)
    total = tl.sum(grad.to(tl.float32) * output.to(tl.float32), 1)
    at_number = (at_head.to(tl.int64) * num_blocks + number) * TILE + index
    tl.store(totals + at_number, total)
    log_sum = tl.load(lse + at_number)
    factor = logit_factor(scale)

    grad_query = tl.zeros([TILE, BLOCK_K], tl.float32)
    first, whole, whole_end, end = blocks_of_keys(row, window, TILE, TILE, WINDOWED)
    for j in tl.range(first, end, num_stages=STAGES):
        key = load_rows(k, j * TILE, length, K_ROW, KEY_DIM, TILE, BLOCK_K)
        value = load_rows(v, j * TILE, length, V_ROW, VALUE_DIM, TILE, BLOCK_V)
        masked = (j < whole) | (j >= whole_end)
        keys = (j * TILE + column)[None, :]
        products = dot(query, tl.trans(key))
        weights = weights_of(products, log_sum[:, None], factor, rows[:, None], keys, window, masked, WINDOWED)
        grad_logits = weights * (dot(grad, tl.trans(value)) - total[:, None])
        grad_query += dot(grad_logits.to(key.dtype), key)

    Q_OUT: tl.constexpr = HEADS * KEY_DIM
    store_rows(grad_q + zero * Q_OUT + head * KEY_DIM, grad_query * scale, row, length, Q_OUT, KEY_DIM, TILE, BLOCK_K)


@triton.jit(do_not_specialize=["seq_len", "num_blocks", "window"])
def key_gradients_kernel(
    q,
    k,
    v,
    blocks,
    lse,
    grad_o,
    totals,
    grad_k,
    grad_v,
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
    """One program a block of keys and key/value head: dk and dv, from the query heads that read it."""
    GROUPS: tl.constexpr = HEADS // REPEAT
    O_ROW: tl.constexpr = HEADS * VALUE_DIM
    at_group = tl.program_id(0) // num_blocks
    number = tl.program_id(0) % num_blocks  # in a dense batch the longest first
    document, length, first_key = place_of_block(blocks, number, seq_len, TILE, PARTS)
    if first_key >= length:
        return
    group, _, zero, _ = place_of_head(at_group, document, seq_len, GROUPS, 1)
    index = tl.arange(0, TILE)
    keys = first_key + tl.arange(0, TILE)
    key = load_rows(k + zero * K_ROW + group * k_head, first_key, length, K_ROW, KEY_DIM, TILE, BLOCK_K)
    value = load_rows(v + zero * V_ROW + group * v_head, first_key, length, V_ROW, VALUE_DIM, TILE, BLOCK_V)
    factor = logit_factor(scale)

    grad_key = tl.zeros([TILE, BLOCK_K], tl.float32)
    grad_value = tl.zeros([TILE, BLOCK_V], tl.float32)
    first, whole, whole_end, end = blocks_of_rows(first_key, length, window, TILE, WINDOWED)
    end = tl.minimum(end, first + num_blocks - number)  # ends that nobody has checked lead nowhere else
    for repeat in tl.range(REPEAT):
        head = group * REPEAT + repeat
        at_number = ((at_group * REPEAT + repeat).to(tl.int64) * num_blocks + number) * TILE - first_key + index
        at_query, at_grad = zero * Q_ROW + head * q_head, zero * O_ROW + head * VALUE_DIM
        for i in tl.range(first, end, num_stages=STAGES):
            rows = i * TILE + index
            query = load_rows(q + at_query, i * TILE, length, Q_ROW, KEY_DIM, TILE, BLOCK_K)
            grad = load_rows(grad_o + at_grad, i * TILE, length, O_ROW, VALUE_DIM, TILE, BLOCK_V)
            log_sum = tl.load(lse + at_number + i * TILE)
            total = tl.load(totals + at_number + i * TILE)
            masked = (i < whole) | (i >= whole_end)
            products = dot(query, tl.trans(key))
            weights = weights_of(
                products, log_sum[:, None], factor, rows[:, None], keys[None, :], window, masked, WINDOWED
            )
            grad_logits = weights * (dot(grad, tl.trans(value)) - total[:, None])
            grad_value += dot(tl.trans(weights.to(grad.dtype)), grad)
            grad_key += dot(tl.trans(grad_logits.to(query.dtype)), query)

    K_OUT: tl.constexpr = GROUPS * KEY_DIM
    V_OUT: tl.constexpr = GROUPS * VALUE_DIM
    store_rows(
        grad_k + zero * K_OUT + group * KEY_DIM, grad_key * scale, first_key, length, K_OUT, KEY_DIM, TILE, BLOCK_K
    )
    store_rows(
        grad_v + zero * V_OUT + group * VALUE_DIM, grad_value, first_key, length, V_OUT, VALUE_DIM, TILE, BLOCK_V
    )
