"""What a decoding step consists of: reading a cache, a matrix times one row, a token of a layer with the delta rule.

Shapes: B rows, T slots of a cache, H heads, D head dim, C = 3 H D channels, K taps, N = H D numbers of a row.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.bench.kernels.kernel import REFERENCE_LENGTH, Call, Draw, Inputs, Kernel, Shape, Side, Work
from zoo.kernels.cache_read import read_cache
from zoo.kernels.delta_step import delta_step
from zoo.kernels.precision import precise_dtype
from zoo.kernels.row_linear import row_linear

__all__ = ["DECODING"]

_TAPS = 4
_EPS = 1e-6


def _cache_inputs(shape: Shape, draw: Draw) -> Inputs:
    """Full caches."""
    heads = shape.num_heads, shape.head_dim
    counts = torch.full((shape.batch_size,), shape.length, dtype=torch.int32, device=shape.device)
    caches = {name: draw.normal(shape.batch_size, shape.length, *heads) for name in "kv"}
    return {"q": draw.normal(shape.batch_size, *heads), "counts": counts} | caches


def _read_cache(impl: str, _: Shape) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        o, log_sum = read_cache(q, k, v, counts, impl=impl)
        assert log_sum is not None, "of softmax"
        return o, log_sum

    return call


def _read_cache_sdpa(_: Shape) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        return (F.scaled_dot_product_attention(q[:, :, None], k.transpose(1, 2), v.transpose(1, 2))[:, :, 0],)

    return call


def _read_cache_work(shape: Shape) -> Work:
    """Of the caches, q, o and its log sum in float32, and counts; and 4 D by slot and head."""
    rows = shape.batch_size * shape.num_heads
    read = 2 * shape.tensor_bytes + shape.bytes_of(rows * shape.head_dim) + 4 * shape.batch_size
    written = 4 * rows * (shape.head_dim + 1)
    return Work(read=read, written=written, flops=4 * shape.num_vectors * shape.head_dim)


def _row_inputs(shape: Shape, draw: Draw) -> Inputs:
    size = shape.num_heads * shape.head_dim
    return {
        "x": draw.normal(size),
        "weight": draw.normal(size, size) * size**-0.5,
        "norm_weight": draw.normal(size),
        "residual": draw.normal(size),
    }


def _row_linear(impl: str, _: Shape) -> Call:
    def call(x: Tensor, weight: Tensor, norm_weight: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        options = {"norm_weight": norm_weight, "residual": residual, "eps": _EPS}
        return (row_linear(x, weight, **options, constant=True, impl=impl),)

    return call


def _addmv(_: Shape) -> Call:
    def call(x: Tensor, weight: Tensor, norm_weight: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return (torch.addmv(residual, weight, F.rms_norm(x, x.shape, norm_weight, _EPS)),)

    return call


def _row_work(shape: Shape) -> Work:
    """Of the matrix and four rows, three of which are read; and 2 by number of the matrix."""
    size = shape.num_heads * shape.head_dim
    return Work(read=shape.bytes_of(size**2 + 3 * size), written=shape.bytes_of(size), flops=2 * size**2)


def _step_inputs(shape: Shape, draw: Draw) -> Inputs:
    batch, heads, size = shape.batch_size, shape.num_heads, shape.head_dim
    channels = 3 * heads * size
    return {
        "x": draw.normal(batch, channels),
        "weight": draw.normal(_TAPS, channels),
        "taps": draw.normal(batch, _TAPS, channels),
        "start": torch.full((batch,), 2 * _TAPS, dtype=torch.int64, device=shape.device),  # the token's slot is 0
        "state": draw.normal(batch, heads, size, size, dtype=precise_dtype(shape.dtype)),
        "logits": draw.normal(batch, heads),
    }


def _delta_step(impl: str, _: Shape) -> Call:
    def call(
        x: Tensor, weight: Tensor, taps: Tensor, start: Tensor, state: Tensor, logits: Tensor
    ) -> tuple[Tensor, ...]:
        o = delta_step(x, weight, taps, start, state, logits, qk_l2norm=True, impl=impl)
        return o, state, taps[:, 0]

    return call


def _step_work(shape: Shape) -> Work:
    """Of x, the weight, the K - 1 tokens before, the logits, start, o, the token's slot, and the state in and out.

    By row and head 6 D^2 of the delta rule, and 2 K by channel of the convolution.
    """
    batch, heads, size = shape.batch_size, shape.num_heads, shape.head_dim
    channels = 3 * heads * size
    state = batch * heads * size**2
    state_bytes = state * precise_dtype(shape.dtype).itemsize
    numbers = batch * channels + _TAPS * channels + batch * (_TAPS - 1) * channels + batch * heads
    return Work(
        read=shape.bytes_of(numbers) + 8 * batch + state_bytes,
        written=shape.bytes_of(batch * heads * size + batch * channels) + state_bytes,
        flops=6 * state + 2 * _TAPS * batch * channels,
    )


DECODING = (
    Kernel(
        name="read_cache",
        summary="one query of each row and head reads its cache of T slots",
        inputs=_cache_inputs,
        layouts={"q": "BHD", "k": "BTHD", "v": "BTHD", "counts": "B", "o": "BHD", "log_sum": "BH"},
        outputs=("o", "log_sum"),
        work=_read_cache_work,
        sides=(
            Side("sdpa", "peer", _read_cache_sdpa),
            Side("reference", "reference", partial(_read_cache, "reference"), REFERENCE_LENGTH, captured=False),
            Side("torch", "ours", partial(_read_cache, "torch")),
            Side("triton", "ours", partial(_read_cache, "triton")),
        ),
        reference=partial(_read_cache, "reference"),
    ),
    Kernel(
        name="row_linear",
        summary="a square matrix of N = H D times one row that is normalised (RMSNorm), and a residual",
        inputs=_row_inputs,
        layouts={"x": "N", "weight": "NN", "norm_weight": "N", "residual": "N", "y": "N"},
        outputs=("y",),
        work=_row_work,
        sides=(
            Side("addmv", "peer", _addmv),
            Side("reference", "reference", partial(_row_linear, "torch")),
            Side("triton", "ours", partial(_row_linear, "triton")),
        ),
        reference=partial(_row_linear, "torch"),
        batch_size=1,
        by_length=False,
    ),
    Kernel(
        name="delta_step",
        summary="one token of a layer with the delta rule: convolution, SiLU, L2 norm, beta, and the rule",
        inputs=_step_inputs,
        layouts={"x": "BC", "weight": "KC", "taps": "BKC", "start": "B", "state": "BHDD", "logits": "BH",
                 "o": "BHD", "final_state": "BHDD", "newest": "BC"},
        outputs=("o", "final_state", "newest"),
        work=_step_work,
        sides=(
            Side("reference", "reference", partial(_delta_step, "torch")),
            Side("triton", "ours", partial(_delta_step, "triton")),
        ),
        reference=partial(_delta_step, "torch"),
        batch_size=64,
        by_length=False,
    ),
)  # fmt: skip
