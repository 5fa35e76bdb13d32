"""The Deltaformer (arXiv 2505.19488): the public functions of its two stages, write and read.

Shapes: B batch, T tokens, S tokens of a prefix, H heads of w, G key/value heads, D and D_v their sizes, N documents.
"""

from typing import Literal

import torch
from torch import Tensor

from zoo.kernels.checks import check_shape, check_tensors
from zoo.kernels.deltaformer import ops, triton_ops
from zoo.kernels.deltaformer.chunk import CHUNK
from zoo.kernels.deltaformer.read import deltaformer_read
from zoo.kernels.deltaformer.reference import deltaformer_write_reference
from zoo.kernels.kappa import Kappa, check_kappa, default_scale
from zoo.kernels.packing import can_read_values, check_cu_seqlens
from zoo.kernels.precision import precise_dtype
from zoo.kernels.triton_support import missing_for_heads

__all__ = ["CHUNK", "Kappa", "default_scale", "deltaformer_read", "deltaformer_write"]

_Form = Literal["reference", "torch", "triton"]
_IMPLS = ("auto", "reference", "torch", "triton")


def deltaformer_write(
    w: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    kappa1: str = "softmax",
    round_decimals: int = 0,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    prefix_k: Tensor | None = None,
    prefix_u: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    bounded: bool = False,
    impl: str = "auto",
) -> Tensor:
    """What each token adds to the memory: its value, less what the memory already returns for its key.

    Per head, with A_ti = kappa1(scale * w_t . k_i) over the earlier tokens i < t alone (arXiv 2505.19488)::

        u_t = alpha_t v_t - beta_t sum_{i<t} A_ti u_i        that is        U = (I + diag(beta) A)^-1 diag(alpha) V

    softmax is normalised over i < t: with |beta| <= 1, |u_t| <= (t + 1) max|alpha v|. The other kernels are not, and u
    can grow exponentially with t and overflow where w_t meets many keys that resemble it. L2-normalise w and k, for a
    start; even then "exp", for which two equal unit vectors weigh e, grows with beta near 1, and "round" with vectors
    that rotary positions have turned.

    Hidden values are multiplied by 0, which does not stop inf or NaN: these spread to earlier tokens and to other
    documents of a packed row. Differentiable, once, in w, k, v, alpha, beta, prefix_k and prefix_u. w, k and the prefix
    are cast to the dtype of v. Memory is linear in T. PyTorch computes half-precision inputs in float32, and holds a
    few strips [B, H, 64, S + T] beside the inputs in that dtype and the outputs.

    Triton multiplies them as they are and adds in float32. In half precision the weights, times beta if they are not
    softmax's, the gradients of the logits and the inverses of 64 x 64 blocks must fit the dtype; softmax's inverses do
    where |beta| <= 1, and take less time where that is certain. For the backward it keeps, beside the inputs and u, for
    softmax as much as u again, and at most 132 bytes per head and row of its blocks of 64 or less, the last of each
    document filled up: with N documents up to T + 63 N rows. Two of its runs are bit-identical, a row of a batch is
    what it is alone, and a document of a packed row what it is in a row of its own.

    Args:
        w: [B, T, H, D], no size 0, what is compared with the keys; any floating-point dtype and strides, like all.
        k: [B, T, G, D], G dividing H: head h of w is compared with the keys of head h // (H // G).
        v: [B, T, G, D_v], no size 0.
        alpha: [B, T, H], 1 if None.
        beta: [B, T, H], 1 if None.
        kappa1: "softmax", "linear", "relu", "exp" or "round".
        round_decimals: that "round" keeps, from 0 to 6, else 0; its gradient is that of "linear" (straight-through).
        scale: of the logits; D^-1/2 for softmax and 1 for the others if None.
        cu_seqlens: [N + 1] int32 or int64 for packed sequences, with B = 1: document n is the tokens from cu_seqlens[n]
            to cu_seqlens[n + 1], so the first is 0, the last T, and none decreases. Values are checked in eager calls
            on the CPU alone; others may make Triton wait for what never comes, for seconds, and stop with a CUDA error.
            In PyTorch keys of other documents are computed and masked: a row costs its whole length.
        prefix_k: [B, S, G, D], keys of tokens before these, as in decoding; not with cu_seqlens.
        prefix_u: [B, S, H, D_v], what this function returned for them.
        prefix_lengths: [B] int32 or int64, how many of the S exist in each row, from the first on; None for all. What
            stands in the places of the others has no influence, but must be finite.
        bounded: that no |beta| exceeds 1, if the caller is certain; without beta it is.
        impl: "triton" (CUDA; bf16, fp16 or fp32; D and D_v up to 256; 227 KiB of shared memory, as Hopper has; no
            prefix), "torch" (chunks in PyTorch), "reference" (token by token), or "auto": Triton where it can, else
            PyTorch. An explicit choice never falls back.

    Returns:
        u [B, T, H, D_v] in the dtype of v.

    Raises:
        ValueError: an argument is not as above; the message names it, what was expected and what came.
    """
    if impl not in _IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(map(repr, _IMPLS))}, got {impl!r}")
    check_kappa("kappa1", kappa1, round_decimals, scale)
    _check(w, k, v, alpha, beta)
    _check_before(w, k, v, cu_seqlens, prefix_k, prefix_u, prefix_lengths)
    form = _choose(impl, v, w.shape[-1], prefix_k)
    dtype, precise, bounded = v.dtype, precise_dtype(v.dtype), bounded or beta is None
    w, k = w.to(dtype), k.to(dtype)  # autocast hands over mixed dtypes
    alpha, beta = (w.new_ones(w.shape[:3], dtype=precise) if x is None else x.to(precise) for x in (alpha, beta))
    factor: float = default_scale(kappa1, w.shape[-1]) if scale is None else scale
    if form == "triton":
        tensors = w, k, v, alpha, beta, cu_seqlens
        save = torch.is_grad_enabled() and any(x.requires_grad for x in (w, k, v, alpha, beta))
        return triton_ops.deltaformer_write(*tensors, kappa1, round_decimals, factor, bounded, save)[0]
    if prefix_k is None or prefix_u is None:
        prefix_u = v.new_empty(w.shape[0], 0, w.shape[2], v.shape[3])
    else:
        k, prefix_u = torch.cat([prefix_k.to(dtype), k], 1), prefix_u.to(dtype)
    inputs = w, k, v, alpha, beta, prefix_u, prefix_lengths, cu_seqlens, kappa1, round_decimals, factor
    return deltaformer_write_reference(*inputs) if form == "reference" else ops.deltaformer_write(*inputs)[0]


