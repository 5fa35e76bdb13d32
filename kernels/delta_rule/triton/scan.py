"""The scans over chunks, forward and reverse: the only sequential part, one program a segment, head and slice of d_v.

Per chunk, with S the state that enters, G the gradient of the state that leaves, w_t how strongly token t is written,
e_t the decay from the chunk's start to t, f_t from there to its end, and k^, q^ the rows of K and Q over their norms:

    D = inverse (V - e k^ S)    O = scale (e q^ S + scores w D)    S' = decay S + K^T f w D
    dV = inverse^T w (scores^T dO + f K G)    G' = decay G + (e q^)^T dO - (e k^)^T dV

(the second line in units of 1 / scale). States are float32 in registers. Every product multiplies something that a scan
holds (S, D, O and their gradients, with d_v along one side) from the left by a block that it has loaded. With FLIP all
that it holds is transposed: then these products read it from registers, which is faster where they suffice.

Where a batch has too few heads for the device, documents are cut into segments that run side by side. A segment is an
affine map of the state that enters it: a first pass of the same kernel finds its matrix (from the rows of the identity,
V = 0) and its offset (from zero), `chain` joins them, and the main pass starts every segment from its true
state. The reverse scan uses the same matrices, transposed.
"""

import triton
import triton.language as tl

from zoo.kernels.delta_rule.triton.cuts import segment_span

_DYNAMIC = ["seq_len", "segment_chunks"]


@triton.jit
def _times(left, held, FLIP: tl.constexpr):
    """left @ held."""
    if FLIP:
        product = tl.dot(held, tl.trans(left), input_precision="tf32x3")
    else:
        product = tl.dot(left, held, input_precision="tf32x3")
    return product


@triton.jit
def _add_times(total, left, held, FLIP: tl.constexpr):
    """total + left @ held."""
    if FLIP:
        total = tl.dot(held, tl.trans(left), total, input_precision="tf32x3")
    else:
        total = tl.dot(left, held, total, input_precision="tf32x3")
    return total


@triton.jit
def _flip(x, FLIP: tl.constexpr):
    """From what is loaded to what is held, and back."""
    if FLIP:
        x = tl.trans(x)
    return x


@triton.jit
def _of_rows(x, FLIP: tl.constexpr):
    """A number a row, to multiply what is held."""
    if FLIP:
        x = x[None, :]
    else:
        x = x[:, None]
    return x


@triton.jit
def _of_columns(x, FLIP: tl.constexpr):
    """A number a column, likewise."""
    if FLIP:
        x = x[:, None]
    else:
        x = x[None, :]
    return x


