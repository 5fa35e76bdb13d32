"""What the chunked delta rule's pairs of ops have in common: how a backward op becomes the gradient of a forward one.

Shapes: B batch, T tokens, H query heads, G key/value heads, N documents (N = B unless packed).
"""

from typing import Any

from torch import Tensor
from torch.library import CustomOpDef  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["connect"]


def connect(forward: CustomOpDef, backward: CustomOpDef, num_options: int) -> None:
    """Make one op the gradient of the other, and describe what it returns.

    Args:
        forward: takes q, k, v, beta, g, initial_state, cu_seqlens and options; returns o, the final state, and what
            its backward needs.
        backward: takes the gradients of o and the final state, then q, k, beta, g, cu_seqlens, what the forward has
            left and its first `num_options` options; returns the gradients of q, k, v, beta, g (of size 0 without g)
            and the initial state [N, G, d_k, d_v].
        num_options: that the two share.
    """

    def gradients(
        grad_o: Tensor,
        grad_final_state: Tensor | None,
        q: Tensor,
        k: Tensor,
        beta: Tensor,
        g: Tensor | None,
        cu_seqlens: Tensor | None,
        *_: Any,
    ) -> tuple[Tensor, ...]:
        num_states = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return (
            q.new_empty(q.shape),
            k.new_empty(k.shape),
            k.new_empty(*k.shape[:3], grad_o.shape[3]),
            beta.new_empty(beta.shape),
            beta.new_empty(0 if g is None else g.shape),
            beta.new_empty(num_states, *k.shape[2:], grad_o.shape[3]),
        )

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, beta, g, initial_state, cu_seqlens, *options = inputs
        ctx.save_for_backward(q, k, beta, g, cu_seqlens, *output[2:])
        ctx.options, ctx.num_undifferentiated = options[:num_options], 1 + len(options)
        ctx.value_dim, ctx.has_g, ctx.has_state = v.shape[3], g is not None, initial_state is not None
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)

    def differentiate(
        ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        q, k, *saved = ctx.saved_tensors
        if grad_o is None:
            grad_o = q.new_zeros(*q.shape[:3], ctx.value_dim)
        *grads, grad_g, grad_state = backward(grad_o, grad_final_state, q, k, *saved, *ctx.options)
        grad_g, grad_state = grad_g if ctx.has_g else None, grad_state if ctx.has_state else None
        return *grads, grad_g, grad_state, *[None] * ctx.num_undifferentiated

    backward.register_fake(gradients)
    forward.register_autograd(differentiate, setup_context=save)
