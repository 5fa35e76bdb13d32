"""The Deltaformer's write, of keys; and the write and the read, of queries, as flash-linear-attention has them.

Shapes: B batch, T tokens, H heads, D head dim.
"""

from functools import partial

from torch import Tensor

from zoo.bench.kernels.attention import exact_attention
from zoo.bench.kernels.kernel import REFERENCE_LENGTH, Call, Draw, Inputs, Kernel, Shape, Side, Work
from zoo.bench.kernels.peers import fla_module
from zoo.kernels.attention import attention
from zoo.kernels.deltaformer import deltaformer_write

__all__ = ["DELTAFORMER"]


def _inputs(names: str, shape: Shape, draw: Draw) -> Inputs:
    """Normal vectors, and beta in (0, 1); alpha is 1."""
    size = shape.batch_size, shape.length, shape.num_heads
    return {name: draw.normal(*size, shape.head_dim) for name in names} | {"beta": draw.uniform(*size)}


def _write(impl: str, _: Shape) -> Call:
    def call(k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        return (deltaformer_write(k, k, v, None, beta, bounded=True, impl=impl),)

    return call


def _write_read(write: str, read: str, _: Shape) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        u = deltaformer_write(q, k, v, None, beta, bounded=True, impl=write)
        return (attention(q, k, u, impl=read),)

    return call


def _write_read_exact(_: Shape) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        return (exact_attention(q, k, deltaformer_write(q, k, v, None, beta, impl="torch")),)

    return call


def _write_read_fla(shape: Shape) -> Call:
    theirs = fla_module("ops.deltaformer.parallel", shape.device)
    if theirs.flash_attn_func is None:  # without flash-attn it has no read: ours it is
        theirs.flash_attn_func = lambda q, k, v, **_: attention(q, k, v)

    def call(**inputs: Tensor) -> tuple[Tensor, ...]:
        return (theirs.deltaformer_attn(**inputs),)

    return call


def _work(stages: int, tensors: int, shape: Shape) -> Work:
    """Each vector and beta once; a stage is 4 D by pair, and 2.5 times that in the backward.

    As in attention two products, of the logits and of the weights, and five in the backward, one of which is the logits
    again. The write sees the tokens before alone, the read the token itself too. u may stay on the chip.
    """
    vectors = shape.num_vectors
    pairs = stages * shape.visible_pairs() - vectors  # the write's are fewer
    flops = 4 * shape.head_dim * pairs
    read = tensors * shape.tensor_bytes + shape.bytes_of(vectors)
    return Work(read=read, written=shape.tensor_bytes, flops=flops, backward_flops=5 * flops // 2)


_LAYOUTS = {"k": "BTHD", "v": "BTHD", "beta": "BTH"}

DELTAFORMER = (
    Kernel(
        name="deltaformer_write",
        summary="the Deltaformer's write, softmax, keys compared with keys",
        inputs=partial(_inputs, "kv"),
        layouts=_LAYOUTS | {"u": "BTHD"},
        outputs=("u",),
        work=partial(_work, 1, 2),
        sides=(
            Side("reference", "reference", partial(_write, "reference"), REFERENCE_LENGTH, captured=False),
            Side("torch", "ours", partial(_write, "torch")),
            Side("triton", "ours", partial(_write, "triton")),
        ),
        reference=partial(_write, "reference"),
        exact=partial(_write, "torch"),
        has_backward=True,
    ),
    Kernel(
        name="deltaformer_write_read",
        summary="the Deltaformer's write, queries compared with keys, and its read",
        inputs=partial(_inputs, "qkv"),
        layouts=_LAYOUTS | {"q": "BTHD", "o": "BTHD"},
        outputs=("o",),
        work=partial(_work, 2, 3),
        sides=(
            Side("fla", "peer", _write_read_fla, captured=False),
            Side(
                "reference",
                "reference",
                partial(_write_read, "reference", "reference"),
                REFERENCE_LENGTH,
                captured=False,
            ),
            Side("torch", "ours", partial(_write_read, "torch", "auto")),
            Side("triton", "ours", partial(_write_read, "triton", "auto")),
        ),
        reference=partial(_write_read, "reference", "reference"),
        exact=_write_read_exact,
        has_backward=True,
    ),
)
