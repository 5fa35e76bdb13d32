"""The (gated) delta rule token by token: the oracle, and the form that one-token decoding calls.

Shapes: B batch, T tokens, H query heads, G key/value heads, R = H / G, N documents (N = B unless packed).
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from zoo.kernels.precision import precise_dtype, without_autocast


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = S + beta_t k_t (v_t - S^T k_t)^T with S = exp(g_t) S_{t-1}, o_t = scale * S_t^T q_t; for autograd.

    Args:
        q: [B, T, H, d_k].
        k: [B, T, G, d_k], G dividing H; query head h reads the state h // R.
        v: [B, T, G, d_v].
        beta: [B, T, G].
        g: [B, T, G], the log of the decay; no decay if None.
        initial_state: [N, G, d_k, d_v]; zeros if None.
        cu_seqlens: [N + 1] where each document starts and ends, with B = 1; its values are read on the host.
        scale: of the read, d_k^-1/2 if None.

    Returns:
        o [B, T, H, d_v] in the dtype of v, and the final state [N, G, d_k, d_v] in float32 (float64 for float64 v).
    """
    num_states = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = precise_dtype(v.dtype)
    if initial_state is None:
        initial_state = v.new_zeros(num_states, k.shape[2], k.shape[3], v.shape[3], dtype=dtype)
    with without_autocast(q.device):
        query = q.to(dtype) * (q.shape[-1] ** -0.5 if scale is None else scale)
        key, value, beta, state = k.to(dtype), v.to(dtype), beta.to(dtype), initial_state.to(dtype)
        alphas = [None] * q.shape[1] if g is None else g.to(dtype).exp()[..., None, None].unbind(1)
        if cu_seqlens is None:
            o, final_state = _recurrence(query, key, value, beta, alphas, state)
            return o.to(v.dtype), final_state
        bounds = cu_seqlens.tolist()
        outputs, states = [], []
        for n, (start, end) in enumerate(pairwise(bounds)):
            q_n, k_n, v_n, beta_n = (x[:, start:end] for x in (query, key, value, beta))
            o, left = _recurrence(q_n, k_n, v_n, beta_n, alphas[start:end], state[n : n + 1])
            outputs.append(o)
            states.append(left)
        return torch.cat(outputs, 1).to(v.dtype), torch.cat(states)


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alphas: Sequence[Tensor | None], state: Tensor
) -> tuple[Tensor, Tensor]:
    q = q.unflatten(2, (k.shape[2], -1))  # [B, T, G, R, d_k]: the R query heads that read one state
    outputs = []
    tokens = zip(q.unbind(1), k.unbind(1), v.unbind(1), beta.unbind(1), alphas, strict=True)
    for q_t, k_t, v_t, beta_t, alpha_t in tokens:
        if alpha_t is not None:
            state = alpha_t * state
        read = k_t.unsqueeze(-2) @ state
        write = beta_t[..., None, None] * (v_t.unsqueeze(-2) - read)
        state = state + k_t.unsqueeze(-1) * write
        outputs.append((q_t @ state).flatten(1, 2))
    if not outputs:  # an empty document: the state is returned as a copy, never as the caller's own tensor
        return v.new_zeros(*q.shape[:2], q.shape[2] * q.shape[3], v.shape[3]), state.clone()
    return torch.stack(outputs, 1), state
