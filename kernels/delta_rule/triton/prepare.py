"""What the scans need of each chunk, parallel over chunks and heads: the inverse and the scores, [C, C] each.

With k^ and q^ the keys and queries over their norms, if asked for, and E_ti the decay from token i to token t, it makes

    inverse = (I + A)^-1,  A_ti = beta_i E_ti k^_t . k^_i  for i < t          scores_ti = E_ti q^_t . k_i  for i <= t

and the numbers by which the scans multiply rows, for they read K and Q as given: how strongly each token is written,
beta_i / |k_i|, the inverse norms, and the decay from the chunk's start to each token, and from there to its end.
"""

import triton
import triton.language as tl

from zoo.kernels.delta_rule.triton.cuts import place_of_program
from zoo.kernels.delta_rule.triton.decays import decay_matrix
from zoo.kernels.triton.triangular import unit_lower_inverse, unit_lower_inverse_refined


@triton.jit
def last_row(matrix, SIZE: tl.constexpr):
    """The last row of a square matrix."""
    return tl.sum(tl.where((tl.arange(0, SIZE) == SIZE - 1)[:, None], matrix, 0.0), 0)


@triton.jit
def inverse_norm(x, EPS: tl.constexpr):
    """1 / sqrt(|x|^2 + EPS) of each row."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + EPS)


@triton.jit(do_not_specialize=["seq_len"])
def prepare_kernel(
    q,
    k,
    beta,
    g,
    inverse,
    scores,
    write_scale,
    key_norm,
    query_norm,
    decayed,
    remaining,
    chunks,
    seq_len,
    q_head,
    k_head,
    GROUPS: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    REPEAT: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
):
    """One program a chunk and key/value head."""
    at, group, row, length = place_of_program(chunks, seq_len, GROUPS, CHUNK)
    if length <= 0:
        return
    token = tl.arange(0, CHUNK)
    dim = tl.arange(0, BLOCK_K)
    inside = token < length
    tile = inside[:, None] & (dim < KEY_DIM)[None, :]
    key = tl.load(k + row * K_ROW + group * k_head + token[:, None] * K_ROW + dim[None, :], mask=tile, other=0.0)
    strength = tl.load(beta + (row + token) * GROUPS + group, mask=inside, other=0.0)
    lower = token[:, None] >= token[None, :]
    column = strength
    if NORMALIZE:
        by_key = inverse_norm(key, EPS)
        column *= by_key
        tl.store(key_norm + at * CHUNK + token, by_key)
    if g is not None:
        rate = tl.load(g + (row + token) * GROUPS + group, mask=inside, other=0.0)
        decay = decay_matrix(rate, CHUNK)
        tl.store(decayed + at * CHUNK + token, tl.exp(tl.cumsum(rate)))
        tl.store(remaining + at * CHUNK + token, last_row(decay, CHUNK))
    tl.store(write_scale + at * CHUNK + token, column)

    square = token[:, None] * CHUNK + token[None, :]
    for i in tl.range(REPEAT):
        head = group * REPEAT + i
        query = tl.load(q + row * Q_ROW + head * q_head + token[:, None] * Q_ROW + dim[None, :], mask=tile, other=0.0)
        score = tl.where(lower, tl.dot(query, tl.trans(key), input_precision="tf32x3"), 0.0)
        at_query = (at * REPEAT + i) * CHUNK
        if NORMALIZE:
            by_query = inverse_norm(query, EPS)
            score *= by_query[:, None]
            tl.store(query_norm + at_query + token, by_query)
        if g is not None:
            score *= decay
        tl.store(scores + at_query * CHUNK + square, score.to(scores.dtype.element_ty))

    a = tl.where(lower, tl.dot(key, tl.trans(key), input_precision="tf32x3") * column[None, :], 0.0)
    a = tl.where(token[:, None] == token[None, :], 0.0, a)
    if NORMALIZE:
        a *= by_key[:, None]
    if g is not None:
        a *= decay
    if key.dtype == tl.float32:
        x = unit_lower_inverse(a, CHUNK, LEVELS)
    else:
        x = unit_lower_inverse_refined(a, CHUNK, LEVELS)
    tl.store(inverse + at * (CHUNK * CHUNK) + square, x.to(inverse.dtype.element_ty))