@triton.jit(do_not_specialize=_DYNAMIC)
def scan_kernel(
    q,
    k,
    v,
    inverse,
    scores,
    write_scale,
    key_norm,
    query_norm,
    decayed,
    remaining,
    initial,
    starts,
    o,
    final,
    states,
    delta,
    offsets,
    transitions,
    segments,
    seq_len,
    segment_chunks,
    scale,
    q_head,
    k_head,
    v_head,
    GROUPS: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    REPEAT: tl.constexpr,
    STAGES: tl.constexpr,
    FLIP: tl.constexpr,
):
    """The forward scan; with `offsets`, only what carries a state from one end of each segment to the other."""
    VALUE_SLICES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    KEY_SLICES: tl.constexpr = (KEY_DIM + BLOCK_V - 1) // BLOCK_V
    SUMMARY: tl.constexpr = offsets is not None
    SLICES: tl.constexpr = VALUE_SLICES + KEY_SLICES if SUMMARY else VALUE_SLICES
    program = tl.program_id(0)
    slice = program % SLICES
    program = program // SLICES
    group = (program % GROUPS).to(tl.int64)
    segment = program // GROUPS
    document, chunk, count, row, length, first, last = segment_span(segment, segments, seq_len, segment_chunks, CHUNK)
    if document < 0:
        return
    of_values = slice < VALUE_SLICES
    if SUMMARY:
        # The last segment's end is nobody's start, and the first starts from a known state.
        if last or (first and not of_values):
            return

    token = tl.arange(0, CHUNK)
    key_dim = tl.arange(0, BLOCK_K)
    value_dim = slice * BLOCK_V + tl.arange(0, BLOCK_V)
    identity_dim = value_dim - VALUE_SLICES * BLOCK_V
    in_key = (key_dim < KEY_DIM)[None, :]
    in_value = value_dim < VALUE_DIM
    state_tile = _of_columns(in_value, FLIP) & _of_rows(key_dim < KEY_DIM, FLIP)
    along_value, along_key = _of_columns(value_dim, FLIP), _of_rows(key_dim, FLIP)
    transposed = along_value * KEY_DIM + along_key  # where states are [d_v, d_k], not the caller's [d_k, d_v]
    at_segment = segment.to(tl.int64) * GROUPS + group
    at_document = document.to(tl.int64) * GROUPS + group
    state = tl.zeros([BLOCK_V, BLOCK_K] if FLIP else [BLOCK_K, BLOCK_V], tl.float32)
    known = first
    if starts is not None:
        state = tl.load(starts + at_segment * VALUE_DIM * KEY_DIM + transposed, mask=state_tile, other=0.0)
        known = False
    if initial is not None:
        boundary = initial + (at_document * KEY_DIM + along_key) * VALUE_DIM + along_value
        state += tl.load(boundary, mask=state_tile & known, other=0.0)
    if SUMMARY:
        state += tl.where(_of_columns(identity_dim, FLIP) == along_key, 1.0, 0.0)

    k += row * K_ROW + group * k_head
    v += row * V_ROW + group * v_head
    at_chunk = chunk.to(tl.int64) * GROUPS + group
    square = token[:, None] * CHUNK + token[None, :]
    key_tile = token[:, None] * K_ROW + key_dim[None, :]
    value_tile = token[:, None] * V_ROW + value_dim[None, :]
    out_row = GROUPS * VALUE_DIM
    delta_tile = token[:, None] * out_row + value_dim[None, :]
    out_tile = token[:, None] * (out_row * REPEAT) + value_dim[None, :]
    for _ in tl.range(0, count, num_stages=STAGES):
        inside = token < length
        rows = inside[:, None]
        key = tl.load(k + key_tile, mask=rows & in_key, other=0.0)
        value = tl.load(v + value_tile, mask=rows & in_value[None, :], other=0.0)
        solve = tl.load(inverse + at_chunk * (CHUNK * CHUNK) + square)
        entering = state.to(key.dtype)
        if states is not None:
            tl.store(states + at_chunk * VALUE_DIM * KEY_DIM + transposed, entering, mask=state_tile)
        predicted = _times(key, entering, FLIP)
        if key_norm is not None:
            predicted *= _of_rows(tl.load(key_norm + at_chunk * CHUNK + token), FLIP)
        if decayed is not None:
            by_decay = tl.load(decayed + at_chunk * CHUNK + token)
            predicted *= _of_rows(by_decay, FLIP)
        error = _times(solve, _flip(value, FLIP), FLIP)
        error = _add_times(error, solve, (-predicted).to(key.dtype), FLIP)
        new = error * _of_rows(tl.load(write_scale + at_chunk * CHUNK + token), FLIP)
        new_low = new.to(key.dtype)
        if not SUMMARY:
            if delta is not None:
                errors = delta + (row * GROUPS + group) * VALUE_DIM + delta_tile
                tl.store(errors, _flip(error.to(key.dtype), FLIP), mask=rows & in_value[None, :])
            for j in tl.range(REPEAT):
                head = group * REPEAT + j
                at_query = at_chunk * REPEAT + j
                place = q + row * Q_ROW + head * q_head + token[:, None] * Q_ROW + key_dim[None, :]
                query = tl.load(place, mask=rows & in_key, other=0.0)
                score = tl.load(scores + at_query * (CHUNK * CHUNK) + square)
                out = _times(query, entering, FLIP)
                if query_norm is not None:
                    out *= _of_rows(tl.load(query_norm + at_query * CHUNK + token), FLIP)
                if decayed is not None:
                    out *= _of_rows(by_decay, FLIP)
                out = _add_times(out, score, new_low, FLIP)
                place = o + (row * GROUPS * REPEAT + head) * VALUE_DIM + out_tile
                tl.store(place, _flip((out * scale).to(o.dtype.element_ty), FLIP), mask=rows & in_value[None, :])
        if decayed is not None:
            state *= tl.load(decayed + at_chunk * CHUNK + CHUNK - 1)
            new_low = (new * _of_rows(tl.load(remaining + at_chunk * CHUNK + token), FLIP)).to(key.dtype)
        state = _add_times(state, tl.trans(key), new_low, FLIP)
        row += CHUNK
        length -= CHUNK
        k += CHUNK * K_ROW
        v += CHUNK * V_ROW
        at_chunk += GROUPS
    if SUMMARY:
        if of_values:
            tl.store(offsets + at_segment * VALUE_DIM * KEY_DIM + transposed, state, mask=state_tile)
        else:
            along_identity = _of_columns(identity_dim, FLIP)
            slot = (segment - document - 1).to(tl.int64) * GROUPS + group  # every document has a first segment
            place = transitions + (slot * KEY_DIM + along_identity) * KEY_DIM + along_key
            tl.store(place, state, mask=(along_identity < KEY_DIM) & (along_key < KEY_DIM))
    elif last:
        place = final + (at_document * KEY_DIM + along_key) * VALUE_DIM + along_value
        tl.store(place, state, mask=state_tile)


