"""The decays within a chunk, E_ti from token i to token t, and their gradients.

dg_s sums what the decay at s weakens: what tokens from s on read of the state S that enters, what those before s leave
of themselves in the next, what the former read of the latter, and <G, decay S>, with G the gradient of the state that
leaves. Such a sum, like one of log-decays over some tokens, is made from its own terms: a difference of two sums from
the start would lose what a strong decay between leaves. That takes long, and many registers: hence kernels of its own.
"""

import triton
import triton.language as tl

from zoo.kernels.delta_rule.triton.cuts import place_of_program


@triton.jit
def decay_matrix(g, SIZE: tl.constexpr):
    """exp(g_{i+1} + ... + g_t) for i <= t, else 0.

    Each sum is one of its own: a difference of two sums from the start would lose what a strong decay between leaves.
    """
    index = tl.arange(0, SIZE)
    steps = tl.where(index[:, None] > index[None, :], g[:, None], 0.0)
    return tl.exp(tl.where(index[:, None] >= index[None, :], tl.cumsum(steps, 0), float("-inf")))


@triton.jit(do_not_specialize=["seq_len"])
def decays_kernel(g, decays, chunks, seq_len, GROUPS: tl.constexpr, CHUNK: tl.constexpr):
    """E of each chunk and key/value head, one program each."""
    at, group, row, length = place_of_program(chunks, seq_len, GROUPS, CHUNK)
    if length <= 0:
        return
    token = tl.arange(0, CHUNK)
    rate = tl.load(g + (row + token) * GROUPS + group, mask=token < length, other=0.0)
    square = token[:, None] * CHUNK + token[None, :]
    tl.store(decays + at * (CHUNK * CHUNK) + square, decay_matrix(rate, CHUNK))


@triton.jit(do_not_specialize=["seq_len"])
def decay_gradients_kernel(
    crossing,
    terms,
    decayed,
    states,
    grad_states,
    grad_g,
    chunks,
    seq_len,
    scale,
    GROUPS: tl.constexpr,
    REPEAT: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a chunk and key/value head: dg from the terms that `gradients_kernel` leaves, and from the states."""
    at, group, row, length = place_of_program(chunks, seq_len, GROUPS, CHUNK)
    if length <= 0:
        return
    token = tl.arange(0, CHUNK)
    earlier = token[None, :] < token[:, None]
    place = crossing + at * ((REPEAT + 1) * CHUNK * CHUNK) + token[:, None] * CHUNK + token[None, :]
    between = tl.zeros([CHUNK, CHUNK], tl.float32)
    for i in tl.range(REPEAT + 1):
        between += tl.load(place + i * (CHUNK * CHUNK))
    grad = tl.sum(tl.where(earlier, tl.cumsum(between, 0, reverse=True), 0.0), 1)
    read = tl.load(terms + at * (2 * CHUNK) + token)
    left = tl.load(terms + at * (2 * CHUNK) + CHUNK + token)
    grad += tl.sum(tl.where(earlier, left[None, :], 0.0), 1)
    grad += tl.cumsum(read, reverse=True)
    inner = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, STATE_SIZE, BLOCK):
        index = start + tl.arange(0, BLOCK)
        state = tl.load(states + at * STATE_SIZE + index, mask=index < STATE_SIZE, other=0.0)
        grad_state = tl.load(grad_states + at * STATE_SIZE + index, mask=index < STATE_SIZE, other=0.0)
        inner += state.to(tl.float32) * grad_state.to(tl.float32)
    grad += tl.sum(inner) * tl.load(decayed + at * CHUNK + CHUNK - 1) * scale
    tl.store(grad_g + (row + token) * GROUPS + group, grad, mask=token < length)
