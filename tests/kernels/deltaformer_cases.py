"""What the tests of the Deltaformer's Triton kernels share: arguments, results in other ways, and how near they are.

Shapes: B batch, T tokens, H heads of w, G key/value heads, D and D_v their sizes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from comparing import assert_rounded
from torch import Tensor

from half_precision import half_write
from zoo.kernels.deltaformer import deltaformer_write

DEVICE = "cuda"
KERNELS = [("softmax", 0), ("linear", 0), ("relu", 0), ("exp", 0), ("round", 0), ("round", 2)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LEAVES: tuple[str, ...] = ("w", "k", "v", "alpha", "beta")
PIECES = (1, 63, 64, 65, 1000)
IN_PYTORCH = 1.2


def inputs(
    seq_len: int,
    kappa1: str = "softmax",
    *,
    batch: int = 2,
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = BF16,
    pieces: tuple[int, ...] | None = None,
    cos: float = 0.0,
    size: float = 1.0,
    beta: float | None = None,
) -> dict[str, Any]:
    """Arguments; softmax's logits are of the size of `size`, w and k unit vectors where kappa1 has no bounds.

    The mean cosine of w and k is `cos`, and for "round" they are multiples of 1/64. `pieces` are the lengths of
    packed documents.
    """
    generator = torch.Generator(DEVICE).manual_seed(seq_len)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=DEVICE, generator=generator)

    def alike(num_heads: int) -> Tensor:
        own = F.normalize(randn(batch, seq_len, num_heads, key_dim), dim=-1)
        y = F.normalize(cos**0.5 * common + (1 - cos) ** 0.5 * own, dim=-1)
        return (64 * y).round() / 64 if kappa1 in ("relu", "round") else y

    (num_heads, groups), (key_dim, value_dim) = heads, dims
    common = F.normalize(randn(1, 1, 1, key_dim), dim=-1)
    alphas, betas = torch.rand(2, batch, seq_len, num_heads, device=DEVICE, generator=generator)
    if kappa1 in ("exp", "round"):  # more would make u grow
        betas *= 0.2
    length = key_dim**0.5 if kappa1 == "softmax" else 1.0
    x: dict[str, Any] = {
        "w": (length * size * alike(num_heads)).to(dtype),
        "k": (length * alike(groups)).to(dtype),
        "v": randn(batch, seq_len, groups, value_dim).to(dtype),
        "alpha": alphas + 0.5,
        "beta": betas if beta is None else torch.full_like(betas, beta),
    }
    x = {name: y.requires_grad_() for name, y in x.items()}
    if pieces is not None:
        x["cu_seqlens"] = torch.tensor([0, *pieces], device=DEVICE).cumsum(0).int()
    return x


def changed(x: dict[str, Any], change: Callable[[Tensor], Tensor], names: tuple[str, ...] = LEAVES) -> dict[str, Any]:
    """With new leaves in place of those named."""
    return x | {name: change(x[name].detach()).requires_grad_() for name in names}


def with_gradients(x: dict[str, Any], grad_u: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
    """u and the gradients of every leaf, unless `options` say otherwise in Triton, which is told of bounds."""
    options = {"impl": "triton"} | options
    if "bounded" not in options:  # waits for the device
        options["bounded"] = bool(x["beta"].abs().max() <= 1)
    u = deltaformer_write(**x, **options)
    grads = torch.autograd.grad(u, [x[name] for name in LEAVES], upstream(u) if grad_u is None else grad_u)
    return {"u": u.detach(), **dict(zip(LEAVES, grads, strict=True))}


def upstream(u: Tensor) -> Tensor:
    """A gradient of u that every dtype can hold."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    return torch.randn(u.shape, device=DEVICE, generator=generator).bfloat16().to(u)


def exact(x: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """The same in float64, from the values that x has in its own precision."""
    return with_gradients(changed(x, torch.Tensor.double), **options, impl="torch")


def in_half_precision(x: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """The same by `half_write`."""
    u = half_write(**x, **options)
    return {"u": u, **dict(zip(LEAVES, torch.autograd.grad(u, [x[name] for name in LEAVES], upstream(u)), strict=True))}


def check(x: dict[str, Any]) -> None:
    """u and every gradient, with softmax."""
    assert_rounded(with_gradients(x), exact(x), x["v"].dtype)


def check_hard(x: dict[str, Any], **options: Any) -> None:
    """u and every gradient; all but a u with bounds may also be about as far off as the same formulas in PyTorch."""
    dtype, expected = x["v"].dtype, exact(x, **options)
    alternatives: dict[str, float] = {}
    if dtype != FP32:
        for name, y in in_half_precision(x, **options).items():
            alternatives[name] = IN_PYTORCH * float((y.double() - expected[name]).norm())
        if options.get("kappa1", "softmax") == "softmax" and x["beta"].abs().max() <= 1:
            del alternatives["u"]
    assert_rounded(with_gradients(x, **options), expected, dtype, alternatives)
