"""The Deltaformer's write token by token: the oracle.

Shapes: B batch, T tokens, S tokens of a prefix, H heads of w, G key/value heads, D and D_v their sizes, N documents.
"""

from itertools import pairwise

import torch
from torch import Tensor

from zoo.kernels.kappa import weigh
from zoo.kernels.precision import precise_dtype, without_autocast

__all__ = ["deltaformer_write_reference"]


def deltaformer_write_reference(
    w: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    prefix_u: Tensor,
    prefix_lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    kappa1: str,
    round_decimals: int,
    scale: float,
) -> Tensor:
    """u_t = alpha_t v_t - beta_t sum_{i<t} kappa1(w_t, k_i) u_i, differentiable by autograd.

    Args:
        w: [B, T, H, D].
        k: [B, S + T, G, D], the prefix's first; G divides H.
        v: [B, T, G, D_v].
        alpha: [B, T, H].
        beta: [B, T, H].
        prefix_u: [B, S, H, D_v].
        prefix_lengths: [B], how many of the prefix's tokens exist; None for all.
        cu_seqlens: [N + 1] where each document starts and ends, with B = 1 and S = 0; its values are read on the host.
        kappa1: one of `KAPPAS`.
        round_decimals: that "round" keeps.
        scale: of the logits.

    Returns:
        u [B, T, H, D_v] in the dtype of v.
    """
    dtype = precise_dtype(v.dtype)
    with without_autocast(w.device):
        query, key, value, past = (x.to(dtype).transpose(1, 2) for x in (w, k, v, prefix_u))
        key, value = (x.repeat_interleave(w.shape[2] // k.shape[2], 1) for x in (key, value))
        written, beta = (x.to(dtype).transpose(1, 2)[..., None] for x in (alpha, beta))
        written = written * value
        slots = torch.arange(past.shape[2], device=w.device)
        absent = slots >= (past.shape[2] if prefix_lengths is None else prefix_lengths[:, None])  # [S] or [B, S]
        bounds = [0, w.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        documents = []
        for start, end in pairwise(bounds):
            u = past
            for t in range(start, end):
                seen = key[:, :, start : start + u.shape[2]]
                logits = scale * query[:, :, t : t + 1] @ seen.mT
                hidden = torch.nn.functional.pad(absent, (0, t - start)).unsqueeze(-2).unsqueeze(-3)
                read = weigh(logits, hidden, kappa1, round_decimals) @ u
                u = torch.cat([u, written[:, :, t : t + 1] - beta[:, :, t : t + 1] * read], 2)
            documents.append(u[:, :, past.shape[2] :])
        return torch.cat(documents, 2).transpose(1, 2).contiguous().to(v.dtype)
