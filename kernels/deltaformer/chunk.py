"""The Deltaformer's write by chunks of 64 tokens, in batched PyTorch on any device: forward and hand-written backward.

With A the strictly lower triangular kappa1(w_t, k_i), all of u is one triangular solve (arXiv 2505.19488)::

    (I + diag(beta) A) U = diag(alpha) V

A chunk of rows needs a strip A_c = [A_p | A_i] of A: its keys before the chunk, whose U_p is known, and those inside,
whose U_i is solved for::

    U_i = (I + diag(beta) A_i)^-1 (diag(alpha) V - diag(beta) A_p U_p)

Only one strip exists at a time, in either direction; the backward makes it again from the log-sum-exp of its rows.

Shapes: B batch, T tokens, S tokens of a prefix, H heads of w, G key/value heads, R = H / G, D head dim, D_v value dim,
C chunk, M chunks. The R heads of a group are R * C rows against one set of keys: no key is expanded.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.kernels.precision import precise_dtype
from zoo.kernels.triangular import unit_lower_inverse

__all__ = ["CHUNK", "Strips", "write_backward", "write_forward"]

CHUNK = 64


class Strips:
    """A, a strip of C rows at a time: [B * H, C, keys up to the end of the chunk].

    Args:
        w: [B, T, H, D].
        k: [B, S + T, G, D], the prefix's first; G divides H.
        prefix_lengths: [B], how many of the prefix's tokens exist; None for all.
        cu_seqlens: [N + 1] or None, with S = 0.
        kappa1: one of `KAPPAS`.
        round_decimals: that "round" keeps.
        scale: of the logits.
    """

    def __init__(
        self,
        w: Tensor,
        k: Tensor,
        prefix_lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        kappa1: str,
        round_decimals: int,
        scale: float,
    ) -> None:
        self.batch, self.seq_len, self.heads, _ = w.shape
        self.groups, self.prefix = k.shape[2], k.shape[1] - self.seq_len
        self.dtype, self.kappa, self.round_decimals, self.scale = precise_dtype(k.dtype), kappa1, round_decimals, scale
        self.chunk = CHUNK if self.seq_len > 16 else self.seq_len  # a few tokens, as in decoding, are not padded
        self.num_chunks = -(-self.seq_len // self.chunk)
        self.queries = self._by_group(self.rows(w) * scale)
        self.keys = self.rows(k)
        self.hidden_logit = float("-inf") if kappa1 in ("softmax", "exp") else 0.0
        self.not_before = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=w.device).triu_()
        self.absent = self.first = None
        if prefix_lengths is not None:
            self.absent = (torch.arange(self.prefix, device=w.device) >= prefix_lengths[:, None])[:, None]
        if cu_seqlens is not None:
            document = torch.searchsorted(cu_seqlens[1:], torch.arange(self.seq_len, device=w.device), right=True)
            self.first = F.pad(cu_seqlens[:-1][document], (0, self.num_chunks * self.chunk - self.seq_len))[:, None]

    def rows(self, x: Tensor) -> Tensor:
        """Tokens [B, T or S + T, heads, d] to rows [B * heads, whole chunks, d] in the computing dtype."""
        missing = self.num_chunks * self.chunk - self.seq_len
        return F.pad(x.to(self.dtype).transpose(1, 2).flatten(0, 1), (0, 0, 0, missing)).contiguous()

    def tokens(self, x: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """The first `length` rows [B * heads, _, d] to tokens [B, length, heads, d], a tensor of their own."""
        x = x[:, :length].unflatten(0, (self.batch, -1)).transpose(1, 2)
        return x.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def expand(self, v: Tensor) -> Tensor:
        """Values [B, T, G, D_v] to rows of every head, [B * H, M * C, D_v]."""
        return self.rows(v).repeat_interleave(self.heads // self.groups, 0)

    def _by_group(self, x: Tensor) -> Tensor:
        x = x.view(self.batch * self.groups, -1, self.num_chunks, self.chunk, x.shape[-1])
        return x.transpose(1, 2).flatten(2, 3).contiguous()  # [B * G, M, R * C, D]

    def bounds(self, c: int) -> tuple[int, int, slice]:
        """The first key inside chunk c, the first after it, and the chunk among the T tokens."""
        start, end = c * self.chunk, (c + 1) * self.chunk
        return self.prefix + start, self.prefix + end, slice(start, end)

    def logits(self, c: int) -> Tensor:
        """Of chunk c; those of hidden keys are such that kappa makes 0 of them."""
        logits = torch.bmm(self.queries[:, c], self.keys[:, : self.bounds(c)[1]].mT)
        return self.hide(logits.view(self.batch * self.heads, self.chunk, -1), c, self.hidden_logit)

    def weights(self, logits: Tensor, lse: Tensor) -> Tensor:
        """kappa1 of them, in place; `lse` [B * H, C, 1] is what softmax subtracts."""
        if self.kappa == "softmax":
            return logits.sub_(lse).exp_()
        if self.kappa == "exp":
            return logits.exp_()
        if self.kappa == "relu":
            return logits.relu_()
        return logits if self.kappa == "linear" else logits.round_(decimals=self.round_decimals)

    def logit_gradient(self, gradient: Tensor, weights: Tensor, total: Tensor) -> Tensor:
        """From the weights' gradient, in place; `total` [B * H, C, 1] is the sum of weights * gradient."""
        if self.kappa == "softmax":
            return gradient.sub_(total).mul_(weights)
        if self.kappa == "exp":
            return gradient.mul_(weights)
        return gradient.mul_(weights > 0) if self.kappa == "relu" else gradient

    def products(self, logit_gradient: Tensor, row_factor: Tensor, c: int) -> tuple[Tensor, Tensor]:
        """The gradients of chunk c's rows of w [B * H, C, D] and of the keys [B * G, keys, D].

        `row_factor` [B * H, C, 1] multiplies the rows of the logits' gradient.
        """
        by_group = logit_gradient.view(self.batch * self.groups, -1, logit_gradient.shape[-1])
        factor = row_factor.reshape(self.batch * self.groups, -1, 1)
        d_rows = torch.bmm(by_group, self.keys[:, : logit_gradient.shape[-1]]) * (factor * self.scale)
        d_keys = torch.bmm(by_group.mT, self.queries[:, c] * factor)
        return d_rows.view(self.batch * self.heads, self.chunk, -1), d_keys

    def hide(self, strip: Tensor, c: int, value: float) -> Tensor:
        """Put `value`, in place, where a row of chunk c does not see a key."""
        start, end, rows = self.bounds(c)
        strip[..., start:].masked_fill_(self.not_before, value)
        if self.absent is not None:
            strip.view(self.batch, -1, end)[..., : self.prefix].masked_fill_(self.absent, value)
        if self.first is not None:
            strip.masked_fill_(torch.arange(end, device=strip.device) < self.first[rows], value)
        return strip


