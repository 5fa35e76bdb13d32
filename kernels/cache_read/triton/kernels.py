"""One pass over the slots of a row, block by block, for the query heads that read one value head.

The slots that are there are shared out among splits, of whole blocks, when the kernel runs. The weights of softmax and
exp are relative to the highest logit so far, as in attention (arXiv 2205.14135): so they fit any dtype.

At most 32 query heads share a program, so that no product is one of Hopper's own, which asks for 64: of these ptxas
12.8 (of Triton 3.6) has left descriptors undefined after loops that may be empty, as this one may.
"""

import triton
import triton.language as tl

from zoo.kernels.triton.tiles import dot, load_rows, round_half_to_even, store_rows

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _weigh(logits, KAPPA: tl.constexpr, UNIT: tl.constexpr):
    """kappa of logits that it takes one by one; UNIT is what round makes whole. 0 is 0 to all of them."""
    weights = logits
    if KAPPA == "relu":
        weights = tl.maximum(logits, 0.0)
    elif KAPPA == "round":
        weights = tl.div_rn(round_half_to_even(logits * UNIT), tl.full([], UNIT, tl.float32))
    return weights


@triton.jit
def _slots_of_split(counts, batch, split, num_slots, num_splits, SLOTS: tl.constexpr):
    """Its first slot, and the end of those that are there: an equal share, rounded up to whole blocks."""
    count = tl.minimum(tl.maximum(tl.load(counts + batch), 0), num_slots).to(tl.int32)
    share = tl.cdiv(tl.cdiv(count, num_splits), SLOTS) * SLOTS
    first = split * share
    return first, tl.minimum(first + share, count)


@triton.jit(do_not_specialize=["num_slots", "num_splits"])
def cache_read_kernel(
    q,
    k,
    v,
    counts,
    partial,
    highest,
    sums,
    num_slots,
    num_splits,
    scale,
    q_batch,
    k_batch,
    v_batch,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_HEAD: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
    KAPPA: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One program a row, split, value head and tile of its query heads; those side by side read the same slots."""
    REPEAT: tl.constexpr = HEADS // VALUE_HEADS
    TILES: tl.constexpr = (REPEAT + ROWS - 1) // ROWS
    RELATIVE: tl.constexpr = KAPPA == "softmax" or KAPPA == "exp"
    program = tl.program_id(0)
    tile = program % TILES
    program = program // TILES
    group = program % VALUE_HEADS
    place = (program // VALUE_HEADS).to(tl.int64)
    split = (place % num_splits).to(tl.int32)
    batch = place // num_splits
    first, end = _slots_of_split(counts, batch, split, num_slots, num_splits, SLOTS)

    head = tile * ROWS
    query = load_rows(q + batch * q_batch + group * REPEAT * Q_ROW, head, REPEAT, Q_ROW, KEY_DIM, ROWS, BLOCK_K)
    k += batch * k_batch + (group // (VALUE_HEADS // KEY_HEADS)).to(tl.int64) * K_HEAD
    v += batch * v_batch + group.to(tl.int64) * V_HEAD
    factor = scale
    if RELATIVE:
        factor = scale * _LOG2E

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    read = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for slot in tl.range(first, end, SLOTS, num_stages=STAGES):
        key = load_rows(k, slot, end, K_ROW, KEY_DIM, SLOTS, BLOCK_K)
        value = load_rows(v, slot, end, V_ROW, VALUE_DIM, SLOTS, BLOCK_V)
        logits = dot(query, tl.trans(key)) * factor
        if RELATIVE:
            there = slot + tl.arange(0, SLOTS) < end
            logits = tl.where(there[None, :], logits, float("-inf"))
            higher = tl.maximum(largest, tl.max(logits, 1))
            weights = tl.exp2(logits - higher[:, None])
            correction = tl.exp2(largest - higher)
            total = total * correction + tl.sum(weights, 1)
            read = read * correction[:, None]
            largest = higher
        else:
            weights = _weigh(logits, KAPPA, UNIT)
        read += dot(weights.to(value.dtype), value)

    at = place * HEADS + group * REPEAT
    store_rows(partial + at * VALUE_DIM, read, head, REPEAT, VALUE_DIM, VALUE_DIM, ROWS, BLOCK_V)
    heads = head + tl.arange(0, ROWS)
    if RELATIVE:
        tl.store(highest + at + heads, largest, mask=heads < REPEAT)
    if KAPPA == "softmax":
        tl.store(sums + at + heads, total, mask=heads < REPEAT)
