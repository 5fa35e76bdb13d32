"""Causal softmax attention, full or in a sliding window, dense or packed: the public functions.

Shapes: B batch, T sequence length, H heads, G key/value heads, D and D_v their sizes, N documents.
"""

from math import inf

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zoo.kernels.attention import triton_ops, xformers_ops
from zoo.kernels.attention.backends import BACKENDS, Call, MaskKind, check_impl, choose, mask_kind
from zoo.kernels.attention.flash import flash_attention
from zoo.kernels.attention.flex import Blocks, find_blocks, flexible_attention
from zoo.kernels.attention.layout import aligned, whole_heads, with_contiguous_gradient
from zoo.kernels.attention.mask import document_ids, visible
from zoo.kernels.attention.reference import attention_reference
from zoo.kernels.attention.schedule import WIDEST
from zoo.kernels.checks import check_mask, check_tensors
from zoo.kernels.packing import check_cu_seqlens

__all__ = [
    "BACKENDS",
    "Call",
    "Mask",
    "MaskKind",
    "attention",
    "attention_mask",
    "document_ids",
    "make_mask",
    "mask_kind",
    "visible",
]

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

    What is hidden is multiplied by 0, which does not stop inf or NaN: in q, k, v or the upstream gradient of a token
    these may spread to outputs and gradients of others, also of other documents of a packed row.

    Args:
        q: [B, T, H, D].
        k: [B, T, G, D], G dividing H: query head h reads key/value head h // (H / G).
        v: [B, T, G, D_v].
        window: number of visible keys, the token itself included; None for all.
        cu_seqlens: [N + 1] integers, 0 first and T last, when B = 1 row holds N packed documents.
        mask: what `attention_mask` made for this window and these documents, when the caller has it already (one for
            all layers). Or any bool [B or 1, 1, T, T_k], True where visible, for "sdpa" and "reference": it alone
            says what is visible, and k and v have T_k tokens. ``window`` and ``cu_seqlens`` must not be given with it.
        scale: factor of the logits, positive; D^-1/2 if None.
        impl: the backend; an explicit choice never falls back.

            - "auto": on CUDA the fastest, as measured on an H200 in bf16 (fp16 goes by that) and fp32, of those that
              can serve the call; elsewhere, and in fp64, "sdpa".
            - "sdpa": torch's scaled_dot_product_attention, on any device. With a window or packed documents it holds a
              mask of every pair of tokens. On CUDA it refuses, like "flash", "flex" and "xformers", tensors of 2^31
              numbers or more (with a key/value head for each query head), for which PyTorch's kernels may give wrong
              gradients.
            - "flash": FlashAttention 2 as torch brings it (CUDA; bf16 or fp16; D = D_v, a multiple of 8 up to 256).
            - "flex": FlexAttention, compiled (CUDA; bf16, fp16 or fp32; D and D_v from 16 to 256).
            - "xformers": the package of that name, like "flash".
            - "triton": this library's kernels (CUDA; bf16, fp16 or fp32; D and D_v up to 256; 227 KiB of shared memory,
              as Hopper has). No second derivatives, like "xformers".
            - "reference": every weight, in float32 or float64.

    Returns:
        [B, T, H, D_v] in the dtype of v, to which mixed input dtypes are cast.

    Raises:
        ValueError: an argument is not as above, or the backend cannot serve the call.
    """
    check_impl(impl)
    _check(q, k, v, mask, scale)
    _check_visible(q.shape[1], window, cu_seqlens, batch_size=q.shape[0], device=q.device)
    if mask is not None and (window is not None or cu_seqlens is not None):
        raise ValueError("mask: it already says what is visible; give neither window nor cu_seqlens with it")
    window = None if window is None else min(window, WIDEST)
    q, k = q.to(v.dtype), k.to(v.dtype)
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    numel = q.shape[0] * max(q.shape[1], k.shape[1]) * q.shape[2] * max(q.shape[3], v.shape[3])
    call = _call((q.shape[-1], v.shape[-1]), v.device, v.dtype, window, cu_seqlens, numel)
    backend = choose(_fit(impl, mask), call)
    if backend == "triton":
        save = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return triton_ops.attention(q, k, v, cu_seqlens, window, factor, save)[0]
    if backend == "flash":
        return flash_attention(*whole_heads(q, k, v), cu_seqlens, window, factor)
    if backend == "xformers":
        return xformers_ops.attention(*whole_heads(q, k, v), cu_seqlens, window, factor)[0]
    if mask is None:
        mask = make_mask(mask_kind(backend, call), q.shape[1], window, cu_seqlens, q.device)
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

    It does not know how large the calls are: "auto" is here what it is for all but the largest.

    Args:
        seq_len: T.
        window: as in `attention`, like ``cu_seqlens`` and ``impl``.
        cu_seqlens: likewise.
        head_dims: D and D_v.
        device: of the tensors.
        dtype: of the values.
        impl: the backend; whether it can serve such calls is for them to find out.

    Returns:
        Something for the argument ``mask``, or None where the backend needs nothing: then ``window`` and ``cu_seqlens``
        say all.

    Raises:
        ValueError: an argument is not as above.
    """
    check_impl(impl)
    _check_visible(seq_len, window, cu_seqlens, batch_size=1, device=device)
    kind = mask_kind(impl, _call(head_dims, device, dtype, window, cu_seqlens))
    return make_mask(kind, seq_len, window, cu_seqlens, device)


