"""The gradients, as in `zoo.kernels.attention.triton.gradients`, with products that run while others are read.

    dP_ti = do_t . v_i      dS_ti = P_ti (dP_ti - do_t . o_t)
    dq = scale dS k         dk = scale dS^T q                      dv = P^T do

P is made from its products while those of dP are under way, and those of dq, dk and dv run into the next turn.
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
    NUMBER_BYTES,
    ROW_BYTES,
    TILE,
    arrived,
    expect,
    load_tile,
    make_barriers,
    make_numbers_ring,
    make_ring,
    product_layout,
    send,
    send_numbers,
    start_product,
    store_tile,
    wait_for_all,
)
from zoo.kernels.attention.triton.tiles import blocks_of_keys, blocks_of_rows, logit_factor, weights_of
from zoo.kernels.triton.documents import place_of_block, place_of_head


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
    document, length, row = place_of_block(blocks, number, seq_len, TILE)
    if row >= length:
        return
    head, group, zero, _ = place_of_head(at_head, document, seq_len, HEADS, REPEAT)
    at_q, at_kv, batch = head.to(gl.int32), group.to(gl.int32), at_head // HEADS
    first, whole, whole_end, end = blocks_of_keys(row, window, TILE, WINDOWED)
    count = end - first
    token = document + first * TILE  # of the first block of keys

    q_ring, grad_ring, barrier = make_ring(q, BLOCK_K, 1), make_ring(grad, BLOCK_V, 1), make_barriers(1)
    k_ring, k_barriers = make_ring(k, BLOCK_K, K_STAGES), make_barriers(K_STAGES)
    v_ring, v_barriers = make_ring(v, BLOCK_V, STAGES), make_barriers(STAGES)
    fence_async_shared()
    expect(barrier, 0, True, ROW_BYTES * (BLOCK_K + BLOCK_V), 1)
    send(q, q_ring, barrier, 0, at_q, batch, document + row, True, 1)
    send(grad, grad_ring, barrier, 0, at_q, batch, document + row, True, 1)
    for early in gl.static_range(K_STAGES):
        expect(k_barriers, early, early < count, ROW_BYTES * BLOCK_K, K_STAGES)
        send(k, k_ring, k_barriers, early, at_kv, batch, token + early * TILE, early < count, K_STAGES)
    for early in gl.static_range(STAGES):
        expect(v_barriers, early, early < count, ROW_BYTES * BLOCK_V, STAGES)
        send(v, v_ring, v_barriers, early, at_kv, batch, token + early * TILE, early < count, STAGES)

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
    query = arrived(q_ring, barrier, 0, BLOCK_K, 1)
    grad_rows = arrived(grad_ring, barrier, 0, BLOCK_V, 1)
    for done in range(count):
        j = first + done
        key = arrived(k_ring, k_barriers, done, BLOCK_K, K_STAGES)
        products = start_product(query, key)
        value = arrived(v_ring, v_barriers, done, BLOCK_V, STAGES)
        grad_weights = start_product(grad_rows, value)
        products, grad_before = warpgroup_mma_wait(1, deps=[products, grad_query])
        masked = (j < whole) | (j >= whole_end)
        keys = j * TILE + column
        weights = weights_of(products, log_sum[:, None], factor, rows[:, None], keys[None, :], window, masked, WINDOWED)
        grad_weights = warpgroup_mma_wait(0, deps=[grad_weights])
        n, m = done - 1 + K_STAGES, done + STAGES  # the keys and the values that there is room for now
        more_keys = (done > 0) & (n < count)
        expect(k_barriers, n, more_keys, ROW_BYTES * BLOCK_K, K_STAGES)
        expect(v_barriers, m, m < count, ROW_BYTES * BLOCK_V, STAGES)
        wait_for_all()
        send(k, k_ring, k_barriers, n, at_kv, batch, token + n * TILE, more_keys, K_STAGES)
        send(v, v_ring, v_barriers, m, at_kv, batch, token + m * TILE, m < count, STAGES)
        grad_logits = (weights * (grad_weights - total[:, None])).to(k.dtype)
        grad_logits = gl.convert_layout(grad_logits, gl.DotOperandLayout(0, GRADIENT, 2))
        grad_query = warpgroup_mma(grad_logits, key, grad_before, is_async=True)
    grad_query = warpgroup_mma_wait(0, deps=[grad_query]) * scale
    store_tile(grad_q + head * KEY_DIM, grad_query, zero, row, length, Q_OUT, KEY_DIM, BLOCK_K)


@gluon.jit
def expect_rows(barriers, n, exists, BLOCK_K: gl.constexpr, BLOCK_V: gl.constexpr, STAGES: gl.constexpr):
    """What `send_rows` will bring."""
    q_barriers, grad_barriers = barriers
    expect(q_barriers, n, exists, ROW_BYTES * BLOCK_K + NUMBER_BYTES, STAGES)
    expect(grad_barriers, n, exists, ROW_BYTES * BLOCK_V + NUMBER_BYTES, STAGES)


@gluon.jit
def send_rows(
    sources,
    rings,
    barriers,
    n,
    exists,
    first_head,
    batch,
    token,
    place,
    each,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The n-th block of rows is on its way, if it exists: q with the log-sum-exp, the gradient of o with do . o.

    There are `each` of every query head, the first at `token`, and its numbers at `place`.
    """
    q, grad, lse, totals = sources
    q_ring, grad_ring, lse_ring, totals_ring = rings
    q_barriers, grad_barriers = barriers
    head, row = first_head + n // each, n % each * TILE
    send(q, q_ring, q_barriers, n, head, batch, token + row, exists, STAGES)
    send(grad, grad_ring, grad_barriers, n, head, batch, token + row, exists, STAGES)
    send_numbers(lse, lse_ring, q_barriers, n, batch * HEADS + head, place + row, exists, STAGES)
    send_numbers(totals, totals_ring, grad_barriers, n, batch * HEADS + head, place + row, exists, STAGES)


