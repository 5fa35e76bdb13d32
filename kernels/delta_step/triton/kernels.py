"""From what a token was projected to, to what its heads read: each program has a slice of one state in registers.

Nothing that a program reads is written by another in the same launch: of the taps, the slot that the token goes to
holds none that it is convolved with.
"""

import triton
import triton.language as tl

from zoo.kernels.triton.early import release_next, wait_for_last


@triton.jit
def _convolve(x, weight, taps, bias, position, channel, mask, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """SiLU of the convolution, in some channels of one row."""
    y = tl.load(x + channel, mask=mask, other=0.0).to(tl.float32)
    y *= tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    for lag in tl.static_range(1, TAPS):
        slot = (position + TAPS - lag) % TAPS
        past = tl.load(taps + slot * CHANNELS + channel, mask=mask, other=0.0).to(tl.float32)
        y += past * tl.load(weight + lag * CHANNELS + channel, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    return y * tl.sigmoid(y)


@triton.jit
def _remember(x, taps, position, channel, mask, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """The token's channels, into its slot."""
    token = tl.load(x + channel, mask=mask, other=0.0)
    tl.store(taps + (position % TAPS) * CHANNELS + channel, token.to(taps.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["x_row", "logits_row", "strength"])
def delta_step_kernel(
    x,
    weight,
    taps,
    start,
    state,
    logits,
    bias,
    g,
    o,
    x_row,
    logits_row,
    strength,
    scale,
    GROUPS: tl.constexpr,
    REPEAT: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TAPS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a row, key/value head and slice of d_v."""
    QUERIES: tl.constexpr = GROUPS * REPEAT * KEY_DIM
    KEYS: tl.constexpr = GROUPS * KEY_DIM
    CHANNELS: tl.constexpr = QUERIES + KEYS + GROUPS * VALUE_DIM
    SLICES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    wait_for_last(EARLY)
    release_next(EARLY)
    program = tl.program_id(0)
    slice = program % SLICES
    program = program // SLICES
    group = program % GROUPS
    batch = (program // GROUPS).to(tl.int64)
    key_dim = tl.arange(0, BLOCK_K)
    value_dim = slice * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = key_dim < KEY_DIM, value_dim < VALUE_DIM
    tile = in_key[:, None] & in_value[None, :]
    state += ((batch * GROUPS + group) * KEY_DIM + key_dim[:, None]) * VALUE_DIM + value_dim[None, :]
    memory = tl.load(state, mask=tile, other=0.0)

    position = tl.load(start + batch)
    x += batch * x_row
    taps += batch * TAPS * CHANNELS
    key_channel = QUERIES + group * KEY_DIM + key_dim
    value_channel = QUERIES + KEYS + group * VALUE_DIM + value_dim
    key = _convolve(x, weight, taps, bias, position, key_channel, in_key, CHANNELS, TAPS)
    value = _convolve(x, weight, taps, bias, position, value_channel, in_value, CHANNELS, TAPS)
    if NORMALIZE:
        key *= tl.rsqrt(tl.sum(key * key) + EPS)
    beta = strength
    if logits is not None:
        beta = strength * tl.sigmoid(tl.load(logits + batch * logits_row + group).to(tl.float32))
    if g is not None:
        memory *= tl.exp(tl.load(g + batch * GROUPS + group).to(tl.float32))
    error = value - tl.sum(memory * key[:, None], 0)
    memory += (beta * key)[:, None] * error[None, :]
    tl.store(state, memory, mask=tile)
    _remember(x, taps, position, value_channel, in_value, CHANNELS, TAPS)
    if slice == 0:
        _remember(x, taps, position, key_channel, in_key, CHANNELS, TAPS)
    for j in tl.static_range(REPEAT):
        head = group * REPEAT + j
        channel = head * KEY_DIM + key_dim
        query = _convolve(x, weight, taps, bias, position, channel, in_key, CHANNELS, TAPS)
        if NORMALIZE:
            query *= tl.rsqrt(tl.sum(query * query) + EPS)
        out = tl.sum(memory * query[:, None], 0) * scale
        place = o + (batch * GROUPS * REPEAT + head) * VALUE_DIM + value_dim
        tl.store(place, out.to(o.dtype.element_ty), mask=in_value)
        if slice == 0:
            _remember(x, taps, position, channel, in_key, CHANNELS, TAPS)