@triton.jit(do_not_specialize=_DYNAMIC)
def reverse_scan_kernel(
    q,
    k,
    grad_o,
    inverse,
    scores,
    write_scale,
    key_norm,
    query_norm,
    decayed,
    remaining,
    grad_final,
    ends,
    grad_v,
    grad_initial,
    grad_states,
    offsets,
    segments,
    seq_len,
    segment_chunks,
    scale,
    unit,
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
    FLIP: tl.constexpr,
):
    """The reverse scan; with `offsets`, only the gradient that leaves each segment when none enters it.

    `unit` is 1 / scale: gradients are held in units of scale.
    """
    SLICES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    SUMMARY: tl.constexpr = offsets is not None
    program = tl.program_id(0)
    slice = program % SLICES
    program = program // SLICES
    group = (program % GROUPS).to(tl.int64)
    segment = program // GROUPS
    document, chunk, count, row, length, first, last = segment_span(segment, segments, seq_len, segment_chunks, CHUNK)
    if document < 0:
        return
    if SUMMARY:
        if first:
            return

    token = tl.arange(0, CHUNK)
    key_dim = tl.arange(0, BLOCK_K)
    value_dim = slice * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key = (key_dim < KEY_DIM)[None, :]
    in_value = value_dim < VALUE_DIM
    state_tile = _of_columns(in_value, FLIP) & _of_rows(key_dim < KEY_DIM, FLIP)
    along_value, along_key = _of_columns(value_dim, FLIP), _of_rows(key_dim, FLIP)
    transposed = along_value * KEY_DIM + along_key  # where states are [d_v, d_k], not the caller's [d_k, d_v]
    at_segment = segment.to(tl.int64) * GROUPS + group
    at_document = document.to(tl.int64) * GROUPS + group
    grad = tl.zeros([BLOCK_V, BLOCK_K] if FLIP else [BLOCK_K, BLOCK_V], tl.float32)
    known = last
    if ends is not None:
        grad = tl.load(ends + at_segment * VALUE_DIM * KEY_DIM + transposed, mask=state_tile, other=0.0)
        known = False
    if grad_final is not None:
        boundary = grad_final + (at_document * KEY_DIM + along_key) * VALUE_DIM + along_value
        grad += tl.load(boundary, mask=state_tile & known, other=0.0) * unit

    final_chunk = tl.maximum(count - 1, 0)
    row += final_chunk * CHUNK
    length -= final_chunk * CHUNK
    k += row * K_ROW + group * k_head
    at_chunk = (chunk + final_chunk).to(tl.int64) * GROUPS + group
    square = token[:, None] * CHUNK + token[None, :]
    key_tile = token[:, None] * K_ROW + key_dim[None, :]
    out_row = GROUPS * VALUE_DIM
    value_tile = token[:, None] * out_row + value_dim[None, :]
    out_tile = token[:, None] * (out_row * REPEAT) + value_dim[None, :]
    for _ in tl.range(0, count, num_stages=STAGES):
        inside = token < length
        rows = inside[:, None]
        key = tl.load(k + key_tile, mask=rows & in_key, other=0.0)
        solve = tl.load(inverse + at_chunk * (CHUNK * CHUNK) + square)
        leaving = grad.to(key.dtype)
        if grad_states is not None:
            tl.store(grad_states + at_chunk * VALUE_DIM * KEY_DIM + transposed, leaving, mask=state_tile)
        grad_new = _times(key, leaving, FLIP)
        if decayed is not None:
            by_decay = tl.load(decayed + at_chunk * CHUNK + token)
            grad_new *= _of_rows(tl.load(remaining + at_chunk * CHUNK + token), FLIP)
            grad *= tl.load(decayed + at_chunk * CHUNK + CHUNK - 1)
        for j in tl.range(REPEAT):
            head = group * REPEAT + j
            at_query = at_chunk * REPEAT + j
            place = grad_o + (row * GROUPS * REPEAT + head) * VALUE_DIM + out_tile
            grad_out = tl.load(place, mask=rows & in_value[None, :], other=0.0)
            score = tl.load(scores + at_query * (CHUNK * CHUNK) + square)
            place = q + row * Q_ROW + head * q_head + token[:, None] * Q_ROW + key_dim[None, :]
            query = tl.load(place, mask=rows & in_key, other=0.0)
            grad_new = _add_times(grad_new, tl.trans(score), _flip(grad_out, FLIP), FLIP)
            if query_norm is not None or decayed is not None:
                scaled = grad_out.to(tl.float32)
                if query_norm is not None:
                    scaled *= tl.load(query_norm + at_query * CHUNK + token)[:, None]
                if decayed is not None:
                    scaled *= by_decay[:, None]
                grad_out = scaled.to(query.dtype)
            grad = _add_times(grad, tl.trans(query), _flip(grad_out, FLIP), FLIP)
        grad_error = grad_new * _of_rows(tl.load(write_scale + at_chunk * CHUNK + token), FLIP)
        grad_value = _times(tl.trans(solve), grad_error.to(key.dtype), FLIP)
        if not SUMMARY:
            place = grad_v + (row * GROUPS + group) * VALUE_DIM + value_tile
            written = _flip((grad_value * scale).to(grad_v.dtype.element_ty), FLIP)
            tl.store(place, written, mask=rows & in_value[None, :])
        if key_norm is not None:
            grad_value *= _of_rows(tl.load(key_norm + at_chunk * CHUNK + token), FLIP)
        if decayed is not None:
            grad_value *= _of_rows(by_decay, FLIP)
        grad = _add_times(grad, tl.trans(key), (-grad_value).to(key.dtype), FLIP)
        row -= CHUNK
        length += CHUNK
        k -= CHUNK * K_ROW
        at_chunk -= GROUPS
    if SUMMARY:
        tl.store(offsets + at_segment * VALUE_DIM * KEY_DIM + transposed, grad, mask=state_tile)
    elif grad_initial is not None:
        if first:
            place = grad_initial + (at_document * KEY_DIM + along_key) * VALUE_DIM + along_value
            tl.store(place, grad * scale, mask=state_tile)
