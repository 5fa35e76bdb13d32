"""The output, as in `zoo.kernels.attention.triton.forward`, with products that run while weights are computed.

While the weights of a block of keys are computed from their products with the rows, the product of the weights before
with their values is under way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from zoo.kernels.attention.hopper.tiles import (
    ROW_BYTES,
    TILE,
    arrived,
    expect,
    make_barriers,
    make_ring,
    product_layout,
    send,
    start_product,
    store_tile,
    wait_for_all,
)
from zoo.kernels.attention.triton.tiles import blocks_of_keys, logit_factor, visible_keys
from zoo.kernels.triton.documents import place_of_block, place_of_head


@gluon.jit
def weigh(products, largest, total, factor, rows, keys, window, masked, WINDOWED: gl.constexpr):
    """Weights of a block of keys; the running maximum and sum with it; what earlier sums are multiplied by."""
    if masked:
        visible = visible_keys(keys[None, :], rows[:, None], window, WINDOWED)
        products = gl.where(visible, products, float("-inf"))
    higher = gl.maximum(largest, gl.max(products, 1) * factor)  # which is positive
    base = gl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing so far
    weights = gl.exp2(products * factor - base[:, None])
    correction = gl.exp2(largest - base)
    return weights, higher, total * correction + gl.sum(weights, 1), correction


@gluon.jit(do_not_specialize=["seq_len", "num_blocks", "window"])
def attention_kernel(
    q,
    k,
    v,
    blocks,
    o,
    lse,
    seq_len,
    num_blocks,
    window,
    scale,
    HEADS: gl.constexpr,
    REPEAT: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_V: gl.constexpr,
    STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """One program a block of rows and query head; also the log-sum-exp of each row, to the base 2."""
    PRODUCTS: gl.constexpr = product_layout(TILE)
    OUTPUT: gl.constexpr = product_layout(BLOCK_V)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUTPUT, k_width=2)
    O_ROW: gl.constexpr = HEADS * VALUE_DIM
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
    k_ring, k_barriers = make_ring(k, BLOCK_K, STAGES), make_barriers(STAGES)
    v_ring, v_barriers = make_ring(v, BLOCK_V, V_STAGES), make_barriers(V_STAGES)
    fence_async_shared()
    expect(q_barrier, 0, True, ROW_BYTES * BLOCK_K, 1)
    send(q, q_ring, q_barrier, 0, at_q, batch, document + row, True, 1)
    for early in gl.static_range(STAGES):
        expect(k_barriers, early, early < count, ROW_BYTES * BLOCK_K, STAGES)
        send(k, k_ring, k_barriers, early, at_kv, batch, token + early * TILE, early < count, STAGES)
    for early in gl.static_range(V_STAGES):
        expect(v_barriers, early, early < count, ROW_BYTES * BLOCK_V, V_STAGES)
        send(v, v_ring, v_barriers, early, at_kv, batch, token + early * TILE, early < count, V_STAGES)

    factor = logit_factor(scale)
    rows = row + gl.arange(0, TILE, layout=gl.SliceLayout(1, PRODUCTS))
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, PRODUCTS))
    largest = gl.full([TILE], float("-inf"), gl.float32, layout=gl.SliceLayout(1, PRODUCTS))
    total = gl.zeros([TILE], gl.float32, layout=gl.SliceLayout(1, PRODUCTS))
    read = gl.zeros([TILE, BLOCK_V], gl.float32, layout=OUTPUT)
    query = arrived(q_ring, q_barrier, 0, BLOCK_K, 1)
    products = start_product(query, arrived(k_ring, k_barriers, 0, BLOCK_K, STAGES))
    products = warpgroup_mma_wait(0, deps=[products])
    expect(k_barriers, STAGES, count > STAGES, ROW_BYTES * BLOCK_K, STAGES)
    wait_for_all()
    send(k, k_ring, k_barriers, STAGES, at_kv, batch, token + STAGES * TILE, count > STAGES, STAGES)
    masked = (first < whole) | (first >= whole_end)
    weights, largest, total, _ = weigh(
        products, largest, total, factor, rows, first * TILE + column, window, masked, WINDOWED
    )
    weights = gl.convert_layout(weights.to(v.dtype), WEIGHTS)
    for done in range(count - 1):  # of the blocks of keys, those whose weights are known but for the last
        j = first + done + 1
        products = start_product(query, arrived(k_ring, k_barriers, done + 1, BLOCK_K, STAGES))
        value = arrived(v_ring, v_barriers, done, BLOCK_V, V_STAGES)
        read = warpgroup_mma(weights, value, read, is_async=True)
        products = warpgroup_mma_wait(1, deps=[products])
        masked = (j < whole) | (j >= whole_end)
        next_weights, largest, total, correction = weigh(
            products, largest, total, factor, rows, j * TILE + column, window, masked, WINDOWED
        )
        read = warpgroup_mma_wait(0, deps=[read])
        read = read * gl.convert_layout(correction, gl.SliceLayout(1, OUTPUT))[:, None]
        weights = gl.convert_layout(next_weights.to(v.dtype), WEIGHTS)
        n, m = done + 1 + STAGES, done + V_STAGES  # the keys and the values that there is room for now
        expect(k_barriers, n, n < count, ROW_BYTES * BLOCK_K, STAGES)
        expect(v_barriers, m, m < count, ROW_BYTES * BLOCK_V, V_STAGES)
        wait_for_all()
        send(k, k_ring, k_barriers, n, at_kv, batch, token + n * TILE, n < count, STAGES)
        send(v, v_ring, v_barriers, m, at_kv, batch, token + m * TILE, m < count, V_STAGES)
    value = arrived(v_ring, v_barriers, count - 1, BLOCK_V, V_STAGES)
    read = warpgroup_mma(weights, value, read, is_async=True)
    read = warpgroup_mma_wait(0, deps=[read])

    read = read / gl.convert_layout(total, gl.SliceLayout(1, OUTPUT))[:, None]
    store_tile(o + head * VALUE_DIM, read, zero, row, length, O_ROW, VALUE_DIM, BLOCK_V)
    if lse is not None:
        log_sum = gl.where(rows < length, largest + gl.log2(total), float("inf"))
        gl.store(lse + (at_head.to(gl.int64) * num_blocks + number) * TILE + (rows - row), log_sum)
