"""torch.library ops of the chunked (gated) delta rule: functional, fixed outputs, the backward as its own op.

Shapes: B batch, T tokens, H query heads, G key/value heads, N documents (N = B unless packed), C chunk, M chunks in a
row of the batch, P = M * B * G.
"""

import torch
from torch import Tensor

from zoo.kernels.delta_rule.chunk import CHUNK, chunk_backward, chunk_forward, num_chunks
from zoo.kernels.delta_rule.connect import connect
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


connect(chunk_delta_rule, chunk_delta_rule_backward, num_options=1)
