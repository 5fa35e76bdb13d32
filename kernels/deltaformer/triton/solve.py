"""The transposed solve of the write, from the last block of rows to the first: the gradient of R = diag(alpha) V.

    dR = (I + diag(beta) A)^-T dU        that is        dr_t = du_t - sum_{s>t} beta_s A_st dr_s

It is the write's mirror image (see `write`), but A is known from the log-sum-exp, and the inverses of the diagonal
blocks are kept. From dR follow dV = diag(alpha) dR, dalpha_t = dr_t . v_t, and what softmax subtracts,

    beta_t sum_i A_ti dr_t . u_i = dr_t . (alpha_t v_t - u_t)

for which u is wanted as it was before it was rounded: what rounding takes from it would act on all keys of a row alike.
"""

import triton
import triton.language as tl

from zoo.kernels.deltaformer.triton.dataflow import draw, publish, wait
from zoo.kernels.deltaformer.triton.tiles import (
    dot,
    load_numbers,
    load_rows,
    logit_factor,
    logits_of,
    store_rows,
    visible_keys,
    weigh,
)


@triton.jit
def _transposed_weights(
    key,
    w,
    lse,
    beta,
    starts,
    first_key,
    row,
    seq_len,
    factor,
    W_ROW: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    KAPPA: tl.constexpr,
    UNIT: tl.constexpr,
):
    """beta_s A_si of a later block of rows s, transposed."""
    index = tl.arange(0, BLOCK)
    query = load_rows(w, row, seq_len, W_ROW, KEY_DIM, BLOCK, BLOCK_K)
    start = None
    if starts is not None:
        start = load_numbers(starts, row, seq_len, BLOCK)[None, :]
    log_sum = None
    if KAPPA == "softmax":
        log_sum = load_numbers(lse, row, seq_len, BLOCK)[None, :]
    visible = visible_keys((first_key + index)[:, None], (row + index)[None, :], start, False)
    weights = weigh(logits_of(key, query, factor, visible, KAPPA), log_sum, KAPPA, UNIT)
    return (weights * load_numbers(beta, row, seq_len, BLOCK)[None, :]).to(key.dtype)


@triton.jit(do_not_specialize=["seq_len", "num_lanes", "together"])
def solve_kernel(
    w,
    k,
    v,
    alpha,
    beta,
    starts,
    ends,
    u,
    rest,
    lse,
    inverse,
    grad_u,
    grad_r,
    grad_v,
    grad_alpha,
    totals,
    progress,
    seq_len,
    num_lanes,
    together,
    scale,
    w_head,
    k_head,
    v_head,
    HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    W_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
    KAPPA: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One program a block of rows, head of w and slice of d_v."""
    SLICES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    U_ROW: tl.constexpr = HEADS * VALUE_DIM
    num_blocks = tl.cdiv(seq_len, BLOCK)
    turn, lane, published = draw(progress, num_blocks, num_lanes, together)
    block = num_blocks - 1 - turn
    first_value = (lane % SLICES) * BLOCK_V
    at_head = lane // SLICES
    head = at_head % HEADS
    group = (head // REPEAT).to(tl.int64)
    token_zero = (at_head // HEADS).to(tl.int64) * seq_len
    w += token_zero * W_ROW + head.to(tl.int64) * w_head
    k += token_zero * K_ROW + group * k_head
    v += token_zero * V_ROW + group * v_head
    u += token_zero * U_ROW + head * VALUE_DIM
    grad_u += token_zero * U_ROW + head * VALUE_DIM
    grad_r += token_zero * U_ROW + head * VALUE_DIM
    grad_v += token_zero * U_ROW + head * VALUE_DIM
    alpha += token_zero * HEADS + head
    beta += at_head.to(tl.int64) * seq_len
    lse += at_head.to(tl.int64) * seq_len
    row = block * BLOCK
    index = tl.arange(0, BLOCK)
    inside = row + index < seq_len
    key = load_rows(k, row, seq_len, K_ROW, KEY_DIM, BLOCK, BLOCK_K)
    factor = logit_factor(scale, KAPPA)
    end = num_blocks
    if starts is not None:
        end = tl.cdiv(tl.load(ends + tl.minimum(row + BLOCK, seq_len) - 1), BLOCK)
    near = tl.minimum(block + 1 + AHEAD, end)

    done = 0
    later = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    for first in tl.range(0, end - near, AT_ONCE):
        last = tl.minimum(first + AT_ONCE, end - near)
        done = wait(published, num_blocks - end + last, done)
        for n in tl.range(first, last, num_stages=STAGES):
            at = (end - 1 - n) * BLOCK
            weights = _transposed_weights(
                key, w, lse, beta, starts, row, at, seq_len, factor, W_ROW, KEY_DIM, BLOCK_K, BLOCK, KAPPA, UNIT
            )
            later += dot(weights, load_rows(grad_r, at, seq_len, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value))

    at_block = (at_head.to(tl.int64) * num_blocks + block) * (BLOCK * BLOCK)
    x = tl.load(inverse + at_block + index[None, :] * BLOCK + index[:, None])
    given = load_rows(grad_u, row, seq_len, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value)
    for n in tl.range(end - near, end - 1 - block, num_stages=1):
        at = (end - 1 - n) * BLOCK
        weights = _transposed_weights(
            key, w, lse, beta, starts, row, at, seq_len, factor, W_ROW, KEY_DIM, BLOCK_K, BLOCK, KAPPA, UNIT
        )
        done = wait(published, num_blocks - end + n + 1, done)
        later += dot(weights, load_rows(grad_r, at, seq_len, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value))

    right = given.to(tl.float32) - later
    solved = right + dot(x, right.to(x.dtype))
    store_rows(grad_r, solved, row, seq_len, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value)
    if starts is not None:  # the last block of a document has waited for none
        wait(published, turn, done)
    publish(published)

    share = tl.load(alpha + (row + index) * HEADS, mask=inside, other=0.0)[:, None]
    store_rows(grad_v, share * solved, row, seq_len, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value)
    value = load_rows(v, row, seq_len, V_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value).to(tl.float32)
    at_slice = (lane % SLICES) * (num_lanes // SLICES).to(tl.int64) * seq_len
    tl.store(grad_alpha + at_slice + (token_zero + row + index) * HEADS + head, tl.sum(solved * value, 1), mask=inside)
    if KAPPA == "softmax":
        result = load_rows(u, row, seq_len, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value).to(tl.float32)
        if rest is not None:
            rest += token_zero * U_ROW + head * VALUE_DIM
            result += load_rows(rest, row, seq_len, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value).to(tl.float32)
        stored = solved.to(grad_r.dtype.element_ty).to(tl.float32)
        total = tl.sum(stored * (share * value - result), 1)
        tl.store(totals + at_slice + at_head.to(tl.int64) * seq_len + row + index, total, mask=inside)
