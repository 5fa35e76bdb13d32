"""What the tests of the delta rule's Triton kernels share: arguments, results, and how near they are to float64.

Shapes: B batch, T tokens, H query heads, G key/value heads, N documents (N = B unless packed).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_near
from torch import Tensor

from zoo.kernels.delta_rule import chunk_delta_rule

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LEAVES = ("q", "k", "v", "beta", "g", "initial_state")
PER_TOKEN = LEAVES[:5]
BOUNDS = {BF16: 1e-2, FP16: 2e-3, FP32: 1e-4}
ROUNDING = 4e-3  # of bfloat16: two computations that differ by the order of sums
PIECES = (1, 2, 63, 64, 65, 1000)
SIZES = (16, 32, 64, 128, 256)


class Form(NamedTuple):
    decay: float | None
    normalize: bool


PLAIN, BOTH = Form(None, False), Form(0.05, True)
each_form = pytest.mark.parametrize("form", [PLAIN, BOTH], ids=["plain", "both"])


def inputs(
    seq_len: int,
    form: Form = PLAIN,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = BF16,
    pieces: tuple[int, ...] | None = None,
    cos: float = 0.0,
    beta: float | None = None,
) -> dict[str, Any]:
    """Arguments with keys of mean cosine `cos`, unit unless the kernel normalises; beta, g and the state in float32;
    `pieces` are the lengths of packed documents."""
    generator = torch.Generator(DEVICE).manual_seed(seq_len)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=DEVICE, generator=generator)

    (num_heads, groups), (key_dim, value_dim) = heads, dims
    batch, num_states = (batch, batch) if pieces is None else (1, len(pieces))
    common, own = (F.normalize(randn(batch, n, groups, key_dim), dim=-1) for n in (1, seq_len))
    betas, decays = torch.rand(2, batch, seq_len, groups, device=DEVICE, generator=generator)
    x: dict[str, Any] = {
        "q": randn(batch, seq_len, num_heads, key_dim).to(dtype),
        "k": ((1 + 2 * form.normalize) * F.normalize(cos**0.5 * common + (1 - cos) ** 0.5 * own, dim=-1)).to(dtype),
        "v": randn(batch, seq_len, groups, value_dim).to(dtype),
        "beta": betas if beta is None else torch.full_like(betas, beta),
        "initial_state": randn(num_states, groups, key_dim, value_dim).float(),
    }
    if form.decay is not None:
        x["g"] = -form.decay * decays
    x = {name: y.clone().requires_grad_() for name, y in x.items()}
    if pieces is not None:
        x["cu_seqlens"] = torch.tensor([0, *pieces], device=DEVICE).cumsum(0).int()
    return x


def present(x: dict[str, Any], names: tuple[str, ...] = LEAVES) -> dict[str, Tensor]:
    return {name: x[name] for name in names if x.get(name) is not None}


def changed(x: dict[str, Any], change: Callable[[Tensor], Tensor], names: tuple[str, ...] = LEAVES) -> dict[str, Any]:
    """With new leaves in place of those named."""
    return x | {name: change(y.detach()).requires_grad_() for name, y in present(x, names).items()}


def results(
    x: dict[str, Any], function: Callable[..., tuple[Tensor, Tensor]] = chunk_delta_rule, **options: Any
) -> dict[str, Tensor]:
    """o, the final state, and the gradients of every leaf through both."""
    o, final_state = function(**x, **{"impl": "triton"} | options)
    generator = torch.Generator(DEVICE).manual_seed(0)
    weights = [torch.randn(y.shape, device=DEVICE, generator=generator).bfloat16().to(y) for y in (o, final_state)]
    leaves = present(x)
    grads = torch.autograd.grad((o, final_state), list(leaves.values()), weights)
    return {"o": o.detach(), "final_state": final_state.detach(), **dict(zip(leaves, grads, strict=True))}


def exact(
    x: dict[str, Any], function: Callable[..., tuple[Tensor, Tensor]] = chunk_delta_rule, **options: Any
) -> dict[str, Tensor]:
    """The same in float64, from the values that x has in its own precision."""
    return results(changed(x, torch.Tensor.double), function, impl="torch", **options)


def check(x: dict[str, Any], form: Form, bound: float | None = None, **options: Any) -> None:
    """Forward and every gradient."""
    expected = exact(x, qk_l2norm=form.normalize)
    assert_near(results(x, qk_l2norm=form.normalize, **options), expected, bound or BOUNDS[x["v"].dtype])
