"""The depthwise causal convolution of a few taps, and SiLU.

Shapes: B batch, T tokens, H heads, D head dim, C = H D channels, K taps.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from zoo.bench.kernels.kernel import Call, Draw, Inputs, Kernel, Shape, Side, Work
from zoo.bench.kernels.peers import fla_module
from zoo.kernels.short_convolution import short_convolution

__all__ = ["SHORT_CONVOLUTION"]

_TAPS = 4


def _inputs(shape: Shape, draw: Draw) -> Inputs:
    heads = shape.num_heads, shape.head_dim
    return {"x": draw.normal(shape.batch_size, shape.length, *heads), "weight": draw.normal(_TAPS, *heads)}


def _convolve(impl: str, _: Shape) -> Call:
    def call(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        (y,) = short_convolution(x.flatten(2), weight.flatten(1), activation="silu", impl=impl)
        return (y.view_as(x),)

    return call


def _conv1d(_: Shape) -> Call:
    def call(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        by_channel = weight.flatten(1).flip(0).T[:, None]
        padded = F.pad(x.flatten(2).mT, (_TAPS - 1, 0))
        return (F.silu(F.conv1d(padded, by_channel, groups=padded.shape[1])).mT.reshape(x.shape),)

    return call


def _fla(shape: Shape) -> Call:
    theirs = fla_module("modules.causal_conv1d", shape.device).causal_conv1d

    def call(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        by_channel = weight.flatten(1).flip(0).T.contiguous()  # its layout; small beside x
        return (theirs(x.flatten(2), weight=by_channel, activation="silu")[0].reshape(x.shape),)

    return call


def _work(shape: Shape) -> Work:
    """Of x, the weight and y; and 2 K by number: the gradients of x and of the weight are as much each."""
    flops = 2 * _TAPS * shape.num_vectors * shape.head_dim
    read = shape.tensor_bytes + shape.bytes_of(_TAPS * shape.num_heads * shape.head_dim)
    return Work(read=read, written=shape.tensor_bytes, flops=flops, backward_flops=2 * flops)


SHORT_CONVOLUTION = (
    Kernel(
        name="short_convolution",
        summary=f"a causal convolution of {_TAPS} taps in each of H D channels, and SiLU",
        inputs=_inputs,
        layouts={"x": "BTHD", "weight": "KHD", "y": "BTHD"},
        outputs=("y",),
        work=_work,
        sides=(
            Side("fla", "peer", _fla),
            Side("conv1d", "peer", _conv1d),
            Side("reference", "reference", partial(_convolve, "torch")),
            Side("triton", "ours", partial(_convolve, "triton")),
        ),
        reference=partial(_convolve, "torch"),
        has_backward=True,
    ),
)
