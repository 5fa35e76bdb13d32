"""The gradients, as in `zoo.kernels.attention.triton.gradients`, with products that run while others are read.

    dP_ti = do_t . v_i      dS_ti = P_ti (dP_ti - do_t . o_t)
    dq = scale dS k         dk = scale dS^T q                      dv = P^T do

P is made from its products while those of dP are under way, and those of dq, dk and dv run into the next turn.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from zoo.kernels.attention.hopper.tiles import (
    TILE,
    WARPS,
    arrived,
    fetch,
    make_barriers,
    make_ring,
    product_layout,
    start_product,
    store_tile,
    wait_for_all,
)
from zoo.kernels.attention.triton.tiles import blocks_of_keys, blocks_of_rows, logit_factor, visible_keys
from zoo.kernels.triton.documents import place_of_block, place_of_head


@gluon.jit
def weights_of(products, log_sum, factor, rows, keys, window, masked, WINDOWED: gl.constexpr):
    """P; if `masked` 0 where a row does not see a key; 0 in rows whose `log_sum` is infinite."""
    weights = gl.exp2(products * factor - log_sum)
    if masked:
        weights = gl.where(visible_keys(keys, rows, window, WINDOWED), weights, 0.0)
    return weights


@gluon.jit
def load_tile(matrix, token, row, end, ROW: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr):
    """The counterpart of `store_tile`: into registers, 0 where there is nothing."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK, BLOCK // 8], [WARPS, 1], [1, 0])
    index = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    inside = (row + index < end)[:, None] & (column < DIM)[None, :]
    return gl.load(matrix + (token + row) * ROW + index[:, None] * ROW + column[None, :], mask=inside, other=0.0)


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

    q_ring, q_barrier = make_ring(q, BLOCK_K, 1), make_barriers(1)
    grad_ring, grad_barrier = make_ring(grad, BLOCK_V, 1), make_barriers(1)
    k_ring, k_barriers = make_ring(k, BLOCK_K, STAGES), make_barriers(STAGES)
    v_ring, v_barriers = make_ring(v, BLOCK_V, STAGES), make_barriers(STAGES)
    fence_async_shared()
    fetch(q, q_ring, q_barrier, 0, at_q, batch, document + row, True, BLOCK_K, 1)
    fetch(grad, grad_ring, grad_barrier, 0, at_q, batch, document + row, True, BLOCK_V, 1)
    for n in gl.static_range(STAGES):
        fetch(k, k_ring, k_barriers, n, at_kv, batch, token + n * TILE, n < count, BLOCK_K, STAGES)
        fetch(v, v_ring, v_barriers, n, at_kv, batch, token + n * TILE, n < count, BLOCK_V, STAGES)

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
    query = arrived(q_ring, q_barrier, 0, BLOCK_K, 1)
    grad_rows = arrived(grad_ring, grad_barrier, 0, BLOCK_V, 1)
    for done in range(count):
        j = first + done
        key = arrived(k_ring, k_barriers, done, BLOCK_K, STAGES)
        products = start_product(query, key)
        value = arrived(v_ring, v_barriers, done, BLOCK_V, STAGES)
        grad_weights = start_product(grad_rows, value)
        products, grad_before = warpgroup_mma_wait(1, deps=[products, grad_query])
        wait_for_all()  # every warp has read the keys before
        after = done - 1 + STAGES
        exists = (done > 0) & (after < count)
        fetch(k, k_ring, k_barriers, after, at_kv, batch, token + after * TILE, exists, BLOCK_K, STAGES)
        masked = (j < whole) | (j >= whole_end)
        keys = j * TILE + column
        weights = weights_of(products, log_sum[:, None], factor, rows[:, None], keys[None, :], window, masked, WINDOWED)
        grad_weights = warpgroup_mma_wait(0, deps=[grad_weights])
        grad_logits = (weights * (grad_weights - total[:, None])).to(k.dtype)
        grad_logits = gl.convert_layout(grad_logits, gl.DotOperandLayout(0, GRADIENT, 2))
        grad_query = warpgroup_mma(grad_logits, key, grad_before, is_async=True)
        wait_for_all()  # every warp has read the values
        after = done + STAGES
        fetch(v, v_ring, v_barriers, after, at_kv, batch, token + after * TILE, after < count, BLOCK_V, STAGES)
    grad_query = warpgroup_mma_wait(0, deps=[grad_query]) * scale
    store_tile(grad_q + head * KEY_DIM, grad_query, zero, row, length, Q_OUT, KEY_DIM, BLOCK_K)


