"""What the ops of attention's backends have in common: how their backward op is called, and what it returns.

Shapes: B batch, T tokens, H query heads, G key/value heads, D and D_v their sizes, N documents.
"""

from typing import Any

from torch import Tensor

__all__ = ["register_gradients"]


def register_gradients(op: Any, backward: Any) -> None:
    """Give an op its gradients, and the op that computes them its shapes.

    Args:
        op: of q [B, T, H, D], k [B, T, G, D], v [B, T, G, D_v], cu_seqlens [N + 1] or None, window, scale, and maybe
            more, to o [B, T, H, D_v] and the log-sum-exp of rows, which has no gradient.
        backward: of the gradient of o, the four tensors, both outputs, window and scale, to the gradients of q, k, v.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.window, ctx.scale = inputs[:6]
        ctx.count = len(inputs)
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def run(ctx: Any, grad_o: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad_o is None:
            return (None,) * ctx.count
        grads = backward(grad_o, *ctx.saved_tensors, ctx.window, ctx.scale)
        return *grads, *(None,) * (ctx.count - len(grads))

    def shapes(_grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    op.register_autograd(run, setup_context=save)
    backward.register_fake(shapes)
