"""The gradient of q, as in `zoo.kernels.attention.triton.gradients`, with products that run while others are read.

    dP_ti = do_t . v_i      dS_ti = P_ti (dP_ti - do_t . o_t)      dq = scale dS k

P is made from its products while those of dP are under way, and those of dq run into the next block of keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from zoo.kernels.attention.hopper.tiles import (
    ROW_BYTES,
    TILE,
    arrived,
    expect,
    load_tile,
    make_barriers,
    make_ring,
    product_layout,
    send,
    start_product,
    store_tile,
    wait_for_all,
)
from zoo.kernels.attention.triton.tiles import blocks_of_keys, logit_factor, weights_of
from zoo.kernels.triton.documents import place_of_block, place_of_head

__all__ = ["row_gradients_kernel"]


@gluon.jit(do_not_specialize=["seq_len", "num_blocks", "window"])
def row_gradients_kernel(
    q,
    k,
    v,
    grad,
    blocks,
    o,
    grad_o,
    lse,
    totals,
    grad_q,
    seq_len,
    num_blocks,
    window,
    scale,
    HEADS: gl.constexpr,
    REPEAT: gl.constexpr,
    KEY_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_V: gl.constexpr,
    PARTS: gl.constexpr,
    K_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """One program a block of rows and query head: dq, and do . o, which the other kernel needs."""
    PRODUCTS: gl.constexpr = product_layout(TILE)
    GRADIENT: gl.constexpr = product_layout(BLOCK_K)
    O_ROW: gl.constexpr = HEADS * VALUE_DIM
    Q_OUT: gl.constexpr = HEADS * KEY_DIM
    at_head = gl.program_id(0) // num_blocks
    number = num_blocks - 1 - gl.program_id(0) % num_blocks  # in a dense batch the longest first
    document, length, row = place_of_block(blocks, number, seq_len, TILE, PARTS)
    if row >= length:
        return
    head, group, zero, _ = place_of_head(at_head, document, seq_len, HEADS, REPEAT)
    at_q, at_kv, batch = head.to(gl.int32), group.to(gl.int32), at_head // HEADS
    first, whole, whole_end, end = blocks_of_keys(row, window, TILE, TILE, WINDOWED)
    count = end - first
    token = document + first * TILE  # of the first block of keys

    q_ring, grad_ring, barrier = make_ring(q, BLOCK_K, 1), make_ring(grad, BLOCK_V, 1), make_barriers(1)
    k_ring, k_barriers = make_ring(k, BLOCK_K, K_STAGES), make_barriers(K_STAGES)
    v_ring, v_barriers = make_ring(v, BLOCK_V, STAGES), make_barriers(STAGES)
    fence_async_shared()
    wait_for_all()
    expect(barrier, 0, True, ROW_BYTES * (BLOCK_K + BLOCK_V))
    send(q, q_ring, barrier, 0, at_q, batch, document + row, True)
    send(grad, grad_ring, barrier, 0, at_q, batch, document + row, True)
    for early in gl.static_range(K_STAGES):
        expect(k_barriers, early, early < count, ROW_BYTES * BLOCK_K)
        send(k, k_ring, k_barriers, early, at_kv, batch, token + early * TILE, early < count)
    for early in gl.static_range(STAGES):
        expect(v_barriers, early, early < count, ROW_BYTES * BLOCK_V)
        send(v, v_ring, v_barriers, early, at_kv, batch, token + early * TILE, early < count)

    output = load_tile(o + head * VALUE_DIM, zero, row, length, O_ROW, VALUE_DIM, BLOCK_V).to(gl.float32)
    upstream = load_tile(grad_o + head * VALUE_DIM, zero, row, length, O_ROW, VALUE_DIM, BLOCK_V).to(gl.float32)
    total = gl.convert_layout(gl.sum(upstream * output, 1), gl.SliceLayout(1, PRODUCTS))
    index = gl.arange(0, TILE, layout=gl.SliceLayout(1, PRODUCTS))
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, PRODUCTS))
    rows = row + index
    at_number = (at_head.to(gl.int64) * num_blocks + number) * TILE + index
    gl.store(totals + at_number, total)
    log_sum = gl.load(lse + at_number)
    factor = logit_factor(scale)

    grad_query = warpgroup_mma_init(gl.zeros([TILE, BLOCK_K], gl.float32, layout=GRADIENT))
    query = arrived(q_ring, barrier, 0)
    grad_rows = arrived(grad_ring, barrier, 0)
    for done in range(count):
        j = first + done
        key = arrived(k_ring, k_barriers, done)
        products = start_product(query, key)
        value = arrived(v_ring, v_barriers, done)
        grad_weights = start_product(grad_rows, value)
        products, grad_before = warpgroup_mma_wait(1, deps=[products, grad_query])
        masked = (j < whole) | (j >= whole_end)
        keys = j * TILE + column
        weights = weights_of(products, log_sum[:, None], factor, rows[:, None], keys[None, :], window, masked, WINDOWED)
        grad_weights = warpgroup_mma_wait(0, deps=[grad_weights])
        n, m = done - 1 + K_STAGES, done + STAGES  # the keys and the values that there is room for now
        more_keys = (done > 0) & (n < count)
        expect(k_barriers, n, more_keys, ROW_BYTES * BLOCK_K)
        expect(v_barriers, m, m < count, ROW_BYTES * BLOCK_V)
        wait_for_all()
        send(k, k_ring, k_barriers, n, at_kv, batch, token + n * TILE, more_keys)
        send(v, v_ring, v_barriers, m, at_kv, batch, token + m * TILE, m < count)
        grad_logits = (weights * (grad_weights - total[:, None])).to(k.dtype)
        grad_logits = gl.convert_layout(grad_logits, gl.DotOperandLayout(0, GRADIENT, 2))
        grad_query = warpgroup_mma(grad_logits, key, grad_before, is_async=True)
    grad_query = warpgroup_mma_wait(0, deps=[grad_query]) * scale
    store_tile(grad_q + head * KEY_DIM, grad_query, zero, row, length, Q_OUT, KEY_DIM, BLOCK_K)