@gluon.jit(do_not_specialize=["seq_len", "num_blocks", "window"])
def key_gradients_kernel(
    q,
    k,
    v,
    grad,
    lse,
    totals,
    blocks,
    grad_k,
    grad_v,
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
    STAGES: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """One program a block of keys and key/value head: dk and dv, from the query heads that read it.

    Products stand keys first: then the weights are where the products with them need them.
    """
    PRODUCTS: gl.constexpr = product_layout(TILE)
    KEY_GRADIENT: gl.constexpr = product_layout(BLOCK_K)
    VALUE_GRADIENT: gl.constexpr = product_layout(BLOCK_V)
    GROUPS: gl.constexpr = HEADS // REPEAT
    K_OUT: gl.constexpr = GROUPS * KEY_DIM
    V_OUT: gl.constexpr = GROUPS * VALUE_DIM
    at_group = gl.program_id(0) // num_blocks
    number = gl.program_id(0) % num_blocks  # in a dense batch the longest first
    document, length, first_key = place_of_block(blocks, number, seq_len, TILE)
    if first_key >= length:
        return
    group, _, zero, _ = place_of_head(at_group, document, seq_len, GROUPS, 1)
    at_kv, batch = group.to(gl.int32), at_group // GROUPS
    first, whole, whole_end, end = blocks_of_rows(first_key, length, window, TILE, WINDOWED)
    each = end - first
    count = each * REPEAT
    token = document + first * TILE  # of the first block of rows
    place = number * TILE  # of its numbers

    k_ring, v_ring, barrier = make_ring(k, BLOCK_K, 1), make_ring(v, BLOCK_V, 1), make_barriers(1)
    q_ring, q_barriers = make_ring(q, BLOCK_K, STAGES), make_barriers(STAGES)
    grad_ring, grad_barriers = make_ring(grad, BLOCK_V, STAGES), make_barriers(STAGES)
    lse_ring, totals_ring = make_numbers_ring(STAGES), make_numbers_ring(STAGES)
    sources, rings = (q, grad, lse, totals), (q_ring, grad_ring, lse_ring, totals_ring)
    barriers = q_barriers, grad_barriers
    turns = at_kv * REPEAT, batch, token, place, each
    fence_async_shared()
    expect(barrier, 0, True, ROW_BYTES * (BLOCK_K + BLOCK_V), 1)
    send(k, k_ring, barrier, 0, at_kv, batch, document + first_key, True, 1)
    send(v, v_ring, barrier, 0, at_kv, batch, document + first_key, True, 1)
    for early in gl.static_range(STAGES):
        expect_rows(barriers, early, early < count, BLOCK_K, BLOCK_V, STAGES)
        send_rows(sources, rings, barriers, early, early < count, *turns, HEADS, STAGES)

    factor = logit_factor(scale)
    keys = first_key + gl.arange(0, TILE, layout=gl.SliceLayout(1, PRODUCTS))
    index = gl.arange(0, TILE, layout=gl.SliceLayout(0, PRODUCTS))
    grad_key = warpgroup_mma_init(gl.zeros([TILE, BLOCK_K], gl.float32, layout=KEY_GRADIENT))
    grad_value = warpgroup_mma_init(gl.zeros([TILE, BLOCK_V], gl.float32, layout=VALUE_GRADIENT))
    key = arrived(k_ring, barrier, 0, BLOCK_K, 1)
    value = arrived(v_ring, barrier, 0, BLOCK_V, 1)
    for done in range(count):
        i = first + done % each
        query = arrived(q_ring, q_barriers, done, BLOCK_K, STAGES)
        products = start_product(key, query)
        grad_rows = arrived(grad_ring, grad_barriers, done, BLOCK_V, STAGES)
        grad_weights = start_product(value, grad_rows)
        products, grad_key_before, grad_value_before = warpgroup_mma_wait(1, deps=[products, grad_key, grad_value])
        n = done - 1 + STAGES  # the rows that there is room for now
        exists = (done > 0) & (n < count)
        expect_rows(barriers, n, exists, BLOCK_K, BLOCK_V, STAGES)
        wait_for_all()
        send_rows(sources, rings, barriers, n, exists, *turns, HEADS, STAGES)
        log_sum = lse_ring.index(done % STAGES).load(PRODUCTS)
        masked = (i < whole) | (i >= whole_end)
        rows = i * TILE + index
        weights = weights_of(products, log_sum, factor, rows[None, :], keys[:, None], window, masked, WINDOWED)
        operand = gl.convert_layout(weights.to(v.dtype), gl.DotOperandLayout(0, VALUE_GRADIENT, 2))
        grad_value = warpgroup_mma(operand, grad_rows, grad_value_before, is_async=True)
        grad_weights = warpgroup_mma_wait(1, deps=[grad_weights])
        total = totals_ring.index(done % STAGES).load(PRODUCTS)
        grad_logits = (weights * (grad_weights - total)).to(k.dtype)
        operand = gl.convert_layout(grad_logits, gl.DotOperandLayout(0, KEY_GRADIENT, 2))
        grad_key = warpgroup_mma(operand, query, grad_key_before, is_async=True)
    grad_key, grad_value = warpgroup_mma_wait(0, deps=[grad_key, grad_value])
    store_tile(grad_k + group * KEY_DIM, grad_key * scale, zero, first_key, length, K_OUT, KEY_DIM, BLOCK_K)
    store_tile(grad_v + group * VALUE_DIM, grad_value, zero, first_key, length, V_OUT, VALUE_DIM, BLOCK_V)
