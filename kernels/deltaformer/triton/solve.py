"""The write's transposed solve, from the last block of rows to the first, in one launch: the gradient of diag(alpha) V.

    D = (I + diag(beta) A)^-T dU        that is        d_t = du_t - sum_{s>t} beta_s A_st d_s

It is the write's mirror image (see `write`), but A is known from the log-sum-exp, and the inverses of the diagonal
blocks are kept. From D follow dV = diag(alpha) D, dalpha_t = d_t . v_t, and for softmax the row sums of A_ti d_t . u_i,

    beta_t sum_i A_ti d_t . u_i = d_t . (alpha_t v_t - u_t)

for which u is wanted as it was before it was rounded: what rounding takes from it would act on all keys of a row alike.
"""

import triton
import triton.language as tl

from zoo.kernels.deltaformer.triton.dataflow import draw, publish, wait
from zoo.kernels.deltaformer.triton.tiles import dot, load_rows, logit_factor, logits_of, of_document, store_rows, weigh


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
    inside = row + index < seq_len
    query = load_rows(w, row, seq_len, W_ROW, KEY_DIM, BLOCK, BLOCK_K)
    strength = tl.load(beta + row + index, mask=inside, other=0.0)
    log_sum = None
    if KAPPA == "softmax":
        log_sum = tl.load(lse + row + index, mask=inside, other=0.0)[None, :]
    start = None
    if starts is not None:
        start = tl.load(starts + row + index, mask=inside, other=0)[None, :]
    logits = logits_of(key, query, factor, of_document((first_key + index)[:, None], start), KAPPA)
    weights = weigh(logits, log_sum, KAPPA, UNIT)
    return (weights * strength[None, :]).to(key.dtype)


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
    grad_written,
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
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    KAPPA: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One program a block of rows, head of w and slice of d_v."""
    SLICES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    U_ROW: tl.constexpr = HEADS * VALUE_DIM
    num_blocks = tl.cdiv(seq_len, BLOCK)
    turn, lane = draw(progress, num_blocks, num_lanes, together)
    block = num_blocks - 1 - turn
    published = progress + 1 + lane
    slice = (lane % SLICES) * BLOCK_V
    at_head = lane // SLICES
    head = at_head % HEADS
    group = (head // REPEAT).to(tl.int64)
    token_zero = (at_head // HEADS).to(tl.int64) * seq_len
    w += token_zero * W_ROW + head.to(tl.int64) * w_head
    k += token_zero * K_ROW + group * k_head
    v += token_zero * V_ROW + group * v_head
    u += token_zero * U_ROW + head * VALUE_DIM
    grad_u += token_zero * U_ROW + head * VALUE_DIM
    grad_written += token_zero * U_ROW + head * VALUE_DIM
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
        end = tl.cdiv(tl.load(ends + tl.minimum(row + BLOCK, seq_len) - 1), BLOCK).to(tl.int32)
    near = tl.minimum(block + 1 + AHEAD, end)

    done = 0
    later = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    for first in tl.range(0, end - near, GROUP):
        last = tl.minimum(first + GROUP, end - near)
        done = wait(published, num_blocks - end + last, done)
        for n in tl.range(first, last, num_stages=STAGES):
            at = (end - 1 - n) * BLOCK
            weights = _transposed_weights(
                key, w, lse, beta, starts, row, at, seq_len, factor, W_ROW, KEY_DIM, BLOCK_K, BLOCK, KAPPA, UNIT
            )
            later += dot(weights, load_rows(grad_written, at, seq_len, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, slice))

    at_block = (at_head.to(tl.int64) * num_blocks + block) * (BLOCK * BLOCK)
    x = tl.load(inverse + at_block + index[None, :] * BLOCK + index[:, None])
    given = load_rows(grad_u, row, seq_len, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, slice)
    for n in tl.range(end - near, end - 1 - block, num_stages=1):
        at = (end - 1 - n) * BLOCK
        weights = _transposed_weights(
            key, w, lse, beta, starts, row, at, seq_len, factor, W_ROW, KEY_DIM, BLOCK_K, BLOCK, KAPPA, UNIT
        )
        done = wait(published, num_blocks - end + n + 1, done)
        later += dot(weights, load_rows(grad_written, at, seq_len, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, slice))

    right = given.to(tl.float32) - later
    solved = right + dot(x, right.to(x.dtype))
    store_rows(grad_written, solved, row, seq_len, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, slice)
    if starts is not None:  # the last block of a document has waited for none
        wait(published, turn, done)
    publish(published)

    written = tl.load(alpha + (row + index) * HEADS, mask=inside, other=0.0)
    store_rows(grad_v, solved * written[:, None], row, seq_len, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, slice)
    value = load_rows(v, row, seq_len, V_ROW, VALUE_DIM, BLOCK, BLOCK_V, slice).to(tl.float32)
    result = load_rows(u, row, seq_len, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, slice).to(tl.float32)
    at_slice = (lane % SLICES) * (num_lanes // SLICES).to(tl.int64) * seq_len
    tl.store(grad_alpha + at_slice + (token_zero + row + index) * HEADS + head, tl.sum(solved * value, 1), mask=inside)
    if rest is not None:
        rest += token_zero * U_ROW + head * VALUE_DIM
        result += load_rows(rest, row, seq_len, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, slice).to(tl.float32)
    stored = solved.to(grad_written.dtype.element_ty).to(tl.float32)
    total = tl.sum(stored * (written[:, None] * value - result), 1)
    tl.store(totals + at_slice + at_head.to(tl.int64) * seq_len + row + index, total, mask=inside)
