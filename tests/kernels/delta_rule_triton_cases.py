"""Inputs of the delta rule's Triton kernels, on a CUDA device or in Triton's interpreter, and what is exact for them.

Shapes: B batch, T tokens, H query heads, G key/value heads, N documents (N = B unless packed).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.kernels.delta_rule.reference import delta_rule_reference
from zoo.kernels.normalize import l2_normalize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEAVES = ("q", "k", "v", "beta", "g", "initial_state")
PER_TOKEN = LEAVES[:5]


class Form(NamedTuple):
    decay: float | None
    normalize: bool


FORMS = {
    "plain": Form(None, False),
    "normalized": Form(None, True),
    "gated": Form(0.05, False),
    "both": Form(0.05, True),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
plainest_and_fullest = pytest.mark.parametrize("form", [FORMS["plain"], FORMS["both"]], ids=["plain", "both"])


def inputs(
    seq_len: int,
    form: Form = FORMS["plain"],
    *,
    batch: int = 1,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (16, 32),
    dtype: torch.dtype = torch.float32,
    pieces: tuple[int, ...] | None = None,
    cos: float = 0.0,
    beta: float | None = None,
    state: bool = True,
) -> dict[str, Any]:
    """Float64 leaves on the CPU that `dtype` can hold, or float32 beta, g and state; keys of mean cosine `cos`, unit
    unless the kernel normalises; `pieces` are the lengths of packed documents."""
    generator = torch.Generator().manual_seed(seq_len)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    (num_heads, groups), (key_dim, value_dim) = heads, dims
    num_states = batch if pieces is None else len(pieces)
    common, own = (F.normalize(randn(batch, n, groups, key_dim), dim=-1) for n in (1, seq_len))
    betas, decays = (torch.rand(batch, seq_len, groups, dtype=torch.float64, generator=generator) for _ in range(2))
    x: dict[str, Any] = {
        "q": randn(batch, seq_len, num_heads, key_dim),
        "k": (1 + 2 * form.normalize) * F.normalize(cos**0.5 * common + (1 - cos) ** 0.5 * own, dim=-1),
        "v": randn(batch, seq_len, groups, value_dim),
        "beta": betas if beta is None else torch.full_like(betas, beta),
    }
    if form.decay is not None:
        x["g"] = -form.decay * decays
    if state:
        x["initial_state"] = randn(num_states, groups, key_dim, value_dim)
    x = {name: y.to(dtype if name in "qkv" else torch.float32).double().requires_grad_() for name, y in x.items()}
    if pieces is not None:
        x["cu_seqlens"] = torch.tensor([0, *pieces]).cumsum(0).int()
    return x


def upstream(x: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gradients of o and of the final state."""
    generator = torch.Generator().manual_seed(0)
    (batch, seq_len, num_heads, key_dim), (groups, value_dim) = x["q"].shape, x["v"].shape[2:]
    num_states = batch if x.get("cu_seqlens") is None else len(x["cu_seqlens"]) - 1
    grad_o = torch.randn(batch, seq_len, num_heads, value_dim, generator=generator).to(dtype)
    grad_final_state = torch.randn(num_states, groups, key_dim, value_dim, generator=generator)
    return grad_o.double(), grad_final_state.double()


def reference(
    x: dict[str, Any], grads: tuple[Tensor, Tensor | None], *, normalize: bool = False, scale: float = 0.3
) -> dict[str, Tensor]:
    """o, the final state, and the gradients of all leaves, by autograd."""
    q, k = (l2_normalize(x[name]) if normalize else x[name] for name in ("q", "k"))
    others = x.get("g"), x.get("initial_state"), x.get("cu_seqlens")
    o, final_state = delta_rule_reference(q, k, x["v"], x["beta"], *others, scale)
    names = [name for name in LEAVES if name in x]
    loss = (o * grads[0]).sum()
    if grads[1] is not None:
        loss = loss + (final_state * grads[1]).sum()
    found = torch.autograd.grad(loss, [x[name] for name in names], materialize_grads=True)
    return {"o": o.detach(), "final_state": final_state.detach(), **dict(zip(names, found, strict=True))}


def on_device(x: dict[str, Any], dtype: torch.dtype, view: Callable[[Tensor], Tensor]) -> list[Any]:
    """q, k, v, beta, g, initial_state, cu_seqlens as the launchers take them."""
    given = [None if x.get(name) is None else x[name].detach().to(DEVICE) for name in (*LEAVES, "cu_seqlens")]
    dtypes = [dtype] * 3 + [torch.float32] * 3
    given[:6] = [None if y is None else view(y.to(as_dtype)) for y, as_dtype in zip(given[:6], dtypes, strict=True)]
    return given