def _choose(impl: str, v: Tensor, head_dim: int, prefix_k: Tensor | None) -> _Form:
    """The form that computes a call.

    Raises:
        ValueError: Triton is asked for, and cannot.
    """
    if impl == "reference" or impl == "torch":
        return impl
    missing = "a call without a prefix"
    if prefix_k is None:
        missing = missing_for_heads(v.device, v.dtype, D=head_dim, D_v=v.shape[-1])
    if missing is None:
        return "triton"
    if impl == "triton":
        raise ValueError(f"impl: 'triton' needs {missing}")
    return "torch"


def _check(w: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None) -> None:
    if w.ndim != 4 or 0 in w.shape:
        raise ValueError(f"w: expected [B, T, H, D], no size 0, got {list(w.shape)}")
    batch, seq_len, num_heads, head_dim = w.shape
    for name, letters, x in (("k", "[B, T, G, D]", k), ("v", "[B, T, G, D_v]", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}: expected {letters}, got {list(x.shape)}")
    groups = k.shape[2]
    check_shape("k", "[B, T, G, D]", k, (batch, seq_len, groups, head_dim))
    if groups < 1 or num_heads % groups:
        raise ValueError(f"k: expected a number of heads G that divides the H = {num_heads} of w, got {groups}")
    check_shape("v", "[B, T, G, D_v]", v, (batch, seq_len, groups, v.shape[3]))
    if v.shape[3] < 1:
        raise ValueError(f"v: expected [B, T, G, D_v], no size 0, got {list(v.shape)}")
    for name, x in (("alpha", alpha), ("beta", beta)):
        if x is not None:
            check_shape(name, "[B, T, H], H the heads of w,", x, (batch, seq_len, num_heads))
    check_tensors({"w": w, "k": k, "v": v, "alpha": alpha, "beta": beta}, {})


def _check_before(
    w: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    prefix_k: Tensor | None,
    prefix_u: Tensor | None,
    prefix_lengths: Tensor | None,
) -> None:
    batch, seq_len, num_heads, head_dim = w.shape
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch_size=batch, length=seq_len, device=w.device)
    if (prefix_k is None) != (prefix_u is None):
        raise ValueError("prefix_k, prefix_u: expected both or neither, got one")
    if prefix_k is None or prefix_u is None:
        if prefix_lengths is not None:
            raise ValueError("prefix_lengths: expected only with prefix_k and prefix_u")
        return
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens: expected no prefix with packed sequences")
    if prefix_k.ndim != 4:
        raise ValueError(f"prefix_k: expected [B, S, G, D], got {list(prefix_k.shape)}")
    size = prefix_k.shape[1]
    check_shape("prefix_k", "[B, S, G, D]", prefix_k, (batch, size, k.shape[2], head_dim))
    check_shape("prefix_u", "[B, S, H, D_v]", prefix_u, (batch, size, num_heads, v.shape[3]))
    check_tensors({"w": w, "prefix_k": prefix_k, "prefix_u": prefix_u}, {"prefix_lengths": prefix_lengths})
    if prefix_lengths is None:
        return
    if prefix_lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"prefix_lengths: expected int32 or int64, got {prefix_lengths.dtype}")
    check_shape("prefix_lengths", "[B]", prefix_lengths, (batch,))
    if can_read_values(prefix_lengths) and not 0 <= int(prefix_lengths.min()) <= int(prefix_lengths.max()) <= size:
        raise ValueError(f"prefix_lengths: expected from 0 to S = {size}, got {prefix_lengths.tolist()}")
