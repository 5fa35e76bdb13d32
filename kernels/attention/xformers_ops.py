"""xformers' memory-efficient attention as torch.library ops, which take cu_seqlens: its own masks hold lengths that a
graph would be compiled for.

Shapes: B batch, T tokens, H heads, D head dim, N documents.
"""

import ctypes
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.attention.autograd import register_gradients
from zoo.kernels.attention.layout import aligned

__all__ = ["attention", "attention_backward", "missing_xformers"]

_HINT = "pip install 'mixer-zoo[xformers]'"


@torch.compiler.assume_constant_result
def missing_xformers() -> str | None:
    """What is missing of xformers, or None."""
    return _missing()


@cache
def _missing() -> str | None:
    if find_spec("xformers") is None:
        return f"the package xformers, which is not installed: {_HINT}"
    failure = "its extension does not load"
    try:
        fmha = _fmha()
        if fmha.common._built_with_cuda and fmha.flash.FwOp.is_available():
            return None
    except (ImportError, OSError, AttributeError) as error:
        failure = str(error).partition("\n")[0]
    return f"a usable package xformers ({failure}): {_HINT}"


@cache
def _fmha() -> Any:
    """The module of xformers; before it what its extension needs beside a torch of CUDA 13, the runtime of CUDA 12."""
    try:
        runtime = files("nvidia-cuda-runtime-cu12") or ()
    except PackageNotFoundError:
        runtime = ()
    for file in runtime:
        if file.name == "libcudart.so.12":
            ctypes.CDLL(str(file.locate()))
    from xformers.ops import fmha  # pyright: ignore[reportMissingImports]

    return fmha


def _bias(seq_len: int, cu_seqlens: Tensor | None, window: int | None) -> Any:
    """What a token sees; of documents nothing but their ends on the device is read."""
    masks = _fmha().attn_bias
    if cu_seqlens is None:
        if window is None:
            return masks.LowerTriangularMask()
        return masks.LowerTriangularFromBottomRightLocalAttentionMask(window)
    lengths = masks._SeqLenInfo(seqstart=cu_seqlens.int(), max_seqlen=seq_len, min_seqlen=0, seqstart_py=[0, seq_len])
    if window is None:
        return masks.BlockDiagonalCausalMask(q_seqinfo=lengths, k_seqinfo=lengths)
    return masks.BlockDiagonalCausalLocalAttentionMask(q_seqinfo=lengths, k_seqinfo=lengths, _window_size=window)


@torch.library.custom_op("zoo::attention_xformers", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention.

    Args:
        q: [B, T, H, D], bf16 or fp16, like the others.
        k: [B, T, H, D].
        v: [B, T, H, D].
        cu_seqlens: [N + 1], or None.
        window: keys that a token sees, itself included; None for all.
        scale: of the logits.

    Returns:
        o [B, T, H, D], and the log-sum-exp of each row's logits, [B, H, T] fp32.
    """
    fmha = _fmha()
    q, k, v = aligned(q), aligned(k), aligned(v)
    bias = _bias(q.shape[1], cu_seqlens, window)
    o, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias, scale=scale, op=fmha.flash.FwOp)
    return o.contiguous(), lse.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, seq_len, heads, _dim = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, seq_len, dtype=torch.float32)


@torch.library.custom_op(
    "zoo::attention_xformers_backward", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,)
)
def attention_backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    o: Tensor,
    lse: Tensor,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from that of o."""
    fmha = _fmha()
    grad_o, q, k, v = (aligned(x) for x in (grad_o, q, k, v))
    bias = _bias(q.shape[1], cu_seqlens, window)
    grads = fmha.memory_efficient_attention_backward(grad_o, o, lse, q, k, v, bias, scale=scale, op=fmha.flash.BwOp)
    grad_q, grad_k, grad_v = (x.contiguous() for x in grads)
    return grad_q, grad_k, grad_v


register_gradients(attention, attention_backward)
