"""The gradients of w, beta and k, from U and dR (see `solve`), as in flash attention: A is made again, block by block.

    dA_ti = -beta_t G_ti,  G_ti = dr_t . u_i  for i < t        dbeta_t = -sum_i A_ti G_ti

One kernel goes over the keys of a block of rows, the other over the rows that see a block of keys, so that nothing is
added from two programs at once, and the order of the additions is fixed. Blocks that may hold a row and its own key are
apart from those where every key is before every row. Tiles have rows first in both, so that a thread needs few of the
numbers that each row has; dk takes its tiles transposed.
"""

import triton
import triton.language as tl

from zoo.kernels.deltaformer.triton.tiles import logit_factor, logit_gradient, logits_of, visible_keys, weigh
from zoo.kernels.triton.documents import place_of_block, place_of_head
from zoo.kernels.triton.tiles import dot, load_numbers, load_rows, store_rows


@triton.jit(do_not_specialize=["seq_len", "num_blocks"])
def row_gradients_kernel(
    w,
    k,
    beta,
    blocks,
    u,
    lse,
    grad_r,
    totals,
    grad_w,
    grad_beta,
    seq_len,
    num_blocks,
    scale,
    w_head,
    k_head,
    HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    W_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    KAPPA: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One program a block of rows and head of w: dw and dbeta."""
    U_ROW: tl.constexpr = HEADS * VALUE_DIM
    at_head = tl.program_id(0) // num_blocks
    number = num_blocks - 1 - tl.program_id(0) % num_blocks  # in a dense batch the longest first
    document, length, row = place_of_block(blocks, number, seq_len, ROWS)
    if row >= length:
        return
    head, group, token_zero, head_zero = place_of_head(at_head, document, seq_len, HEADS, REPEAT)
    w += token_zero * W_ROW + head * w_head
    k += token_zero * K_ROW + group * k_head
    u += token_zero * U_ROW + head * VALUE_DIM
    grad_r += token_zero * U_ROW + head * VALUE_DIM
    index = row + tl.arange(0, ROWS)
    column = tl.arange(0, KEYS)
    query = load_rows(w, row, length, W_ROW, KEY_DIM, ROWS, BLOCK_K)
    grad = load_rows(grad_r, row, length, U_ROW, VALUE_DIM, ROWS, BLOCK_V)
    strength = load_numbers(beta + head_zero, row, length, ROWS)[:, None]
    factor = logit_factor(scale, KAPPA)
    log_sum = None
    total = None
    if KAPPA == "softmax":
        log_sum = load_numbers(lse + head_zero, row, length, ROWS)[:, None]
        total = load_numbers(totals + head_zero, row, length, ROWS)[:, None]

    grad_query = tl.zeros([ROWS, BLOCK_K], tl.float32)
    seen = tl.zeros([ROWS], tl.float32)
    first = row // KEYS
    last = tl.cdiv(tl.minimum(row + ROWS, length), KEYS)
    for BEFORE in tl.static_range(2):
        for j in tl.range(first, last, num_stages=1 + (STAGES - 1) * BEFORE):
            key = load_rows(k, j * KEYS, length, K_ROW, KEY_DIM, KEYS, BLOCK_K)
            past = load_rows(u, j * KEYS, length, U_ROW, VALUE_DIM, KEYS, BLOCK_V)
            visible = visible_keys((j * KEYS + column)[None, :], index[:, None], BEFORE == 0)
            weights = weigh(logits_of(query, key, factor, visible, KAPPA), log_sum, KAPPA, UNIT)
            pairs = dot(grad, tl.trans(past))
            seen += tl.sum(weights * pairs, 1)
            logits = logit_gradient(weights, strength * pairs, total, visible, KAPPA)
            grad_query += dot(logits.to(key.dtype), key)
        last = first
        first = 0

    grad_w += token_zero * (HEADS * KEY_DIM) + head * KEY_DIM
    store_rows(grad_w, grad_query * -scale, row, length, HEADS * KEY_DIM, KEY_DIM, ROWS, BLOCK_K)
    tl.store(grad_beta + (token_zero + index) * HEADS + head, -seen, mask=index < length)


@triton.jit(do_not_specialize=["seq_len", "num_blocks"])
def key_gradients_kernel(
    w,
    k,
    beta,
    blocks,
    u,
    lse,
    grad_r,
    totals,
    grad_k,
    seq_len,
    num_blocks,
    scale,
    w_head,
    k_head,
    HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    W_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    KAPPA: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One program a block of keys and key/value head: dk, from the heads of w that are compared with it."""
    U_ROW: tl.constexpr = HEADS * VALUE_DIM
    GROUPS: tl.constexpr = HEADS // REPEAT
    at_group = tl.program_id(0) // num_blocks
    number = tl.program_id(0) % num_blocks  # in a dense batch the longest first
    document, length, first_key = place_of_block(blocks, number, seq_len, KEYS)
    if first_key >= length:
        return
    group = at_group % GROUPS
    token_zero = (at_group // GROUPS).to(tl.int64) * seq_len + document
    k += token_zero * K_ROW + group.to(tl.int64) * k_head
    w += token_zero * W_ROW
    u += token_zero * U_ROW
    grad_r += token_zero * U_ROW
    index = tl.arange(0, ROWS)
    column = first_key + tl.arange(0, KEYS)
    key = load_rows(k, first_key, length, K_ROW, KEY_DIM, KEYS, BLOCK_K)
    factor = logit_factor(scale, KAPPA)

    grad_key = tl.zeros([KEYS, BLOCK_K], tl.float32)
    for repeat in tl.range(REPEAT):
        head = group * REPEAT + repeat
        head_zero = (at_group * REPEAT + repeat).to(tl.int64) * seq_len + document
        past = load_rows(u + head * VALUE_DIM, first_key, length, U_ROW, VALUE_DIM, KEYS, BLOCK_V)
        of_head = w + head.to(tl.int64) * w_head
        first = first_key // ROWS
        last = tl.cdiv(tl.minimum(first_key + KEYS, length), ROWS)
        for AFTER in tl.static_range(2):
            for i in tl.range(first, last, num_stages=1 + (STAGES - 1) * AFTER):
                row = i * ROWS
                query = load_rows(of_head, row, length, W_ROW, KEY_DIM, ROWS, BLOCK_K)
                grad = load_rows(grad_r + head * VALUE_DIM, row, length, U_ROW, VALUE_DIM, ROWS, BLOCK_V)
                strength = load_numbers(beta + head_zero, row, length, ROWS)[:, None]
                log_sum = None
                total = None
                if KAPPA == "softmax":
                    log_sum = load_numbers(lse + head_zero, row, length, ROWS)[:, None]
                    total = load_numbers(totals + head_zero, row, length, ROWS)[:, None]
                visible = visible_keys(column[None, :], (row + index)[:, None], AFTER == 0)
                weights = weigh(logits_of(query, key, factor, visible, KAPPA), log_sum, KAPPA, UNIT)
                pairs = strength * dot(grad, tl.trans(past))
                logits = logit_gradient(weights, pairs, total, visible, KAPPA)
                grad_key += dot(tl.trans(logits.to(query.dtype)), query)
            first = last
            last = tl.cdiv(length, ROWS)

    grad_k += token_zero * (GROUPS * KEY_DIM) + group * KEY_DIM
    store_rows(grad_k, grad_key * -scale, first_key, length, GROUPS * KEY_DIM, KEY_DIM, KEYS, BLOCK_K)
