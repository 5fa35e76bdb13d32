"""One token of the Deltaformer in each row, from what the tokens before it have left (arXiv 2505.19488).

Shapes: B batch, S slots, H query heads, G key heads, H_u heads of u, d_h head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.kernels.cache_read import read_cache
from zoo.kernels.kappa import Kappa, kappa_of
from zoo.kernels.precision import precise
from zoo.mixers.norms import StaticFloat

__all__ = ["Kernel", "step"]


@dataclass(frozen=True)
class Kernel:
    """How two vectors are compared: kappa of their scaled product."""

    kappa: Kappa
    round_decimals: int
    scale: StaticFloat

    def read(self, heads: Tensor, keys: Tensor, u: Tensor, counts: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `read_cache`, for heads [B, H_u, any number, d_h] that stand by the heads of u, which they read."""
        o, log_sum = read_cache(
            heads.flatten(1, 2),
            keys,
            u,
            counts,
            kappa=self.kappa,
            round_decimals=self.round_decimals,
            scale=self.scale[0],
        )
        return o.unflatten(1, heads.shape[1:3]), None if log_sum is None else log_sum.unflatten(1, heads.shape[1:3])

    def add(self, o: Tensor, log_sum: Tensor | None, q: Tensor, k: Tensor, u: Tensor) -> Tensor:
        """What is read when one more token joins those that o [B, H_u, R, d_h] was read from.

        Args:
            o: as `read` returns it, like log_sum.
            log_sum: [B, H_u, R], or None.
            q: [B, H_u, R, d_h], the queries.
            k: [B, H_u, 1, d_h], the token's key, and so on.
            u: [B, H_u, 1, d_h].
        """
        logits = self.scale[0] * (precise(q) * precise(k)).sum(-1)
        if log_sum is None:
            return o + kappa_of(logits, self.kappa, self.round_decimals)[..., None] * u
        total = torch.logaddexp(log_sum, logits)
        return o * (log_sum - total).exp()[..., None] + u * (logits - total).exp()[..., None]


def step(
    w: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    past: tuple[Tensor, Tensor],
    counts: Tensor,
    writing: Kernel,
    reading: Kernel,
) -> tuple[Tensor, Tensor]:
    """u = alpha v - beta sum_i kappa1(w, k_i) u_i over the past; o = sum_i kappa2(q, k_i) u_i with the token itself.

    Args:
        w: [B, 1, H_u, d_h].
        q: [B, 1, H, d_h].
        k: [B, 1, G, d_h].
        v: [B, 1, G, d_h].
        alpha: [B, 1, H_u] fp32.
        beta: [B, 1, H_u] fp32.
        past: keys [B, S, G, d_h] and u [B, S, H_u, d_h].
        counts: [B] int64, how many of their slots are filled.
        writing: kappa1.
        reading: kappa2.

    Returns:
        o [B, 1, H, d_h] and u [B, 1, H_u, d_h] in the dtype of v.
    """
    num_writes = w.shape[2]
    compared, queries = w.transpose(1, 2), q[:, 0].unflatten(1, (num_writes, -1))
    if writing == reading:  # the cache is read once for both
        both, log_sums = writing.read(torch.cat([compared, queries], 2), *past, counts)
        old, seen = both[:, :, :1], both[:, :, 1:]
        log_sum = None if log_sums is None else log_sums[:, :, 1:]
    else:
        old, _ = writing.read(compared, *past, counts)
        seen, log_sum = reading.read(queries, *past, counts)
    key, value = (x[:, 0].repeat_interleave(num_writes // x.shape[2], 1)[:, :, None] for x in (k, v))
    alpha, beta = (x.transpose(1, 2)[..., None] for x in (alpha, beta))
    u = (alpha * value - beta * old).to(v.dtype)
    o = reading.add(seen, log_sum, queries, key, precise(u))
    return o.flatten(1, 2)[:, None].to(v.dtype), u.transpose(1, 2)
