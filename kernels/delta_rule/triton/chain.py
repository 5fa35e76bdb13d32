"""What joins the segments of a document: from their matrices and offsets, as `scan` finds them, the states between."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["segments_in_document"])
def chain_kernel(
    boundary,
    unit,
    offsets,
    transitions,
    joined,
    first_segments,
    segments_in_document,
    GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STEP: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The state that enters each segment of a document; reversed, the gradient of the state that leaves it.

    One program a document, head and slice of d_v. Rows of a state meet the matrices' columns STEP at a time, read back
    from what the program itself has written.
    """
    SLICES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    slice = program % SLICES
    program = program // SLICES
    group = (program % GROUPS).to(tl.int64)
    document = program // GROUPS
    if first_segments is not None:
        begin = tl.load(first_segments + document)
        count = tl.load(first_segments + document + 1) - begin
    else:
        begin = document * segments_in_document
        count = segments_in_document
    key_dim = tl.arange(0, BLOCK_K)
    value_dim = slice * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key = key_dim < KEY_DIM
    in_value = (value_dim < VALUE_DIM)[:, None]
    tile = in_value & in_key[None, :]
    rows = value_dim[:, None] * KEY_DIM
    state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if boundary is not None:
        at_document = document.to(tl.int64) * GROUPS + group
        boundary += (at_document * KEY_DIM + key_dim[None, :]) * VALUE_DIM + value_dim[:, None]
        state = tl.load(boundary, mask=tile, other=0.0) * unit
    direction = 1
    segment = begin.to(tl.int64)
    if REVERSE:
        direction = -1
        segment += count - 1
    tl.store(joined + (segment * GROUPS + group) * VALUE_DIM * KEY_DIM + rows + key_dim[None, :], state, mask=tile)
    for i in range(1, count):
        at = segment * GROUPS + group
        here = joined + at * VALUE_DIM * KEY_DIM + rows
        state = tl.load(offsets + at * VALUE_DIM * KEY_DIM + rows + key_dim[None, :], mask=tile, other=0.0)
        if i > 1:  # the offset of the outermost segment holds the boundary already
            tl.debug_barrier()
            for step in range(0, KEY_DIM, STEP):
                inner = step + tl.arange(0, STEP)
                in_inner = inner < KEY_DIM
                before = tl.load(here + inner[None, :], mask=in_value & in_inner[None, :], other=0.0)
                place = transitions + ((segment - document - 1) * GROUPS + group) * KEY_DIM * KEY_DIM
                if REVERSE:
                    place += inner[:, None] + key_dim[None, :] * KEY_DIM
                else:
                    place += inner[:, None] * KEY_DIM + key_dim[None, :]
                matrix = tl.load(place, mask=in_inner[:, None] & in_key[None, :], other=0.0)
                state = tl.dot(before, matrix, state, input_precision="tf32x3")
        segment += direction
        here = joined + (segment * GROUPS + group) * VALUE_DIM * KEY_DIM + rows
        tl.store(here + key_dim[None, :], state, mask=tile)
