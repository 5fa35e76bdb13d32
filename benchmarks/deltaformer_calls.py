"""What `deltaformer_gpu.py` calls: the mixer's op and its stages, its peers, inputs, and errors.

A key is compared with the keys before it ("kk"), the mixer's default; where FLA is beside it a query ("qk"), as FLA
does. All sides get the same tensors, alpha and beta in bf16 too.

Shapes: B batch, T tokens, H heads, D head dimension of keys and values.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from delta_rule_calls import Inputs, Rule, forward, forward_backward, make_inputs
from harness import DEVICE, relative_errors
from zoo.kernels.attention import attention
from zoo.kernels.deltaformer import deltaformer_write

HARD = ("random", "beta = 1", "logits x4", "equal keys")

Write = Callable[..., Tensor]
"""From w, k, v, alpha, beta to u."""
OURS: Write = partial(deltaformer_write, bounded=True, impl="triton")  # as the mixer, whose beta is a sigmoid
EXACT: Write = partial(deltaformer_write, impl="torch")  # of float64


def write_rule(write: Write) -> Rule:
    """The write alone; of keys, or of queries if there are any."""

    def rule(
        k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor | None = None, q: Tensor | None = None
    ) -> tuple[Tensor, None]:
        return write(k if q is None else q, k, v, alpha, beta), None

    return rule


def op_rule(write: Write, *, by_query: bool = False) -> Rule:
    """The write, of keys or of queries, and the read."""

    def rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor | None = None) -> tuple[Tensor, None]:
        return attention(q, k, write(q if by_query else k, k, v, alpha, beta)), None

    return rule


def read_rule(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
    """The read alone, as the mixer calls it."""
    return attention(q, k, v), None


def cudnn_rule(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
    """Causal attention by cuDNN; [B, H, T, D]."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True), None


def fla_rule() -> Rule | None:
    """FLA's write and read, or None where it cannot be imported; without flash-attn it reads as the mixer does."""
    try:
        theirs: Any = import_module("fla.ops.deltaformer.parallel")
    except ImportError:
        return None
    if theirs.flash_attn_func is None:
        theirs.flash_attn_func = lambda q, k, v, **_: attention(q, k, v)

    def rule(**inputs: Tensor) -> tuple[Tensor, None]:
        return theirs.deltaformer_attn(**inputs), None

    return rule


def some(inputs: Inputs, *names: str) -> Inputs:
    """The inputs of these names."""
    return {name: inputs[name] for name in names}


def heads_first(x: Tensor) -> Tensor:
    """[B, T, H, D] to a tensor [B, H, T, D] of its own."""
    return x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad)


def make_hard(case: str, length: int, head_dim: int) -> Inputs:
    """B 1 H 16: normal q, k, v, alpha and beta in (0, 1), and what one of `HARD`, or "unit keys", says."""
    inputs = {name: x.detach() for name, x in make_inputs((1, length, 16, head_dim)).items()}
    generator = torch.Generator(DEVICE).manual_seed(1)
    strengths = inputs["beta"]
    inputs["alpha"] = torch.rand(strengths.shape, generator=generator, device=DEVICE, dtype=strengths.dtype)
    if case == "beta = 1":
        inputs["beta"] = torch.ones_like(strengths)
    elif case == "logits x4":
        inputs |= {name: 2 * inputs[name] for name in "qk"}
    elif case == "equal keys":
        inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    elif case == "unit keys":
        inputs["k"] = F.normalize(inputs["k"].float(), dim=-1).to(strengths.dtype)
    return {name: x.requires_grad_() for name, x in inputs.items()}


def results(write: Write, inputs: Inputs, gradients: list[Tensor], *, by_query: bool = False) -> dict[str, Tensor]:
    """u, o, and the gradient of every input."""
    u, _ = forward(write_rule(write), {name: x for name, x in inputs.items() if by_query or name != "q"}, [])
    return {"u": u} | forward_backward(op_rule(write, by_query=by_query), inputs, gradients)


def exact_results(
    write: Write, inputs: Inputs, gradients: list[Tensor], heads: int | None = None, *, by_query: bool = False
) -> Inputs:
    """The same in float64, of the first row's first heads. What is 0 but for float64's own rounding is 0."""
    doubles = {name: x.detach().double().requires_grad_() for name, x in cut(inputs, heads).items()}
    found = results(write, doubles, [x[:1, :, :heads].double() for x in gradients], by_query=by_query)
    return {name: x if x.square().mean().sqrt() > 1e-12 else torch.zeros_like(x) for name, x in found.items()}


def cut(tensors: dict[str, Tensor], heads: int | None) -> dict[str, Tensor]:
    """The first heads of the first row of each."""
    return {name: x[:1, :, :heads] for name, x in tensors.items()}


def rounding_errors(exact: dict[str, Tensor]) -> dict[str, float | None]:
    """Those of the exact results rounded to bf16."""
    return relative_errors({name: x.bfloat16() for name, x in exact.items()}, exact)
