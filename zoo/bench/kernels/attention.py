"""Causal softmax attention, full and in a sliding window.

Shapes: B batch, T tokens, H heads, D head dim.
"""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zoo.bench.kernels.kernel import REFERENCE_LENGTH, Call, Draw, Inputs, Kernel, Make, Shape, Side, Work
from zoo.bench.measure import attend
from zoo.bench.plan import FORCED
from zoo.kernels.attention import attention, attention_mask, visible

__all__ = ["ATTENTION", "exact_attention"]

_ROWS = 1024  # whose weights the exact form holds at a time


def exact_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """The reference by blocks of rows, which the backward computes again: no two blocks' weights exist at once."""
    order, blocks = torch.arange(q.shape[1], device=q.device), []
    for first in range(0, q.shape[1], _ROWS):
        rows = slice(first, min(first + _ROWS, q.shape[1]))
        seen = slice(rows.stop)
        mask = visible(order[rows], order[seen], window=window)[None, None]
        blocks.append(checkpoint(_masked, q[:, rows], k[:, seen], v[:, seen], mask, use_reentrant=False))
    return torch.cat(blocks, 1)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attention(q, k, v, mask=mask, impl="reference")


def _inputs(shape: Shape, draw: Draw) -> Inputs:
    size = shape.batch_size, shape.length, shape.num_heads, shape.head_dim
    return {name: draw.normal(*size) for name in "qkv"}


def _attend(backend: str, windowed: bool, shape: Shape) -> Call:
    """With a mask made beforehand where the backend wants one, as layers share it."""
    window = shape.window if windowed else None
    dims = shape.head_dim, shape.head_dim
    impl = "sdpa" if backend in FORCED else backend
    mask = attention_mask(
        shape.length, window=window, head_dims=dims, device=shape.device, dtype=shape.dtype, impl=impl
    )

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (attend(backend, q, k, v, window=window, mask=mask),)

    return call


def _exact(windowed: bool, shape: Shape) -> Call:
    window = shape.window if windowed else None

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (exact_attention(q, k, v, window),)

    return call


def _work(windowed: bool, shape: Shape) -> Work:
    """Of q, k, v and o; 4 D by visible pair, and 2.5 times that in the backward, which makes the logits again."""
    flops = 4 * shape.head_dim * shape.visible_pairs(shape.window if windowed else None)
    return Work(read=3 * shape.tensor_bytes, written=shape.tensor_bytes, flops=flops, backward_flops=5 * flops // 2)


def _kernel(name: str, summary: str, peers: tuple[str, ...], *, windowed: bool) -> Kernel:
    make: dict[str, Make] = {
        backend: partial(_attend, backend, windowed) for backend in (*peers, "reference", "triton")
    }
    return Kernel(
        name=name,
        summary=summary,
        inputs=_inputs,
        layouts=dict.fromkeys("qkvo", "BTHD"),
        outputs=("o",),
        work=partial(_work, windowed),
        sides=(
            *(Side(peer, "peer", make[peer]) for peer in peers),
            Side("reference", "reference", make["reference"], REFERENCE_LENGTH),
            Side("triton", "ours", make["triton"]),
        ),
        reference=partial(_exact, windowed),
        windowed=windowed,
        has_backward=True,
    )


ATTENTION = (
    _kernel("attention", "causal softmax attention", ("sdpa", "cudnn", "sdpa-flash"), windowed=False),
    _kernel("attention_window", "causal softmax attention in a window", ("sdpa", "flex", "xformers"), windowed=True),
)
