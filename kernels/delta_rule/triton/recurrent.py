"""The delta rule token by token on CUDA: the state stays in registers from the first token to the last.

Shapes: B batch, T tokens, H query heads, G key/value heads, N documents (N = B unless packed).
"""

import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.normalize import EPS
from zoo.kernels.rows import rows

_BLOCK_V = 32


@triton.jit(do_not_specialize=["seq_len", "num_groups"])
def _recurrent_kernel(
    q,
    k,
    v,
    beta,
    g,
    initial,
    cu_seqlens,
    o,
    final,
    seq_len,
    num_groups,
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REPEAT: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
):
    """One program a document, key/value head and slice of d_v; it reads its part of the state before it writes it."""
    SLICES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    slice = program % SLICES
    program = program // SLICES
    group = (program % num_groups).to(tl.int64)
    document = (program // num_groups).to(tl.int64)
    if cu_seqlens is not None:
        row = tl.load(cu_seqlens + document).to(tl.int64)
        length = (tl.load(cu_seqlens + document + 1) - row).to(tl.int32)
    else:
        row = document * seq_len
        length = seq_len
    key_dim = tl.arange(0, BLOCK_K)
    value_dim = slice * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = key_dim < KEY_DIM, value_dim < VALUE_DIM
    tile = in_key[:, None] & in_value[None, :]
    at = ((document * num_groups + group) * KEY_DIM + key_dim[:, None]) * VALUE_DIM + value_dim[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if initial is not None:
        state = tl.load(initial + at, mask=tile, other=0.0)
    for _ in range(length):
        key = tl.load(k + row * k_row + group * k_head + key_dim, mask=in_key, other=0.0).to(tl.float32)
        value = tl.load(v + row * v_row + group * v_head + value_dim, mask=in_value, other=0.0).to(tl.float32)
        if NORMALIZE:
            key *= tl.rsqrt(tl.sum(key * key) + EPS)
        if g is not None:
            state *= tl.exp(tl.load(g + row * num_groups + group))
        error = value - tl.sum(state * key[:, None], 0)
        state += (tl.load(beta + row * num_groups + group) * key)[:, None] * error[None, :]
        for j in tl.range(REPEAT):
            head = group * REPEAT + j
            query = tl.load(q + row * q_row + head * q_head + key_dim, mask=in_key, other=0.0).to(tl.float32)
            if NORMALIZE:
                query *= tl.rsqrt(tl.sum(query * query) + EPS)
            out = tl.sum(state * query[:, None], 0) * scale
            place = o + (row * num_groups * REPEAT + head) * VALUE_DIM + value_dim
            tl.store(place, out.to(o.dtype.element_ty), mask=in_value)
        row += 1
    tl.store(final + at, state, mask=tile)


def recurrent_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    *,
    normalize: bool,
    final_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, in one launch.

    Args:
        q: [B, T, H, d_k].
        k: [B, T, G, d_k].
        v: [B, T, G, d_v].
        beta: [B, T, G] fp32.
        g: [B, T, G] fp32, or None.
        initial_state: [N, G, d_k, d_v] fp32, or None.
        cu_seqlens: [N + 1], or None.
        scale: of the read.
        normalize: whether q and k are L2-normalised.
        final_state: where it is to be, contiguous, which may be the initial one; a new tensor if None.

    Returns:
        o [B, T, H, d_v] in the dtype of v, and the final state [N, G, d_k, d_v] fp32.
    """
    (batch, seq_len, heads, key_dim), (groups, value_dim) = q.shape, v.shape[2:]
    documents = batch if cu_seqlens is None else len(cu_seqlens) - 1
    o = v.new_empty(batch, seq_len, heads, value_dim)
    if final_state is None:
        final_state = beta.new_empty(documents, groups, key_dim, value_dim)
    q, k, v = rows(q), rows(k), rows(v)
    _recurrent_kernel[(documents * groups * triton.cdiv(value_dim, _BLOCK_V),)](
        q,
        k,
        v,
        beta.contiguous(),
        None if g is None else g.contiguous(),
        None if initial_state is None else initial_state.contiguous(),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        o,
        final_state,
        seq_len,
        groups,
        scale,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=_BLOCK_V,
        REPEAT=heads // groups,
        NORMALIZE=normalize,
        EPS=EPS,
        num_warps=4,
    )
    return o, final_state
