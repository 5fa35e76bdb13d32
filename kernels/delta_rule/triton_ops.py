"""torch.library ops of the delta rule's Triton kernels: functional, fixed outputs, each backward an op or made of ops.

Shapes: B batch, T tokens, H query heads, G key/value heads, N documents (N = B unless packed).
"""

from typing import Any

import torch
from torch import Tensor

from zoo.kernels.delta_rule.connect import connect
from zoo.kernels.delta_rule.schedule import Layout

# The kernels, and Triton with them, are imported at the first call: registering the ops needs neither.


def _layout(
    q: Tensor,
    k: Tensor,
    value_dim: int,
    g: Tensor | None,
    cu_seqlens: Tensor | None,
    normalize: bool,
    segment_length: int | None,
) -> Layout:
    # Integers: a graph is for these numbers of heads and sizes, where T may be symbolic.
    heads, groups, key_dim, value_dim = map(int, (q.shape[2], k.shape[2], q.shape[3], value_dim))
    return Layout(
        batch=q.shape[0],
        seq_len=q.shape[1],
        num_documents=None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        heads=heads,
        groups=groups,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=k.dtype,
        device=k.device,
        segment_length=segment_length,
        normalize=normalize,
        gated=g is not None,
    )


@torch.library.custom_op("zoo::chunk_delta_rule_triton", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize: bool,
    segment_length: int | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`chunk_forward` as an op; what the backward needs is empty unless `save`."""
    from zoo.kernels.delta_rule.triton.launch import chunk_forward

    layout = _layout(q, k, v.shape[3], g, cu_seqlens, normalize, segment_length)
    with torch.cuda.device_of(q):
        o, final_state, saved = chunk_forward(layout, q, k, v, beta, g, initial_state, cu_seqlens, scale, save=save)
    inverse, scores, delta, states, scales, transitions = saved if save else (x.new_empty(0) for x in saved)
    return o, final_state, inverse, scores, delta, states, scales, transitions


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
    normalize: bool,
    segment_length: int | None,
    save: bool,
) -> tuple[Tensor, ...]:
    layout = _layout(q, k, v.shape[3], g, cu_seqlens, normalize, segment_length)
    shapes = layout.saved_shapes()
    return (
        v.new_empty(*q.shape[:3], v.shape[3]),
        v.new_empty(layout.num_states, *k.shape[2:], v.shape[3], dtype=torch.float32),
        *(v.new_empty(shape if save else 0, dtype=dtype) for shape, dtype in shapes),
    )


@torch.library.custom_op(
    "zoo::chunk_delta_rule_triton_backward", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,)
)
def chunk_delta_rule_backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    g: Tensor | None,
    cu_seqlens: Tensor | None,
    inverse: Tensor,
    scores: Tensor,
    delta: Tensor,
    states: Tensor,
    scales: Tensor,
    transitions: Tensor,
    scale: float,
    normalize: bool,
    segment_length: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`chunk_backward` as an op: without g its gradient is of size 0."""
    from zoo.kernels.delta_rule.triton.launch import Saved, chunk_backward

    layout = _layout(q, k, grad_o.shape[3], g, cu_seqlens, normalize, segment_length)
    saved = Saved(inverse, scores, delta, states, scales, transitions)
    with torch.cuda.device_of(q):
        return chunk_backward(layout, grad_o, grad_final_state, q, k, beta, g, cu_seqlens, saved, scale)


connect(chunk_delta_rule, chunk_delta_rule_backward, num_options=3)


@torch.library.custom_op(
    "zoo::recurrent_delta_rule_triton", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,)
)
def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """`recurrent_forward` as an op. Its backward goes by chunks, from the inputs alone."""
    from zoo.kernels.delta_rule.triton.recurrent import recurrent_forward

    with torch.cuda.device_of(q):
        return recurrent_forward(q, k, v, beta, g, initial_state, cu_seqlens, scale, normalize=normalize)


@recurrent_delta_rule.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    num_states = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (
        v.new_empty(*q.shape[:3], v.shape[3]),
        v.new_empty(num_states, *k.shape[2:], v.shape[3], dtype=torch.float32),
    )


@torch.library.custom_op(
    "zoo::step_delta_rule_triton", mutates_args=("state",), tags=(torch.Tag.needs_fixed_stride_order,)
)
def step_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, state: Tensor, scale: float, normalize: bool
) -> Tensor:
    """`recurrent_forward` as an op that updates the state in place."""
    from zoo.kernels.delta_rule.triton.recurrent import recurrent_forward

    with torch.cuda.device_of(q):
        o, _ = recurrent_forward(q, k, v, beta, g, state, None, scale, normalize=normalize, final_state=state)
    return o


@step_delta_rule.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, state: Tensor, scale: float, normalize: bool
) -> Tensor:
    return v.new_empty(*q.shape[:3], v.shape[3])


def _save_recurrent(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.normalize = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward_recurrent(ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, beta, g, initial_state, cu_seqlens = ctx.saved_tensors
    options = ctx.scale, ctx.normalize, None
    _, _, *saved = chunk_delta_rule(q, k, v, beta, g, initial_state, cu_seqlens, *options, True)
    if grad_o is None:
        grad_o = q.new_zeros(*q.shape[:3], v.shape[3])
    *grads, grad_g, grad_state = chunk_delta_rule_backward(
        grad_o, grad_final_state, q, k, beta, g, cu_seqlens, *saved, *options
    )
    return *grads, None if g is None else grad_g, None if initial_state is None else grad_state, None, None, None


recurrent_delta_rule.register_autograd(_backward_recurrent, setup_context=_save_recurrent)
