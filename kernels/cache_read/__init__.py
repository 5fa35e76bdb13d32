"""What one new token of each row reads from caches of past tokens: the public function. Validation, then dispatch.

Shapes: B rows, S slots of a cache, H query heads, G key heads, G_v value heads, D and D_v their sizes.
"""

from typing import Literal

import torch
from torch import Tensor

from zoo.kernels.cache_read.masked import read_cache_masked
from zoo.kernels.cache_read.reference import read_cache_reference
from zoo.kernels.cache_read.splits import read_cache_in_splits
from zoo.kernels.checks import check_shape, check_tensors
from zoo.kernels.kappa import check_kappa, default_scale
from zoo.kernels.triton_support import missing_for_heads

__all__ = ["read_cache"]

_Form = Literal["reference", "torch", "triton"]
_IMPLS = ("auto", "reference", "torch", "triton")
_FORMS = {"reference": read_cache_reference, "torch": read_cache_masked, "triton": read_cache_in_splits}


def read_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor,
    *,
    kappa: str = "softmax",
    round_decimals: int = 0,
    scale: float | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """What one query per row and head reads from the slots of its row, which stand in any order.

    Per row b and query head h, over the slots s < counts_b alone (softmax normalised over them)::

        o_h = sum_s kappa(scale * q_h . k_s) v_s        log_sum_h = log sum_s exp(scale * q_h . k_s)

    With softmax, what is read here and what is read elsewhere, of a token that is not in the cache yet, join by their
    log_sum; with the other kernels they are added. A row that has no slot reads 0, and its log_sum is -inf. Slots from
    counts on have no influence, whatever they hold. For inference: Triton has no gradients. No form but the reference
    reads the values of counts on the host, so a captured CUDA graph may be replayed after they have changed.

    PyTorch computes in the dtype of the results, and holds the weights, [B, H, S], and copies of the caches in that
    dtype. Triton multiplies in the dtype of v and adds in float32; in float16 the weights of linear, relu and round
    must fit it. It cuts a row's slots into as many splits as B, the heads, S and the device ask for: a row's last bits
    may depend on the batch it stands in.

    Args:
        q: [B, H, D], no size 0, floating point, any strides, like k and v.
        k: [B, S, G, D], G dividing G_v: query head h is compared with the keys of head h // (H // G).
        v: [B, S, G_v, D_v], G_v dividing H: query head h reads the values of head h // (H // G_v). q and k are cast to
            the dtype of v.
        counts: [B] int32 or int64, how many slots of each row are there, from the first on; S of them if it is more.
            Values are not checked.
        kappa: "softmax", "linear", "relu", "exp" or "round".
        round_decimals: that "round" keeps, from 0 to 6, else 0.
        scale: of the logits; D^-1/2 for softmax and 1 for the others if None.
        impl: "triton" (CUDA; bf16, fp16 or fp32; D and D_v up to 256; 227 KiB of shared memory, as Hopper has),
            "torch" (plain PyTorch on any device), "reference" (row by row), or "auto": Triton where it can, else
            PyTorch. An explicit choice never falls back.

    Returns:
        o [B, H, D_v] and log_sum [B, H], in float32 (float64 for float64 v); log_sum is None unless kappa is softmax.

    Raises:
        ValueError: an argument is not as above; the message names it, what was expected and what came.
    """
    if impl not in _IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(map(repr, _IMPLS))}, got {impl!r}")
    check_kappa("kappa", kappa, round_decimals, scale)
    _check(q, k, v, counts)
    form = _choose(impl, v, q.shape[-1])
    factor: float = default_scale(kappa, q.shape[-1]) if scale is None else scale
    q, k = q.to(v.dtype), k.to(v.dtype)  # autocast hands over mixed dtypes
    return _FORMS[form](q, k, v, counts, kappa, round_decimals, factor)


def _choose(impl: str, v: Tensor, head_dim: int) -> _Form:
    """The form that computes a call.

    Raises:
        ValueError: Triton is asked for, and cannot.
    """
    if impl == "reference" or impl == "torch":
        return impl
    missing = missing_for_heads(v.device, v.dtype, D=head_dim, D_v=v.shape[-1])
    if missing is None:
        return "triton"
    if impl == "triton":
        raise ValueError(f"impl: 'triton' needs {missing}")
    return "torch"


def _check(q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> None:
    if q.ndim != 3 or 0 in q.shape:
        raise ValueError(f"q: expected [B, H, D], no size 0, got {list(q.shape)}")
    for name, letters, x in (("k", "[B, S, G, D]", k), ("v", "[B, S, G_v, D_v]", v)):
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(f"{name}: expected {letters}, no size 0, got {list(x.shape)}")
    batch, num_heads, head_dim = q.shape
    key_heads, value_heads = k.shape[2], v.shape[2]
    check_shape("k", "[B, S, G, D]", k, (batch, k.shape[1], key_heads, head_dim))
    check_shape("v", "[B, S, G_v, D_v]", v, (batch, k.shape[1], value_heads, v.shape[3]))
    if value_heads % key_heads:
        raise ValueError(f"k: expected a number of heads G that divides the G_v = {value_heads} of v, got {key_heads}")
    if num_heads % value_heads:
        raise ValueError(f"v: expected a number of heads G_v that divides the H = {num_heads} of q, got {value_heads}")
    check_shape("counts", "[B]", counts, (batch,))
    if counts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"counts: expected int32 or int64, got {counts.dtype}")
    check_tensors({"q": q, "k": k, "v": v}, {"counts": counts})
