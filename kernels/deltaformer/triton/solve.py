"""The transposed solve of the write, from the last block of rows to the first: the gradient of R = diag(alpha) V.

    dR = (I + diag(beta) A)^-T dU        that is        dr_t = du_t - sum_{s>t} beta_s A_st dr_s

It is the write's mirror image (see `write`), but A is known from the log-sum-exp, and the inverses of the diagonal
blocks are kept. From dR follow dV = diag(alpha) dR, dalpha_t = dr_t . v_t, and what softmax subtracts,

    beta_t sum_i A_ti dr_t . u_i = dr_t . (alpha_t v_t - u_t)

for which the forward keeps what rounding took from u, in float32 alpha_t v_t - u_t itself: an error in it would act on
all keys of a row alike.
"""

import triton
import triton.language as tl

from zoo.kernels.deltaformer.triton.dataflow import draw, publish, wait
from zoo.kernels.deltaformer.triton.tiles import logit_factor, logits_of, weigh
from zoo.kernels.triton.documents import place_of_block, place_of_head
from zoo.kernels.triton.tiles import dot, load_numbers, load_rows, store_rows


@triton.jit
def _transposed_weights(
    key,
    w,
    lse,
    beta,
    row,
    length,
    factor,
    W_ROW: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    KAPPA: tl.constexpr,
    UNIT: tl.constexpr,
):
    """beta_s A_si of a later block of rows s, transposed: with keys first each thread would need all rows' numbers."""
    query = load_rows(w, row, length, W_ROW, KEY_DIM, BLOCK, BLOCK_K)
    log_sum = None
    if KAPPA == "softmax":
        log_sum = load_numbers(lse, row, length, BLOCK)[:, None]
    weights = weigh(logits_of(query, key, factor, None, KAPPA), log_sum, KAPPA, UNIT)
    return tl.trans((weights * load_numbers(beta, row, length, BLOCK)[:, None]).to(key.dtype))


@triton.jit(do_not_specialize=["seq_len", "num_blocks", "num_lanes", "num_counters", "together"])
def solve_kernel(
    w,
    k,
    v,
    alpha,
    beta,
    blocks,
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
    num_blocks,
    num_lanes,
    num_counters,
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
    turn, lane = draw(progress, num_blocks, num_lanes, together)
    number = num_blocks - 1 - turn
    document, length, row = place_of_block(blocks, number, seq_len, BLOCK)
    if row >= length:
        return
    block = row // BLOCK
    last = tl.cdiv(length, BLOCK) - 1
    published = progress + 1 + lane * num_counters + number - block
    first_value = (lane % SLICES) * BLOCK_V
    at_head = lane // SLICES
    head, group, token_zero, head_zero = place_of_head(at_head, document, seq_len, HEADS, REPEAT)
    w += token_zero * W_ROW + head * w_head
    k += token_zero * K_ROW + group * k_head
    v += token_zero * V_ROW + group * v_head
    u += token_zero * U_ROW + head * VALUE_DIM
    grad_u += token_zero * U_ROW + head * VALUE_DIM
    grad_r += token_zero * U_ROW + head * VALUE_DIM
    grad_v += token_zero * U_ROW + head * VALUE_DIM
    alpha += token_zero * HEADS + head
    beta += head_zero
    lse += head_zero
    index = tl.arange(0, BLOCK)
    inside = row + index < length
    key = load_rows(k, row, length, K_ROW, KEY_DIM, BLOCK, BLOCK_K)
    factor = logit_factor(scale, KAPPA)
    near = tl.maximum(last - block - AHEAD, 0)

    done = 0
    later = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    for first in tl.range(0, near, AT_ONCE):
        end = tl.minimum(first + AT_ONCE, near)
        done = wait(published, end, done)
        for n in tl.range(first, end, num_stages=STAGES):
            at = (last - n) * BLOCK
            weights = _transposed_weights(
                key, w, lse, beta, at, length, factor, W_ROW, KEY_DIM, BLOCK_K, BLOCK, KAPPA, UNIT
            )
            later += dot(weights, load_rows(grad_r, at, length, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value))

    at_block = (at_head.to(tl.int64) * num_blocks + number) * (BLOCK * BLOCK)
    x = tl.load(inverse + at_block + index[None, :] * BLOCK + index[:, None])
    given = load_rows(grad_u, row, length, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value)
    # Of the last block, which has none after it, once past the end of the document (see `tiles`).
    for i in tl.range(tl.maximum(last - block - near, 1), num_stages=1):
        at = tl.maximum(last - near - i, block + 1) * BLOCK
        weights = _transposed_weights(
            key, w, lse, beta, at, length, factor, W_ROW, KEY_DIM, BLOCK_K, BLOCK, KAPPA, UNIT
        )
        done = wait(published, tl.minimum(near + i + 1, last - block), done)
        later += dot(weights, load_rows(grad_r, at, length, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value))

    right = given.to(tl.float32) - later
    solved = right + dot(x, right.to(x.dtype))
    store_rows(grad_r, solved, row, length, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value)
    publish(published)

    share = tl.load(alpha + (row + index) * HEADS, mask=inside, other=0.0)[:, None]
    store_rows(grad_v, share * solved, row, length, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value)
    value = load_rows(v, row, length, V_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value).to(tl.float32)
    at_slice = (lane % SLICES) * (num_lanes // SLICES).to(tl.int64) * seq_len
    tl.store(grad_alpha + at_slice + (token_zero + row + index) * HEADS + head, tl.sum(solved * value, 1), mask=inside)
    if KAPPA == "softmax":
        rest += token_zero * U_ROW + head * VALUE_DIM
        taken = load_rows(rest, row, length, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value).to(tl.float32)
        if u.dtype.element_ty != tl.float32:
            taken += load_rows(u, row, length, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value).to(tl.float32)
            taken = share * value - taken
        stored = solved.to(grad_r.dtype.element_ty).to(tl.float32)
        total = tl.sum(stored * taken, 1)
        tl.store(totals + at_slice + head_zero + row + index, total, mask=inside)
