"""What the tests of attention's Triton kernels share: arguments, results in other ways, and how near they are.

Shapes: B batch, T tokens, H query heads, G key/value heads, D and D_v their sizes.
"""

from collections.abc import Callable
from typing import Any

import torch
from comparing import assert_rounded
from torch import Tensor

from zoo.kernels.attention import attention

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LEAVES: tuple[str, ...] = ("q", "k", "v")
PIECES = (1, 63, 64, 65, 1000)
EXACT = 1e-6  # how far off results may be that rounding leaves as they are
IN_PYTORCH = 1.2
IN_FLEX_ATTENTION = 2.0  # whose gradients where two tokens cancel each other are 1.7 times as far off as SDPA's


def inputs(
    seq_len: int,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = BF16,
    pieces: tuple[int, ...] | None = None,
    size: float = 1.0,
) -> dict[str, Any]:
    """Arguments of the size of `size`; `pieces` are the lengths of packed documents."""
    generator = torch.Generator(DEVICE).manual_seed(seq_len)
    (num_heads, groups), (key_dim, value_dim) = heads, dims
    sizes = {"q": (num_heads, key_dim), "k": (groups, key_dim), "v": (groups, value_dim)}
    x: dict[str, Any] = {
        name: (size * torch.randn(batch, seq_len, *each, device=DEVICE, generator=generator)).to(dtype).requires_grad_()
        for name, each in sizes.items()
    }
    if pieces is not None:
        x["cu_seqlens"] = torch.tensor([0, *pieces], device=DEVICE).cumsum(0).int()
    return x


def changed(x: dict[str, Any], change: Callable[[Tensor], Tensor], names: tuple[str, ...] = LEAVES) -> dict[str, Any]:
    """With new leaves in place of those named."""
    return x | {name: change(x[name].detach()).requires_grad_() for name in names}


def upstream(o: Tensor) -> Tensor:
    """A gradient of o that every dtype can hold."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    return torch.randn(o.shape, device=DEVICE, generator=generator).bfloat16().to(o)


def with_gradients(x: dict[str, Any], grad_o: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
    """o and the gradients of every leaf, unless `options` say otherwise in Triton."""
    options = {"impl": "triton"} | options
    o = attention(**x, **options)
    grads = torch.autograd.grad(o, [x[name] for name in LEAVES], upstream(o) if grad_o is None else grad_o)
    return {"o": o.detach(), **dict(zip(LEAVES, grads, strict=True))}


def exact(x: dict[str, Any], grad_o: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
    """The same in float64, from the values that x has in its own precision."""
    grad_o = None if grad_o is None else grad_o.double()
    others: dict[str, Any] = options | {"impl": "sdpa"}
    return with_gradients(changed(x, torch.Tensor.double), grad_o, **others)


def check(x: dict[str, Any], **options: Any) -> None:
    """o and every gradient."""
    assert_rounded(with_gradients(x, **options), exact(x, **options), x["v"].dtype, least=EXACT)


def check_hard(x: dict[str, Any], *, factor: float = IN_PYTORCH, **options: Any) -> None:
    """o and every gradient, which may also be `factor` times as far off as PyTorch's own attention."""
    dtype, expected = x["v"].dtype, exact(x, **options)
    others: dict[str, Any] = options | {"impl": "sdpa"}
    in_pytorch = with_gradients(x, **others)
    alternatives = {
        name: factor * float((y.double() - expected[name]).norm())
        for name, y in in_pytorch.items()
        if dtype != FP32 and name != "o"
    }
    assert_rounded(with_gradients(x, **options), expected, dtype, alternatives, least=EXACT)
