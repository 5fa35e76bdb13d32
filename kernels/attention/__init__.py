"""Causal softmax attention, full or in a sliding window, dense or packed: the public functions.

Shapes: B batch, T sequence length, H heads, G key/value heads, D and D_v their sizes, N documents.
"""

from types import NoneType

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zoo.kernels.attention import triton_ops, xformers_ops
from zoo.kernels.attention.backends import BACKENDS, Call, choose
from zoo.kernels.attention.flash import flash_attention, flash_inputs
from zoo.kernels.attention.flex import Blocks, find_blocks, flexible_attention
from zoo.kernels.attention.mask import document_ids, visible
from zoo.kernels.attention.reference import attention_reference
from zoo.kernels.checks import check_mask, check_tensors
from zoo.kernels.packing import check_cu_seqlens

__all__ = ["BACKENDS", "Mask", "attention", "attention_mask", "document_ids", "visible"]

_IMPLS = ("auto", *BACKENDS, "reference")

Mask = Tensor | Blocks


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Causal attention o_t = sum_i softmax_i(scale * q_t . k_i) v_i over the keys i <= t that t sees.

    Hidden values are multiplied by 0, which does not stop inf or NaN: these spread to earlier tokens and to other
    documents of a packed row.

    Args:
        q: [B, T, H, D].
        k: [B, T, G, D], G dividing H: query head h reads key/value head h // (H / G).
        v: [B, T, G, D_v].
        window: number of visible keys, the token itself included; None for all.
        cu_seqlens: [N + 1] integers, 0 first and T last, when B = 1 row holds N packed documents.
        mask: what `attention_mask` made for this window and these documents, when the caller has it already (one for
            all layers). Or any bool [B or 1, 1, T, T_k], True where visible, for "sdpa" and "reference": then
            the number of keys T_k is free. ``window`` and ``cu_seqlens`` must not be given with it.
        scale: factor of the logits, D^-1/2 if None.
        impl: the backend; an explicit choice never falls back.

            - "auto": today always "sdpa".
            - "sdpa": torch's scaled_dot_product_attention, on any device. With a window or packed documents it holds a
              mask of every pair of tokens.
            - "flash": FlashAttention 2 as torch brings it (CUDA; bf16 or fp16; D = D_v, a multiple of 8 up to 256).
            - "flex": FlexAttention, compiled (CUDA; bf16, fp16 or fp32; D and D_v from 16).
            - "xformers": the package of that name, like "flash".
            - "triton": this library's kernels (CUDA; bf16, fp16 or fp32; D and D_v up to 256; 227 KiB of shared memory,
              as Hopper has; scale > 0).
            - "reference": every weight, in float32 or float64.

    Returns:
        [B, T, H, D_v] in the dtype of v, to which mixed input dtypes are cast.

    Raises:
        ValueError: an argument is not as above, or the backend cannot serve the call.
    """
    if impl not in _IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(_IMPLS)}, got {impl!r}")
    _check(q, k, v, window, cu_seqlens, mask, scale)
    q, k = q.to(v.dtype), k.to(v.dtype)
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    backend = _backend(impl, q, v, window, cu_seqlens, mask, factor)
    if backend == "triton":
        save = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return triton_ops.attention(q, k, v, cu_seqlens, window, factor, save)[0]
    if backend == "flash":
        return flash_attention(*flash_inputs(q, k, v), cu_seqlens, window, factor)
    if backend == "xformers":
        return xformers_ops.attention(*flash_inputs(q, k, v), cu_seqlens, window, factor)[0]
    if mask is None:
        mask = _make_mask(backend, q.shape[1], window, cu_seqlens, q.device)
    if backend == "flex":
        assert isinstance(mask, Blocks)
        return flexible_attention(q, k, v, mask, factor)
    assert not isinstance(mask, Blocks)
    if backend == "reference":
        assert mask is not None
        return attention_reference(q, k, v, mask, factor)
    return _sdpa(q, k, v, mask, factor)


def attention_mask(
    seq_len: int,
    *,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    head_dims: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    impl: str = "auto",
) -> Mask | None:
    """What `attention` would make in each call to know what is visible, made once for all layers.

    Args:
        seq_len: T.
        window: as in `attention`, like ``cu_seqlens`` and ``impl``.
        cu_seqlens: likewise.
        head_dims: D and D_v.
        device: of the tensors.
        dtype: of the values.
        impl: the backend.

    Returns:
        Something for the argument ``mask``, or None where the backend needs nothing.

    Raises:
        ValueError: the backend cannot serve such calls.
    """
    call = Call(device, dtype, *head_dims, windowed=window is not None, packed=cu_seqlens is not None)
    return _make_mask(choose(impl, call), seq_len, window, cu_seqlens, device)


def _backend(
    impl: str, q: Tensor, v: Tensor, window: int | None, cu_seqlens: Tensor | None, mask: Mask | None, scale: float
) -> str:
    """Who computes a call: see `choose`."""
    if isinstance(mask, Tensor):
        allowed = "sdpa", "reference"
    elif mask is not None:
        allowed = ("flex",)
    else:
        allowed = _IMPLS
    if impl == "triton" and scale <= 0:
        raise ValueError(f"impl: 'triton' needs a positive scale, got {scale}")
    if mask is not None and impl == "auto":
        impl = allowed[0]
    if impl not in allowed:
        raise ValueError(f"impl: {impl!r} needs a call without a mask")
    call = Call(v.device, v.dtype, q.shape[-1], v.shape[-1], windowed=window is not None, packed=cu_seqlens is not None)
    return choose(impl, call)


def _make_mask(
    backend: str, seq_len: int, window: int | None, cu_seqlens: Tensor | None, device: torch.device
) -> Mask | None:
    """What a backend reads to know what is visible."""
    if backend == "flex":
        return find_blocks(seq_len, window, cu_seqlens, device)
    plain = window is None and cu_seqlens is None
    if backend == "reference" or (backend == "sdpa" and not plain):
        order = torch.arange(seq_len, device=device)
        documents = None if cu_seqlens is None else document_ids(cu_seqlens, seq_len)
        return visible(order, order, window=window, documents=documents)[None, None]
    return None


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
    mask: Mask | None,
    scale: float | None,
) -> None:
    for name, letters, x in (("q", "[B, T, H, D]", q), ("k", "[B, T, G, D]", k), ("v", "[B, T, G, D_v]", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: expected a tensor {letters}, got {x!r}")
    if q.ndim != 4:
        raise ValueError(f"q: expected [B, T, H, D], got {list(q.shape)}")
    B, T, H, D = q.shape
    keys = T
    if isinstance(mask, Tensor):
        check_mask(mask, B, T)
        keys = mask.shape[-1]
    elif not isinstance(mask, (Blocks, NoneType)):
        raise ValueError(f"mask: expected a bool tensor, or what attention_mask returns, got {mask!r}")
    check_tensors({"q": q, "k": k, "v": v}, {"mask": mask if isinstance(mask, Tensor) else None})
    if k.ndim != 4 or k.shape[0] != B or k.shape[1] != keys or k.shape[3] != D or not k.shape[2] or H % k.shape[2]:
        raise ValueError(f"k: expected [{B}, {keys}, G, {D}] with G dividing {H}, got {list(k.shape)}")
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: expected {[*k.shape[:3], 'D_v']}, got {list(v.shape)}")
    if not isinstance(scale, (int, float, NoneType)):
        raise ValueError(f"scale: expected a number, got {scale!r}")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window: expected a whole number of at least 1, got {window!r}")
    if mask is not None and (window is not None or cu_seqlens is not None):
        raise ValueError("mask: it already says what is visible; give neither window nor cu_seqlens with it")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch_size=B, length=T, device=q.device)
