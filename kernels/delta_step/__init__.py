"""One token of a layer with the delta rule: its short convolution, its maps and the rule itself; the public function.

Shapes: B rows, C channels, K taps, H query heads, G key/value heads, d_k and d_v their sizes.
"""

import torch
from torch import Tensor

from zoo.kernels.checks import check_shape, check_tensors
from zoo.kernels.delta_step import triton_ops
from zoo.kernels.delta_step.composed import delta_step_composed
from zoo.kernels.precision import precise_dtype
from zoo.kernels.triton_support import missing_for_heads

__all__ = ["delta_step"]

_IMPLS = ("auto", "torch", "triton")
_MAX_TAPS = 16  # that the kernel has in a row


@torch.no_grad()
def delta_step(
    x: Tensor,
    weight: Tensor,
    taps: Tensor,
    start: Tensor,
    state: Tensor,
    logits: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    g: Tensor | None = None,
    strength: float = 1.0,
    qk_l2norm: bool = False,
    impl: str = "auto",
) -> Tensor:
    """One more token of each row: convolution, SiLU, L2 norm, beta, and the delta rule (arXiv 2406.06484, 2412.06464).

    Each row's channels, convolved with the K - 1 tokens before, are q, k and v one after another::

        q, k, v = SiLU(bias + sum_{j < K} weight_j x_{t-j})        beta = strength * sigmoid(logits)
        S_t = exp(g) (I - beta k k^T) S_{t-1} + beta k v^T         o = d_k^-1/2 S_t^T q

    The taps and the state are updated in place. For decoding: no gradients.

    Args:
        x: [B, C], C = H d_k + G d_k + G d_v, floating point, the last dimension dense; rows may be apart.
        weight: [K, C]: weight_0 is that of the token itself.
        taps: [B, K, C], contiguous: token p of a row is in slot p mod K; zeros before the first.
        start: [B] int64, how many tokens each row has seen.
        state: [B, G, d_k, d_v], contiguous, in float32 (float64 for float64 x).
        logits: [B, G]; without them beta is ``strength``.
        bias: [C]; none if None.
        g: [B, G], the log of the decay; none if None.
        strength: the most that beta can be.
        qk_l2norm: whether q and k are divided by sqrt(|x|^2 + 1e-6) over d_k.
        impl: "triton" (CUDA; bf16, fp16 or fp32; K up to 16, d_k and d_v up to 256; 227 KiB of shared memory, as Hopper
            has), one launch; "torch", the separate operations; or "auto": Triton where it can. An explicit choice never
            falls back.

    Returns:
        o [B, H, d_v] in the dtype of x.

    Raises:
        ValueError: an argument is not as above; the message names it, what was expected and what came.
    """
    if impl not in _IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(map(repr, _IMPLS))}, got {impl!r}")
    _check(x, weight, taps, start, state, logits, bias, g)
    missing = _missing(x, weight, state)
    if impl == "triton" and missing is not None:
        raise ValueError(f"impl: 'triton' needs {missing}")
    form = delta_step_composed if impl == "torch" or missing is not None else triton_ops.delta_step
    return form(x, weight, taps, start, state, logits, bias, g, float(strength), qk_l2norm)


def _missing(x: Tensor, weight: Tensor, state: Tensor) -> str | None:
    """What a call lacks for Triton, or None."""
    missing = missing_for_heads(x.device, x.dtype, "x", d_k=state.shape[2], d_v=state.shape[3])
    if missing is not None:
        return missing
    return f"K of at most {_MAX_TAPS}, got {weight.shape[0]}" if weight.shape[0] > _MAX_TAPS else None


def _check(
    x: Tensor,
    weight: Tensor,
    taps: Tensor,
    start: Tensor,
    state: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    g: Tensor | None,
) -> None:
    if x.ndim != 2 or 0 in x.shape or x.stride(1) != 1:
        raise ValueError(f"x: expected [B, C] with dense rows, got {list(x.shape)} with strides {list(x.stride())}")
    batch, channels = x.shape
    if weight.ndim != 2 or not weight.shape[0]:
        raise ValueError(f"weight: expected [K, C] with K >= 1, got {list(weight.shape)}")
    size = weight.shape[0]
    check_shape("weight", "[K, C]", weight, (size, channels))
    check_shape("taps", "[B, K, C]", taps, (batch, size, channels))
    check_shape("start", "[B]", start, (batch,))
    if start.dtype != torch.int64:
        raise ValueError(f"start: expected int64, got {start.dtype}")
    if state.ndim != 4 or state.shape[0] != batch or 0 in state.shape:
        raise ValueError(f"state: expected [B, G, d_k, d_v] with B = {batch}, got {list(state.shape)}")
    _, groups, key_dim, value_dim = state.shape
    queries = channels - groups * (key_dim + value_dim)
    if queries < 1 or queries % (groups * key_dim):
        raise ValueError(
            f"x: expected C = H d_k + G d_k + G d_v, G dividing H, for G = {groups}, d_k = {key_dim}, "
            f"d_v = {value_dim}, got {channels}"
        )
    dtype = precise_dtype(x.dtype)
    if state.dtype != dtype or not state.is_contiguous():
        raise ValueError(f"state: expected contiguous {dtype}, got {state.dtype} with strides {list(state.stride())}")
    if not taps.is_contiguous():
        raise ValueError(f"taps: expected contiguous, got strides {list(taps.stride())}")
    for name, given in (("logits", logits), ("g", g)):
        if given is not None:
            check_shape(name, "[B, G]", given, (batch, groups))
    if bias is not None:
        check_shape("bias", "[C]", bias, (channels,))
    floating = {"x": x, "weight": weight, "taps": taps, "state": state, "logits": logits, "bias": bias, "g": g}
    check_tensors(floating, {"start": start})
