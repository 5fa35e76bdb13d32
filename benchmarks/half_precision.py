"""The Deltaformer's write in PyTorch with the kernels' precision: what their errors are to be compared with.

Shapes: B batch, T tokens, H heads, D and D_v sizes of keys and values, C rows of a block.
"""

from typing import Any

import torch
from torch import Tensor

from zoo.kernels.deltaformer import CHUNK, default_scale
from zoo.kernels.kappa import weigh


def half_write(
    w: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    *,
    kappa1: str = "softmax",
    round_decimals: int = 0,
    scale: float | None = None,
) -> Tensor:
    """The write as the kernels compute it: products of numbers in the dtype of v, added in float32.

    As there, u, what rounding took from it for softmax, the gradient of diag(alpha) V, and the inverses of the diagonal
    blocks less I are kept in that dtype, and the gradients are those of that u. All pairs' weights are held at once.

    Args:
        w: [B, T, H, D].
        k: [B, T, H, D].
        v: [B, T, H, D_v], in half precision.
        alpha: [B, T, H].
        beta: [B, T, H].
        kappa1: see `deltaformer_write`, like the next two.
        round_decimals: likewise.
        scale: likewise.

    Returns:
        u [B, T, H, D_v] in the dtype of v.
    """
    by_head = [x.transpose(1, 2).to(v.dtype) for x in (w, k, v)]
    strengths = [x.transpose(1, 2)[..., None].float() for x in (alpha, beta)]
    factor = default_scale(kappa1, w.shape[-1]) if scale is None else scale
    u: Any = _HalfWrite.apply(*by_head, *strengths, kappa1, round_decimals, factor)
    return u.transpose(1, 2)


class _HalfWrite(torch.autograd.Function):
    """`half_write`, heads before tokens, alpha and beta [B, H, T, 1] in float32."""

    @staticmethod
    def forward(
        ctx: Any, w: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, kappa1: str, decimals: int, scale: float
    ) -> Tensor:
        half, hidden = v.dtype, _hidden(v)
        weights = beta * weigh(_logits(w, k, scale), hidden, kappa1, decimals)
        u, rest, inverses = torch.zeros_like(v), torch.zeros_like(v), []
        for rows in _blocks(v):
            read = _product(weights[..., rows, : rows.start], u[..., : rows.start, :], half)
            right = alpha[..., rows, :] * v[..., rows, :] - read
            inner = weights[..., rows, rows]
            identity = torch.eye(inner.shape[-1], device=v.device).expand_as(inner)
            inverse = torch.linalg.solve_triangular(inner, identity, upper=False, unitriangular=True).tril(-1).to(half)
            solved = right + _product(inverse, right, half)
            u[..., rows, :] = solved.to(half)
            rest[..., rows, :] = (solved - u[..., rows, :]).to(half)
            inverses.append(inverse)
        ctx.save_for_backward(w, k, v, alpha, beta, u, rest, *inverses)
        ctx.kappa1, ctx.decimals, ctx.scale = kappa1, decimals, scale
        return u

    @staticmethod
    def backward(ctx: Any, grad_u: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        w, k, v, alpha, beta, u, rest, *inverses = ctx.saved_tensors
        half, hidden = v.dtype, _hidden(v)
        with torch.enable_grad():
            logits = _logits(w, k, ctx.scale).requires_grad_()
            weights = weigh(logits, hidden, ctx.kappa1, ctx.decimals)
        transposed = (beta * weights.detach()).mT
        solved = torch.zeros_like(v, dtype=torch.float32)
        for rows, inverse in reversed(list(zip(_blocks(v), inverses, strict=True))):
            later = transposed[..., rows, rows.stop :]
            right = grad_u[..., rows, :].float() - _product(later, solved[..., rows.stop :, :], half)
            solved[..., rows, :] = right + _product(inverse.mT, right, half)
        kept = solved.to(half).float()
        pairs = _product(kept, u.mT, half)
        if ctx.kappa1 == "softmax":
            total = (kept * (alpha * v - u.float() - rest.float())).sum(-1, keepdim=True)
            grad_logits = weights.detach() * (beta * pairs - total)
        else:
            (grad_logits,) = torch.autograd.grad(weights, logits, beta * pairs)
        return (
            (-ctx.scale * _product(grad_logits, k, half)).to(half),
            (-ctx.scale * _product(grad_logits.mT, w, half)).to(half),
            (alpha * solved).to(half),
            (solved * v).sum(-1, keepdim=True),
            -(weights.detach() * pairs).sum(-1, keepdim=True),
            None,
            None,
            None,
        )


def _blocks(x: Tensor) -> list[slice]:
    return [slice(row, min(row + CHUNK, x.shape[-2])) for row in range(0, x.shape[-2], CHUNK)]


def _hidden(x: Tensor) -> Tensor:
    """[T, T]: the keys that a row does not see."""
    return torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu()


def _logits(w: Tensor, k: Tensor, scale: float) -> Tensor:
    return _product(w, k.mT, w.dtype) * scale


def _product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Operands in `dtype`; float32 holds their products, and adds them."""
    return x.to(dtype).float() @ y.to(dtype).float()
