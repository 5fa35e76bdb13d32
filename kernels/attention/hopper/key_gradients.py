"""The gradients of k and v, as in `zoo.kernels.attention.triton.gradients`, by warps that do different things.

    dP_ti = do_t . v_i      dS_ti = P_ti (dP_ti - do_t . o_t)      dk = scale dS^T q      dv = P^T do

See `turns`. Products stand keys first: then the weights are where the products with them need them. P is made from its
products while those of dP are under way, and dS while those of dv are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from zoo.kernels.attention.hopper.tiles import (
    NUMBER_BYTES,
    ROW_BYTES,
    TILE,
    WARPS,
    arrived,
    expect,
    free,
    make_barriers,
    make_numbers_ring,
    make_ring,
    product_layout,
    send,
    send_numbers,
    start_product,
    store_tile,
    wait_for_all,
    wait_until_filled,
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
from zoo.kernels.attention.triton.tiles import blocks_of_rows, logit_factor, weights_of

__all__ = ["key_gradients_kernel"]


@gluon.jit
def blocks_of_turn(key, length, window, WINDOWED: gl.constexpr):
    """The first block of rows that sees any key of a turn, and the end."""
    _, _, _, end = blocks_of_rows(key + ROWS - TILE, length, window, TILE, WINDOWED)
    return key // TILE, end


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
    q, k, v, grad, lse, totals = sources
    q_ring, k_ring, v_ring, grad_ring, lse_ring, totals_ring = rings
    BLOCK_K: gl.constexpr = k_ring.shape[4]
    BLOCK_V: gl.constexpr = v_ring.shape[4]
    k_filled, q_filled, grad_filled = filled
    k_emptied, rows_emptied = emptied
    GROUPS: gl.constexpr = HEADS // REPEAT
    taken = 0  # turns
    n = 0  # blocks of rows
    turn = gl.program_id(0)
    while turn < num_turns:
        at_group, number, document, length, key = place_of_turn(turn, call, False)
        announce(turns, taken, turn)
        group, batch = at_group % GROUPS, at_group // GROUPS
        first, end = blocks_of_turn(key, length, call[3], WINDOWED)
        for reader in gl.static_range(READERS):
            at_keys = taken * READERS + reader
            start = document + key + reader * TILE
            wait_until_free(k_emptied, at_keys)
            expect(k_filled, at_keys, True, ROW_BYTES * (BLOCK_K + BLOCK_V))
            send(k, k_ring, k_filled, at_keys, group, batch, start, True)
            send(v, v_ring, k_filled, at_keys, group, batch, start, True)
        for repeat in range(REPEAT):
            head = group * REPEAT + repeat
            at_head = at_group * REPEAT + repeat
            for i in range(first, end):
                row = i * TILE
                place = number * ROWS - key + row
                wait_until_free(rows_emptied, n)
                expect(q_filled, n, True, ROW_BYTES * BLOCK_K + NUMBER_BYTES)
                send(q, q_ring, q_filled, n, head, batch, document + row, True)
                send_numbers(lse, lse_ring, q_filled, n, at_head, place, True)
                expect(grad_filled, n, True, ROW_BYTES * BLOCK_V + NUMBER_BYTES)
                send(grad, grad_ring, grad_filled, n, head, batch, document + row, True)
                send_numbers(totals, totals_ring, grad_filled, n, at_head, place, True)
                n += 1
        taken += 1
        turn = draw(counter)
    announce(turns, taken, NO_TURN)


@gluon.jit
def read(
    READER: gl.constexpr,
    shared,
    call,
    scale,
    outputs,
    HEADS: gl.constexpr,
    REPEAT: gl.constexpr,
    KEY_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """What four warps do: for each turn dk and dv of 64 keys, from the query heads that read them."""
    turns, rings, filled, emptied = shared
    grad_k, grad_v = outputs
    q_ring, k_ring, v_ring, grad_ring, lse_ring, totals_ring = rings
    BLOCK_K: gl.constexpr = k_ring.shape[4]
    BLOCK_V: gl.constexpr = v_ring.shape[4]
    STAGES: gl.constexpr = lse_ring.shape[0]
    PRODUCTS: gl.constexpr = product_layout(TILE)
    KEY_GRADIENT: gl.constexpr = product_layout(BLOCK_K)
    VALUE_GRADIENT: gl.constexpr = product_layout(BLOCK_V)
    GROUPS: gl.constexpr = HEADS // REPEAT
    K_OUT: gl.constexpr = GROUPS * KEY_DIM
    V_OUT: gl.constexpr = GROUPS * VALUE_DIM
    k_filled, q_filled, grad_filled = filled
    k_emptied, rows_emptied = emptied
    rows_filled = q_filled, grad_filled
    window = call[3]
    factor = logit_factor(scale)
    index = gl.arange(0, TILE, layout=gl.SliceLayout(0, PRODUCTS))
    taken = 0  # turns
    before = 0  # blocks of rows of earlier turns
    turn = take(turns, taken)
    while turn != NO_TURN:
        at_group, _, document, length, first_key = place_of_turn(turn, call, False)
        first_of_turn, end_of_turn = blocks_of_turn(first_key, length, window, WINDOWED)
        each = end_of_turn - first_of_turn
        own_key = first_key + READER * TILE
        at_keys = taken * READERS + READER
        if own_key < length:
            first, whole, whole_end, end = blocks_of_rows(own_key, length, window, TILE, WINDOWED)
            keys = own_key + gl.arange(0, TILE, layout=gl.SliceLayout(1, PRODUCTS))
            grad_key = gl.zeros([TILE, BLOCK_K], gl.float32, layout=KEY_GRADIENT)
            grad_value = gl.zeros([TILE, BLOCK_V], gl.float32, layout=VALUE_GRADIENT)
            key = arrived(k_ring, k_filled, at_keys)
            value = arrived(v_ring, k_filled, at_keys)
            for repeat in range(REPEAT):
                at = before + repeat * each - first_of_turn  # which a block's number is added to
                pass_over(rows_filled, (rows_emptied,), at + first_of_turn, at + first)
                for i in range(first, end):
                    n = at + i
                    query = arrived(q_ring, q_filled, n)
                    products = start_product(key, query)
                    grad_rows = arrived(grad_ring, grad_filled, n)
                    grad_weights = start_product(value, grad_rows)
                    products = warpgroup_mma_wait(1, deps=[products])
                    log_sum = lse_ring.index(n % STAGES).load(PRODUCTS)
                    masked = (i < whole) | (i >= whole_end)
                    rows = i * TILE + index
                    weights = weights_of(
                        products, log_sum, factor, rows[None, :], keys[:, None], window, masked, WINDOWED
                    )
                    operand = gl.convert_layout(weights.to(v_ring.dtype), gl.DotOperandLayout(0, VALUE_GRADIENT, 2))
                    grad_value = warpgroup_mma(operand, grad_rows, grad_value, is_async=True)
                    grad_weights = warpgroup_mma_wait(1, deps=[grad_weights])
                    total = totals_ring.index(n % STAGES).load(PRODUCTS)
                    grad_logits = (weights * (grad_weights - total)).to(k_ring.dtype)
                    operand = gl.convert_layout(grad_logits, gl.DotOperandLayout(0, KEY_GRADIENT, 2))
                    grad_key = warpgroup_mma(operand, query, grad_key, is_async=True)
                    grad_key, grad_value = warpgroup_mma_wait(0, deps=[grad_key, grad_value])
                    free(rows_emptied, n)
                pass_over(rows_filled, (rows_emptied,), at + end, at + end_of_turn)
            free(k_emptied, at_keys)
            token = (at_group // GROUPS).to(gl.int64) * call[1] + document
            group = at_group % GROUPS
            store_tile(grad_k + group * KEY_DIM, grad_key * scale, token, own_key, length, K_OUT, KEY_DIM, BLOCK_K)
            store_tile(grad_v + group * VALUE_DIM, grad_value, token, own_key, length, V_OUT, VALUE_DIM, BLOCK_V)
        else:
            wait_until_filled(k_filled, at_keys)
            free(k_emptied, at_keys)
            pass_over(rows_filled, (rows_emptied,), before, before + REPEAT * each)
        before += REPEAT * each
        taken += 1
        turn = take(turns, taken)


@gluon.jit(
    do_not_specialize=["num_heads", "seq_len", "num_blocks", "window"], do_not_specialize_on_alignment=["counter"]
)
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
    counter,
    num_heads,
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
    """A turn is a block of keys of a key/value head; ``num_heads`` counts these over the batch."""
    turns = make_turns()
    k_ring, v_ring = make_ring(k, BLOCK_K, READERS), make_ring(v, BLOCK_V, READERS)
    q_ring, grad_ring = make_ring(q, BLOCK_K, STAGES), make_ring(grad, BLOCK_V, STAGES)
    rings = q_ring, k_ring, v_ring, grad_ring, make_numbers_ring(STAGES), make_numbers_ring(STAGES)
    filled = make_barriers(READERS), make_barriers(STAGES), make_barriers(STAGES)
    emptied = make_barriers(READERS), make_barriers(STAGES, READERS)
    fence_async_shared()
    wait_for_all()
    shared = turns, rings, filled, emptied
    count = count_blocks(blocks, num_blocks)
    num_turns = num_heads * count
    call = blocks, seq_len, count, window
    results = grad_k, grad_v
    sources = q, k, v, grad, lse, totals
    gl.warp_specialize(
        [
            (read, (0, shared, call, scale, results, HEADS, REPEAT, KEY_DIM, VALUE_DIM, WINDOWED)),
            (read, (1, shared, call, scale, results, HEADS, REPEAT, KEY_DIM, VALUE_DIM, WINDOWED)),
            (load, (shared, call, num_turns, counter, sources, HEADS, REPEAT, WINDOWED)),
        ],
        [WARPS, 1],
        [READER_REGISTERS, LOADER_REGISTERS],
    )
