"""The Deltaformer's write in PyTorch with the kernels' precision: what their errors are to be compared with.

Shapes: B batch, T tokens, H heads, D and D_v sizes of keys and values, C rows of a block.
"""

from typing import Any

import torch
from torch import Tensor

from zoo.kernels.deltaformer import CHUNK


def half_write(w: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """The write with softmax as the kernels compute it: products of numbers in the dtype of v, added in float32.

    As there, u, what rounding took from it, the gradient of diag(alpha) V, and the inverses of the diagonal blocks less
    I are kept in that dtype, and the gradients are those of that u. All pairs' weights are held at once.

    Args:
        w: [B, T, H, D].
        k: [B, T, H, D].
        v: [B, T, H, D_v], in half precision.
        alpha: [B, T, H].
        beta: [B, T, H].

    Returns:
        u [B, T, H, D_v] in the dtype of v.
    """
    by_head = [x.transpose(1, 2).to(v.dtype) for x in (w, k, v)]
    strengths = [x.transpose(1, 2)[..., None].float() for x in (alpha, beta)]
    u: Any = _HalfWrite.apply(*by_head, *strengths)
    return u.transpose(1, 2)


class _HalfWrite(torch.autograd.Function):
    """`half_write`, heads before tokens, alpha and beta [B, H, T, 1] in float32."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        half = v.dtype
        logits = _logits(w, k)
        lse = logits.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)
        weights = (logits - lse).exp()
        u, rest, inverses = torch.zeros_like(v), torch.zeros_like(v), []
        for rows in _blocks(v):
            read = _product(weights[..., rows, : rows.start], u[..., : rows.start, :], half)
            right = alpha[..., rows, :] * v[..., rows, :] - beta[..., rows, :] * read
            inner = (beta * weights)[..., rows, rows]
            identity = torch.eye(inner.shape[-1], device=v.device).expand_as(inner)
            inverse = torch.linalg.solve_triangular(inner, identity, upper=False, unitriangular=True).tril(-1).to(half)
            solved = right + _product(inverse, right, half)
            u[..., rows, :] = solved.to(half)
            rest[..., rows, :] = (solved - u[..., rows, :]).to(half)
            inverses.append(inverse)
        ctx.save_for_backward(w, k, v, alpha, beta, u, rest, lse, *inverses)
        return u

    @staticmethod
    def backward(ctx: Any, grad_u: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        w, k, v, alpha, beta, u, rest, lse, *inverses = ctx.saved_tensors
        half = v.dtype
        weights = (_logits(w, k) - lse).exp()
        solved = torch.zeros_like(v, dtype=torch.float32)
        for rows, inverse in reversed(list(zip(_blocks(v), inverses, strict=True))):
            later = (beta * weights)[..., rows.stop :, rows].mT
            right = grad_u[..., rows, :].float() - _product(later, solved[..., rows.stop :, :], half)
            solved[..., rows, :] = right + _product(inverse.mT, right, half)
        kept = solved.to(half).float()
        total = (kept * (alpha * v - u.float() - rest.float())).sum(-1, keepdim=True)
        pairs = _product(kept, u.mT, half)
        grad_logits = weights * (beta * pairs - total)
        scale = -(w.shape[-1] ** -0.5)
        return (
            (scale * _product(grad_logits, k, half)).to(half),
            (scale * _product(grad_logits.mT, w, half)).to(half),
            (alpha * solved).to(half),
            (solved * v).sum(-1, keepdim=True),
            -(weights * pairs).sum(-1, keepdim=True),
        )


def _blocks(x: Tensor) -> list[slice]:
    return [slice(row, min(row + CHUNK, x.shape[-2])) for row in range(0, x.shape[-2], CHUNK)]


def _logits(w: Tensor, k: Tensor) -> Tensor:
    """-inf from the diagonal on."""
    logits = _product(w, k.mT, w.dtype) * w.shape[-1] ** -0.5
    return logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool, device=w.device).triu(), float("-inf"))


def _product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Operands in `dtype`; float32 holds their products, and adds them."""
    return x.to(dtype).float() @ y.to(dtype).float()
