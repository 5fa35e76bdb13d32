"""The write: U = (I + diag(beta) A)^-1 diag(alpha) V, A strictly lower triangular, in one launch.

A block of rows reads what is before it, U_p, weighs it like attention, and solves for its own::

    U_i = (I + diag(beta) A_i)^-1 (diag(alpha) V - diag(beta) A_p U_p)

Blocks are solved in order (see `dataflow`), and the order of the additions is fixed, so that runs are bit-identical.
What needs no other block is done before the last few, which may not be there yet, are needed: softmax's sums over their
keys, and the inverse.
"""

import triton
import triton.language as tl

from zoo.kernels.deltaformer.triton.dataflow import draw, publish, wait
from zoo.kernels.deltaformer.triton.tiles import logit_factor, logits_of, visible_keys, weigh
from zoo.kernels.triton.documents import place_of_block, place_of_head
from zoo.kernels.triton.tiles import dot, load_rows, store_rows
from zoo.kernels.triton.triangular import unit_lower_inverse, unit_lower_inverse_refined


@triton.jit
def add_to_softmax(logits, largest, total):
    """More logits of each row in the running maximum and sum.

    Returns:
        exp2(logits - maximum), the maximum, the sum, and what multiplies what the old maximum scaled.
    """
    higher = tl.maximum(largest, tl.max(logits, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(logits - base[:, None])
    correction = tl.exp2(largest - base)
    return weights, higher, total * correction + tl.sum(weights, 1), correction


@triton.jit(do_not_specialize=["seq_len", "num_blocks", "num_lanes", "num_counters", "together"])
def write_kernel(
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
    LEVELS: tl.constexpr,
    AHEAD: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
    KAPPA: tl.constexpr,
    UNIT: tl.constexpr,
    RANGE: tl.constexpr,
):
    """One program a block of rows, head of w and slice of d_v. RANGE is that of the inverses' products."""
    SLICES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    U_ROW: tl.constexpr = HEADS * VALUE_DIM
    number, lane = draw(progress, num_blocks, num_lanes, together)
    document, length, row = place_of_block(blocks, number, seq_len, BLOCK)
    if row >= length:
        return
    block = row // BLOCK
    published = progress + 1 + lane * num_counters + number - block
    first_value = (lane % SLICES) * BLOCK_V
    at_head = lane // SLICES
    head, group, token_zero, head_zero = place_of_head(at_head, document, seq_len, HEADS, REPEAT)
    w += token_zero * W_ROW + head * w_head
    k += token_zero * K_ROW + group * k_head
    v += token_zero * V_ROW + group * v_head
    u += token_zero * U_ROW + head * VALUE_DIM
    index = tl.arange(0, BLOCK)
    inside = row + index < length
    at_rows = head_zero + row + index
    query = load_rows(w, row, length, W_ROW, KEY_DIM, BLOCK, BLOCK_K)
    strength = tl.load(beta + at_rows, mask=inside, other=0.0)[:, None]
    share = tl.load(alpha + (token_zero + row + index) * HEADS + head, mask=inside, other=0.0)[:, None]
    factor = logit_factor(scale, KAPPA)
    near = tl.maximum(block - AHEAD, 0)

    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if KAPPA == "softmax":
        for j in tl.range(near, block + 1, num_stages=STAGES):
            key = load_rows(k, j * BLOCK, length, K_ROW, KEY_DIM, BLOCK, BLOCK_K)
            visible = visible_keys((j * BLOCK + index)[None, :], (row + index)[:, None], True)
            _, largest, total, _ = add_to_softmax(logits_of(query, key, factor, visible, KAPPA), largest, total)

    done = 0
    read = tl.zeros([BLOCK, BLOCK_V], tl.float32)  # beta times what is read
    for first in tl.range(0, near, AT_ONCE):
        end = tl.minimum(first + AT_ONCE, near)
        done = wait(published, end, done)
        for j in tl.range(first, end, num_stages=STAGES):
            key = load_rows(k, j * BLOCK, None, K_ROW, KEY_DIM, BLOCK, BLOCK_K)
            logits = logits_of(query, key, factor, None, KAPPA)
            if KAPPA == "softmax":
                weights, largest, total, correction = add_to_softmax(logits, largest, total)
                read *= correction[:, None]
            else:
                weights = weigh(logits, None, KAPPA, UNIT) * strength
            past = load_rows(u, j * BLOCK, None, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value)
            read += dot(weights.to(past.dtype), past)

    log_sum = None
    if KAPPA == "softmax":
        read *= tl.where(total > 0, 1 / total, 0.0)[:, None] * strength
        by_row = tl.where(total > 0, largest + tl.log2(total), 0.0)
        if lse is not None:
            tl.store(lse + at_rows, by_row, mask=inside)
        log_sum = by_row[:, None]

    key = load_rows(k, row, length, K_ROW, KEY_DIM, BLOCK, BLOCK_K)
    logits = logits_of(query, key, factor, visible_keys(index[None, :], index[:, None], True), KAPPA)
    a = weigh(logits, log_sum, KAPPA, UNIT) * strength
    if KAPPA == "softmax" and query.dtype != tl.float32:
        x = unit_lower_inverse_refined(a, BLOCK, LEVELS, RANGE)
    else:
        x = unit_lower_inverse(a, BLOCK, LEVELS)
    x = tl.where(index[:, None] == index[None, :], 0.0, x).to(query.dtype)
    if inverse is not None:
        at_block = (at_head.to(tl.int64) * num_blocks + number) * (BLOCK * BLOCK)
        tl.store(inverse + at_block + index[:, None] * BLOCK + index[None, :], x)
    value = load_rows(v, row, length, V_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value)

    # Of block 0, which has none before it, once with nothing visible (see `tiles`).
    for i in tl.range(tl.maximum(block - near, 1), num_stages=1):
        at = (near + i) * BLOCK
        key = load_rows(k, at, row, K_ROW, KEY_DIM, BLOCK, BLOCK_K)
        visible = (at + index < row)[None, :]
        weights = weigh(logits_of(query, key, factor, visible, KAPPA), log_sum, KAPPA, UNIT) * strength
        done = wait(published, tl.minimum(near + i + 1, block), done)
        past = load_rows(u, at, row, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value)
        read += dot(weights.to(past.dtype), past)

    right = share * value.to(tl.float32) - read
    own = dot(x, right.to(x.dtype))
    solved = right + own
    store_rows(u, solved, row, length, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value)
    publish(published)
    if rest is not None:
        rest += token_zero * U_ROW + head * VALUE_DIM
        if u.dtype.element_ty == tl.float32:
            lost = read - own
        else:
            lost = solved - solved.to(u.dtype.element_ty).to(tl.float32)
        store_rows(rest, lost, row, length, U_ROW, VALUE_DIM, BLOCK, BLOCK_V, first_value)
