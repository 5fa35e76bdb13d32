"""The Deltaformer's read with any kernel, in plain PyTorch.

Shapes: B batch, T tokens, T_k keys, H heads of q, G key heads, H_u heads of u, D head dim, D_v value dim.
"""

import torch
from torch import Tensor

from zoo.kernels.checks import check_mask, check_shape, check_tensors
from zoo.kernels.kappa import check_kappa, default_scale, weigh
from zoo.kernels.precision import precise_dtype, without_autocast

__all__ = ["deltaformer_read"]


def deltaformer_read(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    *,
    kappa2: str,
    round_decimals: int = 0,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """o_t = sum_{i<=t} kappa2(scale * q_t . k_i) u_i (arXiv 2505.19488), computed in float32 (float64 for float64).

    Plain PyTorch that compiles and differentiates: it holds the weights of every pair of tokens, [B, H, T, T_k]. With
    softmax it is attention over u, for which `zoo.kernels.attention.attention` is the fast form.

    Args:
        q: [B, T, H, D].
        k: [B, T_k, G, D], G dividing H.
        u: [B, T_k, H_u, D_v], H_u dividing H.
        kappa2: "softmax", "linear", "relu", "exp" or "round".
        round_decimals: that "round" keeps, from 0 to 6, else 0; its gradient is that of "linear" (straight-through).
        scale: of the logits; D^-1/2 for softmax and 1 for the others if None.
        mask: bool [B or 1, 1, T, T_k], True where visible; if None, T_k = T and a token sees those before and itself.

    Returns:
        o [B, T, H, D_v] in the dtype of u.

    Raises:
        ValueError: an argument is not as above.
    """
    _check(q, k, u, mask)
    check_kappa("kappa2", kappa2, round_decimals, scale)
    factor: float = default_scale(kappa2, q.shape[-1]) if scale is None else scale
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1) if mask is None else ~mask
    dtype = precise_dtype(u.dtype)
    with without_autocast(q.device):
        query, key, value = (x.to(dtype).transpose(1, 2) for x in (q, k, u))
        key, value = (x.repeat_interleave(q.shape[2] // x.shape[1], 1) for x in (key, value))
        o = weigh(factor * query @ key.mT, hidden, kappa2, round_decimals) @ value
    return o.transpose(1, 2).contiguous().to(u.dtype)


def _check(q: Tensor, k: Tensor, u: Tensor, mask: Tensor | None) -> None:
    for name, letters, x in (("q", "[B, T, H, D]", q), ("k", "[B, T_k, G, D]", k), ("u", "[B, T_k, H_u, D_v]", u)):
        if x.ndim != 4:
            raise ValueError(f"{name}: expected {letters}, got {list(x.shape)}")
    batch, seq_len, num_heads, head_dim = q.shape
    if mask is not None:
        check_mask(mask, batch, seq_len)
    num_keys = seq_len if mask is None else mask.shape[-1]
    check_shape("k", "[B, T_k, G, D]", k, (batch, num_keys, k.shape[2], head_dim))
    check_shape("u", "[B, T_k, H_u, D_v]", u, (batch, num_keys, *u.shape[2:]))
    for name, x in (("k", k), ("u", u)):
        if not x.shape[2] or num_heads % x.shape[2]:
            raise ValueError(
                f"{name}: expected a number of heads that divides the H = {num_heads} of q, got {x.shape[2]}"
            )
    check_tensors({"q": q, "k": k, "u": u}, {"mask": mask})
