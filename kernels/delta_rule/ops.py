"""torch.library ops of the chunked (gated) delta rule: functional, fixed outputs, the backward as its own op.

Shapes: B batch, T tokens, H query heads, G key/value heads, N documents (N = B unless packed), C chunk, M chunks in a
row of the batch, P = M * B * G.
"""

from typing import Any

import torch
from torch import Tensor

from zoo.kernels.delta_rule.chunk import CHUNK, chunk_backward, chunk_forward, num_chunks
from zoo.kernels.precision import precise_dtype, without_autocast


@torch.library.custom_op("zoo::chunk_delta_rule_torch", mutates_args=())
def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`chunk_forward` as an op. Inputs are checked and of one dtype already: the public function does that."""
    with without_autocast(q.device):
        return chunk_forward(q, k, v, beta, g, initial_state, cu_seqlens, scale)


@chunk_delta_rule.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, seq_len, groups, key_dim = k.shape
    num_documents = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    problems = num_chunks(seq_len, num_documents) * batch * groups
    dtype = precise_dtype(v.dtype)
    return (
        v.new_empty(*q.shape[:3], v.shape[3]),
        v.new_empty(batch if num_documents is None else num_documents, groups, key_dim, v.shape[3], dtype=dtype),
        v.new_empty(problems, CHUNK, CHUNK, dtype=dtype),
        v.new_empty(problems, key_dim, v.shape[3], dtype=dtype),
        v.new_empty(problems, CHUNK, v.shape[3], dtype=dtype),
    )


@torch.library.custom_op("zoo::chunk_delta_rule_torch_backward", mutates_args=())
def chunk_delta_rule_backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    g: Tensor | None,
    cu_seqlens: Tensor | None,
    inverse: Tensor,
    before: Tensor,
    delta: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`chunk_backward` as an op: without g its gradient is of size 0."""
    with without_autocast(q.device):
        return chunk_backward(grad_o, grad_final_state, q, k, beta, g, cu_seqlens, inverse, before, delta, scale)


@chunk_delta_rule_backward.register_fake
def _(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    g: Tensor | None,
    cu_seqlens: Tensor | None,
    inverse: Tensor,
    before: Tensor,
    delta: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_states = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    grad_state = before.new_empty(num_states, k.shape[2], *before.shape[1:])
    grad_v = k.new_empty(*k.shape[:3], grad_o.shape[3])
    grad_beta, grad_g = beta.new_empty(beta.shape), beta.new_empty(0 if g is None else g.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), grad_v, grad_beta, grad_g, grad_state


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, beta, g, initial_state, cu_seqlens, ctx.scale = inputs
    ctx.save_for_backward(q, k, beta, g, cu_seqlens, *output[2:])
    ctx.value_dim, ctx.has_g, ctx.has_state = v.shape[3], g is not None, initial_state is not None
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    q, k, *saved = ctx.saved_tensors
    if grad_o is None:
        grad_o = q.new_zeros(*q.shape[:3], ctx.value_dim)
    *grads, grad_g, grad_state = chunk_delta_rule_backward(grad_o, grad_final_state, q, k, *saved, ctx.scale)
    return *grads, grad_g if ctx.has_g else None, grad_state if ctx.has_state else None, None, None


chunk_delta_rule.register_autograd(_backward, setup_context=_save)
