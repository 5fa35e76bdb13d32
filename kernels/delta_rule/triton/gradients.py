"""The gradients of q, k, beta and g, parallel over chunks and heads, from what the two scans leave behind.

With S the state that enters a chunk, G the gradient of the state that leaves it, D and dV as in `scan`, and the
normalised rows k^ and q^, decays e_t from the chunk's start to t, f_t from t to its end, and E_ti from i to t:

    dP = tril(dO D^T)           dq^_t = scale (e_t S dO_t + sum_i dP_ti E_ti beta_i k^_i)
    dA = -tril(dV D^T, -1)      dk^_t = -e_t S dV_t + beta_t z_t + sum_i dA_ti E_ti beta_i k^_i
    z_t = f_t G D_t + sum_i (scale dP_it E_it q^_i + dA_it E_it k^_i)          dbeta_t = k^_t . z_t

Nothing is divided by beta. Of dg it leaves the terms, for `decays` to add up.
"""

import triton
import triton.language as tl

from zoo.kernels.delta_rule.triton.cuts import place_of_program


@triton.jit
def _row_sum(x, y):
    return tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)


@triton.jit
def _load_values(
    x,
    row,
    start,
    length,
    heads,
    head,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    TMA: tl.constexpr,
):
    """[CHUNK, BLOCK_V] of contiguous [rows, heads, d_v]; past `length` zero, or with TMA the next document's rows."""
    if TMA:
        block = x.load([row.to(tl.int32), (head * VALUE_DIM + start).to(tl.int32)])
    else:
        token = tl.arange(0, CHUNK)
        value_dim = start + tl.arange(0, BLOCK_V)
        place = x + (row * heads + head) * VALUE_DIM + token[:, None] * (heads * VALUE_DIM) + value_dim[None, :]
        block = tl.load(place, mask=(token < length)[:, None] & (value_dim < VALUE_DIM)[None, :], other=0.0)
    return block


@triton.jit
def _load_state(
    x,
    at,
    start,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TMA: tl.constexpr,
):
    """[BLOCK_V, BLOCK_K] of contiguous [..., d_v, d_k]."""
    if TMA:
        block = x.load([(at * VALUE_DIM + start).to(tl.int32), 0])
    else:
        key_dim = tl.arange(0, BLOCK_K)
        value_dim = start + tl.arange(0, BLOCK_V)
        place = x + (at * VALUE_DIM + value_dim[:, None]) * KEY_DIM + key_dim[None, :]
        block = tl.load(place, mask=(value_dim < VALUE_DIM)[:, None] & (key_dim < KEY_DIM)[None, :], other=0.0)
    return block