def make_mask(
    kind: MaskKind | None, seq_len: int, window: int | None, cu_seqlens: Tensor | None, device: torch.device
) -> Mask | None:
    """A mask of a kind (see `mask_kind`), arguments as in `attention_mask`."""
    if kind == "blocks":
        return find_blocks(seq_len, window, cu_seqlens, device)
    if kind is None:
        return None
    order = torch.arange(seq_len, device=device)
    documents = None if cu_seqlens is None else document_ids(cu_seqlens, seq_len)
    return visible(order, order, window=window, documents=documents)[None, None]


def _call(
    head_dims: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    window: int | None,
    cu_seqlens: Tensor | None,
    numel: int = 0,
) -> Call:
    return Call(device, dtype, *head_dims, windowed=window is not None, packed=cu_seqlens is not None, numel=numel)


def _fit(impl: str, mask: Mask | None) -> str:
    """The backend that was asked for, or for "auto" one that can read the mask, if there is one.

    Raises:
        ValueError: the backend cannot read it.
    """
    if mask is None:
        return impl
    readers, given = (("flex",), "blocks") if isinstance(mask, Blocks) else (("sdpa", "reference"), "a tensor")
    if impl not in ("auto", *readers):
        raise ValueError(f"mask: {impl!r} cannot read {given}, expected impl auto, {' or '.join(readers)}")
    return readers[0] if impl == "auto" else impl


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    q, k, v = whole_heads(q, k, v)  # CUDA's only fused kernel that takes a mask does not know grouped heads
    on_cuda = q.device.type == "cuda"  # where PyTorch gives cuDNN also what it cannot read
    if on_cuda:
        q, k, v = aligned(q), aligned(k), aligned(v)
    o = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, is_causal=mask is None, scale=scale
    )
    o = o.transpose(1, 2).to(v.dtype)  # autocast returns its own dtype
    return with_contiguous_gradient(o) if on_cuda else o


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None) -> None:
    for name, letters, x in (("q", "[B, T, H, D]", q), ("k", "[B, T, G, D]", k), ("v", "[B, T, G, D_v]", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: expected a tensor {letters}, got {x!r}")
    if q.ndim != 4 or 0 in q.shape[2:]:
        raise ValueError(f"q: expected [B, T, H, D], H and D not 0, got {list(q.shape)}")
    B, T, H, D = q.shape
    keys = T
    if isinstance(mask, Tensor):
        check_mask(mask, B, T)
        keys = mask.shape[-1]
    elif isinstance(mask, Blocks):
        device = mask.partly[0].device
        if mask.seq_len != T or device != q.device:
            raise ValueError(f"mask: expected blocks of T = {T} on {q.device}, got {mask.seq_len} on {device}")
    elif mask is not None:
        raise ValueError(f"mask: expected a bool tensor, or what attention_mask returns, got {mask!r}")
    check_tensors({"q": q, "k": k, "v": v}, {"mask": mask if isinstance(mask, Tensor) else None})
    if k.ndim != 4 or k.shape[0] != B or k.shape[1] != keys or k.shape[3] != D or not k.shape[2] or H % k.shape[2]:
        raise ValueError(f"k: expected [{B}, {keys}, G, {D}] with G dividing {H}, got {list(k.shape)}")
    if v.ndim != 4 or v.shape[:3] != k.shape[:3] or not v.shape[3]:
        raise ValueError(f"v: expected {[*k.shape[:3], 'D_v']}, D_v not 0, got {list(v.shape)}")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < inf):
        raise ValueError(f"scale: expected a positive number, got {scale!r}")


def _check_visible(
    seq_len: int, window: int | None, cu_seqlens: Tensor | None, *, batch_size: int, device: torch.device
) -> None:
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window: expected a whole number of at least 1, got {window!r}")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch_size=batch_size, length=seq_len, device=device)