def write_forward(strips: Strips, v: Tensor, alpha: Tensor, beta: Tensor, prefix_u: Tensor) -> tuple[Tensor, Tensor]:
    """The chunked write.

    Args:
        strips: of A.
        v: [B, T, G, D_v].
        alpha: [B, T, H].
        beta: [B, T, H].
        prefix_u: [B, S, H, D_v].

    Returns:
        u [B, T, H, D_v] in the dtype of v, and the log-sum-exp of softmax's rows [B, T, H] (0 for other kernels).
    """
    alpha, beta = (strips.rows(x[..., None]) for x in (alpha, beta))
    written = alpha * strips.expand(v)
    lse = torch.zeros_like(beta)
    u = written.new_empty(written.shape[0], strips.prefix + written.shape[1], written.shape[2])
    u[:, : strips.prefix] = prefix_u.transpose(1, 2).flatten(0, 1)
    for c in range(strips.num_chunks):
        start, end, rows = strips.bounds(c)
        logits = strips.logits(c)
        if strips.kappa == "softmax":
            weights, lse[:, rows] = _softmax(logits)
        else:
            weights = strips.weights(logits, lse[:, rows])
        inverse = unit_lower_inverse(beta[:, rows] * weights[..., start:])
        read = torch.bmm(weights[..., :start], u[:, :start])
        u[:, start:end] = torch.bmm(inverse, written[:, rows] - beta[:, rows] * read)
    length = strips.seq_len
    return strips.tokens(u[:, strips.prefix :], length, v.dtype), strips.tokens(lse, length, lse.dtype).squeeze(-1)


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """In place, and the log-sum-exp [..., 1]; a row of nothing but -inf gives 0."""
    limits = torch.finfo(logits.dtype)
    largest = logits.amax(-1, keepdim=True).clamp_min_(limits.min)
    weights = logits.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True).clamp_min_(limits.tiny)
    return weights.div_(total), largest.add_(total.log())