@triton.jit(do_not_specialize=["seq_len"])
def gradients_kernel(
    q,
    k,
    beta,
    key_norm,
    query_norm,
    decayed,
    remaining,
    grad_o,
    delta,
    grad_v,
    states,
    grad_states,
    grad_q,
    grad_k,
    grad_beta,
    decays,
    crossing,
    terms,
    chunks,
    seq_len,
    scale,
    q_head,
    k_head,
    GROUPS: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    REPEAT: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    """One program a chunk and key/value head."""
    at, group, row, length = place_of_program(chunks, seq_len, GROUPS, CHUNK)
    if length <= 0:
        return
    token = tl.arange(0, CHUNK)
    key_dim = tl.arange(0, BLOCK_K)
    inside = token < length
    tile = inside[:, None] & (key_dim < KEY_DIM)[None, :]
    lower = inside[:, None] & (token[:, None] >= token[None, :])
    key = tl.load(k + row * K_ROW + group * k_head + token[:, None] * K_ROW + key_dim[None, :], mask=tile, other=0.0)
    strength = tl.load(beta + (row + token) * GROUPS + group, mask=inside, other=0.0)
    if key_norm is not None:
        by_key = tl.load(key_norm + at * CHUNK + token)
    if decays is not None:
        square = token[:, None] * CHUNK + token[None, :]
        decays += at * (CHUNK * CHUNK) + square
        crossing += at * ((REPEAT + 1) * CHUNK * CHUNK) + square
        by_decay = tl.load(decayed + at * CHUNK + token)
        read = tl.zeros([CHUNK], tl.float32)  # what each token reads of the state before the chunk

    grad_key = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    grad_strength = tl.zeros([CHUNK], tl.float32)
    for j in tl.range(REPEAT):
        head = group * REPEAT + j
        grad_query = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        grad_score = tl.zeros([CHUNK, CHUNK], tl.float32)
        for start in tl.range(0, VALUE_DIM, BLOCK_V, num_stages=STAGES):
            grad_out = _load_values(grad_o, row, start, length, GROUPS * REPEAT, head, VALUE_DIM, BLOCK_V, CHUNK, TMA)
            error = _load_values(delta, row, start, length, GROUPS, group, VALUE_DIM, BLOCK_V, CHUNK, TMA)
            state = _load_state(states, at, start, KEY_DIM, VALUE_DIM, BLOCK_K, BLOCK_V, TMA)
            grad_score = tl.dot(grad_out, tl.trans(error), grad_score, input_precision="tf32x3")
            grad_query = tl.dot(grad_out, state, grad_query, input_precision="tf32x3")
        at_query = q + row * Q_ROW + head * q_head + token[:, None] * Q_ROW + key_dim[None, :]
        query = tl.load(at_query, mask=tile, other=0.0)
        grad_score = tl.where(lower, grad_score * scale, 0.0)
        if decays is not None:
            grad_score *= tl.load(decays)
            grad_query *= by_decay[:, None]
        score = tl.dot(query, tl.trans(key), input_precision="tf32x3")
        to_key = grad_score * strength[None, :]
        to_query = to_key
        if key_norm is not None:
            by_query = tl.load(query_norm + (at * REPEAT + j) * CHUNK + token)
            score *= by_query[:, None] * by_key[None, :]
            to_key *= by_query[:, None]
            to_query *= by_key[None, :]
        grad_strength += tl.sum(grad_score * score, 0)
        if decays is not None:
            tl.store(crossing + j * (CHUNK * CHUNK), grad_score * score * strength[None, :])
            from_state = _row_sum(query, grad_query) * scale
            if key_norm is not None:
                from_state *= by_query
            read += from_state
        grad_query = tl.dot(to_query.to(key.dtype), key, grad_query * scale, input_precision="tf32x3")
        if key_norm is not None:
            tl.debug_barrier()
            query = tl.load(at_query, mask=tile, other=0.0)  # again, like the key below
            along = _row_sum(query, grad_query) * by_query
            grad_query *= by_query[:, None]
            grad_query -= query.to(tl.float32) * (along * by_query * by_query)[:, None]
        place = grad_q + (row * GROUPS * REPEAT + head) * KEY_DIM
        place += token[:, None] * (GROUPS * REPEAT * KEY_DIM) + key_dim[None, :]
        tl.store(place, grad_query.to(grad_q.dtype.element_ty), mask=tile)
        grad_key = tl.dot(tl.trans(to_key.to(key.dtype)), query, grad_key, input_precision="tf32x3")

    # Read again, from the cache: held over the loop above, they would not fit the registers.
    key = tl.load(k + row * K_ROW + group * k_head + token[:, None] * K_ROW + key_dim[None, :], mask=tile, other=0.0)
    grad_write = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    for start in tl.range(0, VALUE_DIM, BLOCK_V, num_stages=STAGES):
        error = _load_values(delta, row, start, length, GROUPS, group, VALUE_DIM, BLOCK_V, CHUNK, TMA)
        grad_state = _load_state(grad_states, at, start, KEY_DIM, VALUE_DIM, BLOCK_K, BLOCK_V, TMA)
        grad_write = tl.dot(error, grad_state, grad_write, input_precision="tf32x3")
    written = _row_sum(key, grad_write) * scale
    if key_norm is not None:
        written *= by_key
    if decays is not None:
        to_end = tl.load(remaining + at * CHUNK + token)
        written *= to_end
        grad_write *= to_end[:, None]
        tl.store(terms + at * (2 * CHUNK) + CHUNK + token, tl.where(inside, written * strength, 0.0))
    grad_strength += written
    grad_key += grad_write * (strength * scale)[:, None]

    grad_read = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    if decays is None:
        grad_read = -grad_key  # so that one sum does for both
    grad_a = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in tl.range(0, VALUE_DIM, BLOCK_V, num_stages=STAGES):
        error = _load_values(delta, row, start, length, GROUPS, group, VALUE_DIM, BLOCK_V, CHUNK, TMA)
        grad_value = _load_values(grad_v, row, start, length, GROUPS, group, VALUE_DIM, BLOCK_V, CHUNK, TMA)
        state = _load_state(states, at, start, KEY_DIM, VALUE_DIM, BLOCK_K, BLOCK_V, TMA)
        grad_a = tl.dot(grad_value, tl.trans(error), grad_a, input_precision="tf32x3")
        grad_read = tl.dot(grad_value, state, grad_read, input_precision="tf32x3")
    grad_a = tl.where(lower & (token[:, None] > token[None, :]), -grad_a, 0.0)
    if decays is None:
        grad_key = -grad_read
    else:
        grad_a *= tl.load(decays)
        grad_read *= by_decay[:, None]
        from_state = _row_sum(key, grad_read)
        if key_norm is not None:
            from_state *= by_key
        read -= from_state
        grad_key -= grad_read
    a = tl.dot(key, tl.trans(key), input_precision="tf32x3")
    to_writer = grad_a * strength[None, :]
    to_reader = to_writer
    if key_norm is not None:
        a *= by_key[:, None] * by_key[None, :]
        to_writer *= by_key[:, None]
        to_reader *= by_key[None, :]
    grad_strength += tl.sum(grad_a * a, 0)
    if decays is not None:
        tl.store(crossing + REPEAT * (CHUNK * CHUNK), grad_a * a * strength[None, :])
    grad_key = tl.dot(to_reader.to(key.dtype), key, grad_key, input_precision="tf32x3")
    grad_key = tl.dot(tl.trans(to_writer.to(key.dtype)), key, grad_key, input_precision="tf32x3")
    if key_norm is not None:
        along = _row_sum(key, grad_key) * by_key
        grad_key *= by_key[:, None]
        grad_key -= key.to(tl.float32) * (along * by_key * by_key)[:, None]
    place = grad_k + (row * GROUPS + group) * KEY_DIM + token[:, None] * (GROUPS * KEY_DIM) + key_dim[None, :]
    tl.store(place, grad_key.to(grad_k.dtype.element_ty), mask=tile)
    place = (row + token) * GROUPS + group
    tl.store(grad_beta + place, grad_strength, mask=inside)
    if decays is not None:
        tl.store(terms + at * (2 * CHUNK) + token, tl.where(inside, read, 0.0))
