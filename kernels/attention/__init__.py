"""Causal softmax attention, full or in a sliding window, dense or packed: the public function.

Shapes: B batch, T sequence length, H heads, G key/value heads, D head dim, N documents.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zoo.kernels.attention import triton_ops
from zoo.kernels.attention.mask import document_ids, visible
from zoo.kernels.attention.reference import attention_reference
from zoo.kernels.checks import check_mask
from zoo.kernels.packing import check_cu_seqlens
from zoo.kernels.triton_support import missing_for_heads

__all__ = ["attention", "document_ids", "visible"]

_IMPLS = ("auto", "sdpa", "triton", "reference")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Causal attention o_t = sum_i softmax_i(scale * q_t . k_i) v_i over the keys i <= t that t sees.

    Hidden values are multiplied by 0, which does not stop inf or NaN: these spread to earlier tokens and to other
    documents of a packed row. With a window or packed documents "sdpa" holds a mask of every pair of tokens.

    Args:
        q: [B, T, H, D].
        k: [B, T, G, D], G dividing H: query head h reads key/value head h // (H / G).
        v: [B, T, G, D_v].
        window: number of visible keys, the token itself included; None for all.
        cu_seqlens: [N + 1] integers, 0 first and T last, when B = 1 row holds N packed documents.
        mask: bool [B or 1, 1, T, T_k], True where visible, when the caller has it already (one for all layers); then
            the number of keys T_k is free, and ``window`` and ``cu_seqlens`` must not be given.
        scale: factor of the logits, D^-1/2 if None.
        impl: "auto" (today always "sdpa"), "sdpa" (torch's scaled_dot_product_attention), "triton" (CUDA; bf16, fp16 or
            fp32; D and D_v up to 256; 227 KiB of shared memory, as Hopper has; scale > 0; no mask) or "reference".

    Returns:
        [B, T, H, D_v] in the dtype of v, to which mixed input dtypes are cast.

    Raises:
        ValueError: an argument is not as above.
    """
    _check(q, k, v, window, cu_seqlens, mask, impl)
    q, k = q.to(v.dtype), k.to(v.dtype)
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    if impl == "triton":
        missing = _missing_for_triton(q, v, mask, factor)
        if missing is not None:
            raise ValueError(f"impl: 'triton' needs {missing}")
        save = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return triton_ops.attention(q, k, v, cu_seqlens, window, factor, save)[0]
    if mask is None and (window is not None or cu_seqlens is not None or impl == "reference"):
        order = torch.arange(q.shape[1], device=q.device)
        documents = None if cu_seqlens is None else document_ids(cu_seqlens, q.shape[1])
        mask = visible(order, order, window=window, documents=documents)[None, None]
    if impl == "reference":
        assert mask is not None
        return attention_reference(q, k, v, mask, factor)
    return _sdpa(q, k, v, mask, factor)


def _missing_for_triton(q: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> str | None:
    if mask is not None:
        return "a call without a mask"
    if scale <= 0:
        return f"a positive scale, got {scale}"
    return missing_for_heads(v, D=q.shape[-1], D_v=v.shape[-1])


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if q.shape[2] != k.shape[2]:  # expanded: CUDA's only fused kernel that takes a mask does not know grouped heads
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    o = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return o.transpose(1, 2).to(v.dtype)  # autocast returns its own dtype


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    impl: str,
) -> None:
    if impl not in _IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(_IMPLS)}, got {impl!r}")
    if q.ndim != 4:
        raise ValueError(f"q: expected [B, T, H, D], got {list(q.shape)}")
    B, T, H, D = q.shape
    if mask is not None:
        check_mask(mask, B, T)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_floating_point():
            raise ValueError(f"{name}: expected a floating-point dtype, got {x.dtype}")
    keys = T if mask is None else mask.shape[-1]
    if k.ndim != 4 or k.shape[0] != B or k.shape[1] != keys or k.shape[3] != D or not k.shape[2] or H % k.shape[2]:
        raise ValueError(f"k: expected [{B}, {keys}, G, {D}] with G dividing {H}, got {list(k.shape)}")
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: expected {[*k.shape[:3], 'D_v']}, got {list(v.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window: expected at least 1 visible key, got {window}")
    if mask is not None and (window is not None or cu_seqlens is not None):
        raise ValueError("mask: it already says what is visible; give neither window nor cu_seqlens with it")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch_size=B, length=T, device=q.device)