@gluon.jit
def fetch_rows(
    x,
    ring,
    numbers,
    numbers_ring,
    barriers,
    n,
    exists,
    first_head,
    batch,
    token,
    place,
    each,
    HEADS: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Send for the n-th block of rows, and for a number for each of them, if it exists.

    There are `each` of every query head, the first at `token`, and its numbers at `place`.
    """
    head = first_head + n // each
    row = n % each * TILE
    barrier = barriers.index(n % STAGES)
    mbarrier.expect(barrier, TILE * (BLOCK * 2 + 4), pred=exists)
    tma.async_copy_global_to_shared(x, [head, batch, token + row, 0], barrier, ring.index(n % STAGES), pred=exists)
    at = [batch * HEADS + head, place + row]
    tma.async_copy_global_to_shared(numbers, at, barrier, numbers_ring.index(n % STAGES), pred=exists)


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
    place = (number - first_key // TILE + first) * TILE  # of its numbers
    first_head = at_kv * REPEAT

    k_ring, k_barrier = make_ring(k, BLOCK_K, 1), make_barriers(1)
    v_ring, v_barrier = make_ring(v, BLOCK_V, 1), make_barriers(1)
    q_ring, q_barriers = make_ring(q, BLOCK_K, STAGES), make_barriers(STAGES)
    grad_ring, grad_barriers = make_ring(grad, BLOCK_V, STAGES), make_barriers(STAGES)
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE], lse.layout)
    totals_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE], totals.layout)
    fence_async_shared()
    fetch(k, k_ring, k_barrier, 0, at_kv, batch, document + first_key, True, BLOCK_K, 1)
    fetch(v, v_ring, v_barrier, 0, at_kv, batch, document + first_key, True, BLOCK_V, 1)
    for n in gl.static_range(STAGES):
        turn = first_head, batch, token, place, each
        fetch_rows(q, q_ring, lse, lse_ring, q_barriers, n, n < count, *turn, HEADS, BLOCK_K, STAGES)
        fetch_rows(grad, grad_ring, totals, totals_ring, grad_barriers, n, n < count, *turn, HEADS, BLOCK_V, STAGES)

    factor = logit_factor(scale)
    keys = first_key + gl.arange(0, TILE, layout=gl.SliceLayout(1, PRODUCTS))
    index = gl.arange(0, TILE, layout=gl.SliceLayout(0, PRODUCTS))
    grad_key = warpgroup_mma_init(gl.zeros([TILE, BLOCK_K], gl.float32, layout=KEY_GRADIENT))
    grad_value = warpgroup_mma_init(gl.zeros([TILE, BLOCK_V], gl.float32, layout=VALUE_GRADIENT))
    key = arrived(k_ring, k_barrier, 0, BLOCK_K, 1)
    value = arrived(v_ring, v_barrier, 0, BLOCK_V, 1)
    for done in range(count):
        i = first + done % each
        query = arrived(q_ring, q_barriers, done, BLOCK_K, STAGES)
        products = start_product(key, query)
        grad_rows = arrived(grad_ring, grad_barriers, done, BLOCK_V, STAGES)
        grad_weights = start_product(value, grad_rows)
        products, grad_key_before, grad_value_before = warpgroup_mma_wait(1, deps=[products, grad_key, grad_value])
        wait_for_all()  # every warp has read the rows before
        after = done - 1 + STAGES
        exists = (done > 0) & (after < count)
        turn = first_head, batch, token, place, each
        fetch_rows(q, q_ring, lse, lse_ring, q_barriers, after, exists, *turn, HEADS, BLOCK_K, STAGES)
        fetch_rows(grad, grad_ring, totals, totals_ring, grad_barriers, after, exists, *turn, HEADS, BLOCK_V, STAGES)
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
