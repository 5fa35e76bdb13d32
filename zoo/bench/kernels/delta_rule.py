"""The delta rule, over sequences and for one more token.

Shapes: B batch, T tokens, H heads, D head dim, C tokens of a chunk.
"""

from functools import partial

from torch import Tensor

from zoo.bench.kernels.kernel import REFERENCE_LENGTH, Call, Draw, Inputs, Kernel, Shape, Side, Work
from zoo.bench.kernels.peers import fla_module
from zoo.kernels.delta_rule import chunk_delta_rule, recurrent_delta_rule

__all__ = ["DELTA_RULE"]

_CHUNK = 16  # tokens: the fewest that fill a matrix product of the hardware


def _inputs(shape: Shape, draw: Draw) -> Inputs:
    """Normal q, k, v and beta in (0, 1), all in one dtype; whoever computes normalises q and k."""
    size = shape.batch_size, shape.length, shape.num_heads
    inputs = {name: draw.normal(*size, shape.head_dim) for name in "qkv"}
    return inputs | {"beta": draw.uniform(*size)}


def _chunked(impl: str, _: Shape) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        return chunk_delta_rule(q, k, v, beta, qk_l2norm=True, impl=impl)[:1]

    return call


def _chunked_fla(shape: Shape) -> Call:
    theirs = fla_module("ops.delta_rule", shape.device).chunk_delta_rule

    def call(**inputs: Tensor) -> tuple[Tensor, ...]:
        return theirs(**inputs, use_qk_l2norm_in_kernel=True)[:1]

    return call


def _chunked_work(shape: Shape) -> Work:
    """Of q, k, v, beta and o; and by token and head, with a state that is read, written and asked: 6 D^2 + 4 C D.

    The chunked form with C = 16, without normalisation: K S, K^T V' and Q S are 2 D^2 each; the lower halves of K K^T,
    of the system solved, of Q K^T and of its product with V' are C D each. Each product has two in the backward.
    """
    flops = shape.num_vectors * (6 * shape.head_dim**2 + 4 * _CHUNK * shape.head_dim)
    read = 3 * shape.tensor_bytes + shape.bytes_of(shape.num_vectors)
    return Work(read=read, written=shape.tensor_bytes, flops=flops, backward_flops=2 * flops)


def _stateful_inputs(shape: Shape, draw: Draw) -> Inputs:
    state = draw.normal(shape.batch_size, shape.num_heads, shape.head_dim, shape.head_dim).float()
    return _inputs(shape, draw) | {"initial_state": state}


def _recurrent(impl: str, _: Shape) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, initial_state: Tensor) -> tuple[Tensor, ...]:
        return recurrent_delta_rule(q, k, v, beta, initial_state=initial_state, qk_l2norm=True, impl=impl)

    return call


def _recurrent_fla(shape: Shape) -> Call:
    theirs = fla_module("ops.delta_rule", shape.device).fused_recurrent_delta_rule
    return partial(theirs, output_final_state=True, use_qk_l2norm_in_kernel=True)


def _recurrent_work(shape: Shape) -> Work:
    """Of q, k, v, beta, o, and the state in float32, in and out; and 6 D^2 by token and head."""
    square, vectors = shape.head_dim**2, shape.num_vectors
    state = 4 * shape.batch_size * shape.num_heads * square
    read = 3 * shape.tensor_bytes + shape.bytes_of(vectors) + state
    return Work(read=read, written=shape.tensor_bytes + state, flops=6 * square * vectors)


_LAYOUTS = {"q": "BTHD", "k": "BTHD", "v": "BTHD", "beta": "BTH", "o": "BTHD"}

DELTA_RULE = (
    Kernel(
        name="chunk_delta_rule",
        summary="the delta rule over sequences, q and k normalised inside",
        inputs=_inputs,
        layouts=_LAYOUTS,
        outputs=("o",),
        work=_chunked_work,
        sides=(
            Side("fla", "peer", _chunked_fla),
            Side("reference", "reference", partial(_chunked, "reference"), REFERENCE_LENGTH, captured=False),
            Side("torch", "ours", partial(_chunked, "torch")),
            Side("triton", "ours", partial(_chunked, "triton")),
        ),
        reference=partial(_chunked, "reference"),
        exact=partial(_chunked, "torch"),
        has_backward=True,
    ),
    Kernel(
        name="recurrent_delta_rule",
        summary="one token of the delta rule from a state",
        inputs=_stateful_inputs,
        layouts=_LAYOUTS | {"initial_state": "BHDD", "final_state": "BHDD"},
        outputs=("o", "final_state"),
        work=_recurrent_work,
        sides=(
            Side("fla", "peer", _recurrent_fla),
            Side("reference", "reference", partial(_recurrent, "reference")),
            Side("triton", "ours", partial(_recurrent, "triton")),
        ),
        reference=partial(_recurrent, "reference"),
        batch_size=64,
        by_length=False,
    ),
)
