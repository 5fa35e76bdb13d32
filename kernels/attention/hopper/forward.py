"""The output, as in `zoo.kernels.attention.triton.forward`, by warps that do different things: see `turns`.

While the weights of a block of keys are computed from their products with the rows, the product of the weights before
with their values is under way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from zoo.kernels.attention.hopper.tiles import (
    ROW_BYTES,
    TILE,
    WARPS,
    arrived,
    expect,
    free,
    make_barriers,
    make_ring,
    product_layout,
    send,
    start_product,
    store_tile,
    wait_for_all,
    wait_until_free,
)
from zoo.kernels.attention.hopper.turns import (
    LOADER_REGISTERS,
    NO_TURN,
    READER_REGISTERS,
    READERS,
    ROWS,
    announce,
    count_blocks,
    draw,
    make_turns,
    pass_over,
    place_of_turn,
    take,
)
from zoo.kernels.attention.triton.tiles import blocks_of_keys, logit_factor, visible_keys

__all__ = ["KEYS", "attention_kernel"]

KEYS = gl.constexpr(128)  # of a block


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


@gluon.jit
def blocks_of_turn(row, length, window, WINDOWED: gl.constexpr):
    """The first block of keys that any row of a turn sees, and the end."""
    first, _, _, _ = blocks_of_keys(row, window, ROWS, KEYS, WINDOWED)
    return first, gl.cdiv(gl.minimum(row + ROWS, length), KEYS)


@gluon.jit
def load(
    shared,
    call,
    num_turns,
    counter,
    sources,
    HEADS: gl.constexpr,
    REPEAT: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """What one warp does: it draws turns, and loads for them."""
    turns, rings, filled, emptied = shared
    q, k, v = sources
    q_ring, k_ring, v_ring = rings
    BLOCK_K: gl.constexpr = k_ring.shape[4]
    BLOCK_V: gl.constexpr = v_ring.shape[4]
    q_filled, k_filled, v_filled = filled
    q_emptied, k_emptied, v_emptied = emptied
    taken = 0  # turns
    n = 0  # blocks of keys
    turn = gl.program_id(0)
    following = turn
    while turn < num_turns:
        at_head, _, document, length, row = place_of_turn(turn, call, True)
        announce(turns, taken, turn)
        head, batch = at_head % HEADS, at_head // HEADS
        first, end = blocks_of_turn(row, length, call[3], WINDOWED)
        for reader in gl.static_range(READERS):
            at_rows = taken * READERS + reader
            wait_until_free(q_emptied, at_rows)
            expect(q_filled, at_rows, True, ROW_BYTES * BLOCK_K)
            send(q, q_ring, q_filled, at_rows, head, batch, document + row + reader * TILE, True)
        for j in range(first, end):
            key = document + j * KEYS
            wait_until_free(k_emptied, n)
            expect(k_filled, n, True, 2 * ROW_BYTES * BLOCK_K)
            send(k, k_ring, k_filled, n, head // REPEAT, batch, key, True)
            wait_until_free(v_emptied, n)
            expect(v_filled, n, True, 2 * ROW_BYTES * BLOCK_V)
            send(v, v_ring, v_filled, n, head // REPEAT, batch, key, True)
            n += 1
            if j == first:  # while the readers have something to do
                following = draw(counter)
        taken += 1
        turn = following
    announce(turns, taken, NO_TURN)


@gluon.jit
def read(
    READER: gl.constexpr,
    shared,
    call,
    scale,
    outputs,
    HEADS: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """What four warps do: for each turn the output of 64 rows, and the log-sum-exp of each to the base 2."""
    turns, rings, filled, emptied = shared
    o, lse, num_blocks = outputs
    q_ring, k_ring, v_ring = rings
    BLOCK_V: gl.constexpr = v_ring.shape[4]
    PRODUCTS: gl.constexpr = product_layout(KEYS)
    OUTPUT: gl.constexpr = product_layout(BLOCK_V)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUTPUT, k_width=2)
    O_ROW: gl.constexpr = HEADS * VALUE_DIM
    q_filled, k_filled, v_filled = filled
    q_emptied, k_emptied, v_emptied = emptied
    keys_filled, keys_emptied = (k_filled, v_filled), (k_emptied, v_emptied)
    window = call[3]
    factor = logit_factor(scale)
    taken = 0  # turns
    before = 0  # blocks of keys of earlier turns
    turn = take(turns, taken)
    while turn != NO_TURN:
        at_head, number, document, length, first_row = place_of_turn(turn, call, True)
        first_of_turn, end_of_turn = blocks_of_turn(first_row, length, window, WINDOWED)
        at = before - first_of_turn  # which a block's number is added to
        row = first_row + READER * TILE
        at_rows = taken * READERS + READER
        query = arrived(q_ring, q_filled, at_rows)
        if row < length:
            first, whole, whole_end, end = blocks_of_keys(row, window, TILE, KEYS, WINDOWED)
            pass_over(keys_filled, keys_emptied, before, at + first)
            rows = row + gl.arange(0, TILE, layout=gl.SliceLayout(1, PRODUCTS))
            column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, PRODUCTS))
            largest = gl.full([TILE], float("-inf"), gl.float32, layout=gl.SliceLayout(1, PRODUCTS))
            total = gl.zeros([TILE], gl.float32, layout=gl.SliceLayout(1, PRODUCTS))
            output = gl.zeros([TILE, BLOCK_V], gl.float32, layout=OUTPUT)
            products = start_product(query, arrived(k_ring, k_filled, at + first))
            products = warpgroup_mma_wait(0, deps=[products])
            free(k_emptied, at + first)
            masked = (first < whole) | (first >= whole_end)
            weights, largest, total, correction = weigh(
                products, largest, total, factor, rows, first * KEYS + column, window, masked, WINDOWED
            )
            weights = gl.convert_layout(weights.to(v_ring.dtype), WEIGHTS)
            for j in range(first + 1, end):
                n = at + j
                products = start_product(query, arrived(k_ring, k_filled, n))
                value = arrived(v_ring, v_filled, n - 1)
                output = warpgroup_mma(weights, value, output, is_async=True)
                products = warpgroup_mma_wait(1, deps=[products])
                free(k_emptied, n)
                masked = (j < whole) | (j >= whole_end)
                next_weights, largest, total, correction = weigh(
                    products, largest, total, factor, rows, j * KEYS + column, window, masked, WINDOWED
                )
                output = warpgroup_mma_wait(0, deps=[output])
                free(v_emptied, n - 1)
                output = output * gl.convert_layout(correction, gl.SliceLayout(1, OUTPUT))[:, None]
                weights = gl.convert_layout(next_weights.to(v_ring.dtype), WEIGHTS)
            free(q_emptied, at_rows)
            value = arrived(v_ring, v_filled, at + end - 1)
            output = warpgroup_mma(weights, value, output, is_async=True)
            output = warpgroup_mma_wait(0, deps=[output])
            free(v_emptied, at + end - 1)

            output = output / gl.convert_layout(total, gl.SliceLayout(1, OUTPUT))[:, None]
            token = (at_head // HEADS).to(gl.int64) * call[1] + document
            store_tile(o + at_head % HEADS * VALUE_DIM, output, token, row, length, O_ROW, VALUE_DIM, BLOCK_V)
            if lse is not None:
                log_sum = gl.where(rows < length, largest + gl.log2(total), float("inf"))
                place = (at_head.to(gl.int64) * num_blocks + number) * ROWS
                gl.store(lse + place + (rows - first_row), log_sum)
            pass_over(keys_filled, keys_emptied, at + end, at + end_of_turn)
        else:
            free(q_emptied, at_rows)
            pass_over(keys_filled, keys_emptied, before, at + end_of_turn)
        before = at + end_of_turn
        taken += 1
        turn = take(turns, taken)


@gluon.jit(
    do_not_specialize=["num_heads", "seq_len", "num_blocks", "window"], do_not_specialize_on_alignment=["counter"]
)
def attention_kernel(
    q,
    k,
    v,
    blocks,
    o,
    lse,
    counter,
    num_heads,
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
    WINDOWED: gl.constexpr,
):
    """A turn is a block of rows of a query head; ``num_heads`` counts these over the batch."""
    turns = make_turns()
    rings = make_ring(q, BLOCK_K, READERS), make_ring(k, BLOCK_K, STAGES, KEYS), make_ring(v, BLOCK_V, STAGES, KEYS)
    filled = make_barriers(READERS), make_barriers(STAGES), make_barriers(STAGES)
    emptied = make_barriers(READERS), make_barriers(STAGES, READERS), make_barriers(STAGES, READERS)
    fence_async_shared()
    wait_for_all()
    shared = turns, rings, filled, emptied
    count = count_blocks(blocks, num_blocks)
    num_turns = num_heads * count
    call = blocks, seq_len, count, window
    results = o, lse, num_blocks
    sources = q, k, v
    gl.warp_specialize(
        [
            (read, (0, shared, call, scale, results, HEADS, VALUE_DIM, WINDOWED)),
            (read, (1, shared, call, scale, results, HEADS, VALUE_DIM, WINDOWED)),
            (load, (shared, call, num_turns, counter, sources, HEADS, REPEAT, WINDOWED)),
        ],
        [WARPS, 1],
        [READER_REGISTERS, LOADER_REGISTERS],
    )