def write_backward(
    strips: Strips, grad_u: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, prefix_u: Tensor, u: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the write: the transposed solve, last chunk first, and each strip's gradient on the way.

    With d_written the gradient of diag(alpha) V, G = tril(d_written U^T, -1) and s the row sums of A * G::

        d_written = (I + diag(beta) A)^-T dU        dbeta = -s        dA = -diag(beta) G

    Args:
        strips: of A.
        grad_u: [B, T, H, D_v].
        v: [B, T, G, D_v].
        alpha: [B, T, H].
        beta: [B, T, H].
        prefix_u: [B, S, H, D_v].
        u: [B, T, H, D_v], from the forward, like the log-sum-exp.
        lse: [B, T, H].

    Returns:
        The gradients of w, k, v (all in the dtype of v), alpha, beta, and prefix_u.
    """
    alpha_rows, beta_rows, lse = (strips.rows(x[..., None]) for x in (alpha, beta, lse))
    u = strips.rows(torch.cat([prefix_u, u], 1))
    d_u = strips.rows(torch.cat([torch.zeros_like(prefix_u), grad_u], 1))
    d_written = torch.empty_like(d_u[:, strips.prefix :])
    d_beta = torch.empty_like(beta_rows)
    d_w = torch.empty(*d_beta.shape[:2], strips.keys.shape[-1], dtype=strips.dtype, device=u.device)
    d_k = torch.zeros_like(strips.keys)
    for c in reversed(range(strips.num_chunks)):
        start, end, rows = strips.bounds(c)
        b = beta_rows[:, rows]
        weights = strips.weights(strips.logits(c), lse[:, rows])
        inverse = unit_lower_inverse(b * weights[..., start:])
        d_row = torch.bmm(inverse.mT, d_u[:, start:end])
        d_written[:, rows] = d_row
        d_u[:, :start].baddbmm_(weights[..., :start].mT, b * d_row, alpha=-1)
        gradient = strips.hide(torch.bmm(d_row, u[:, :end].mT), c, 0.0)
        total = torch.linalg.vecdot(weights, gradient).unsqueeze(-1)
        d_beta[:, rows] = -total
        d_w[:, rows], d_keys = strips.products(strips.logit_gradient(gradient, weights, total), -b, c)
        d_k[:, :end] += d_keys
    value_rows = strips.expand(v)
    d_alpha = torch.linalg.vecdot(d_written, value_rows).unsqueeze(-1)
    d_v = (alpha_rows * d_written).unflatten(0, (-1, strips.heads // strips.groups)).sum(1)
    length, prefix, dtype = strips.seq_len, strips.prefix, v.dtype
    return (
        strips.tokens(d_w, length, dtype),
        strips.tokens(d_k, prefix + length, dtype),
        strips.tokens(d_v, length, dtype),
        strips.tokens(d_alpha, length, alpha.dtype).squeeze(-1),
        strips.tokens(d_beta, length, beta.dtype).squeeze(-1),
        strips.tokens(d_u, prefix, dtype),
    )
