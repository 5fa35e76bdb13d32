"""What computes attention, what each needs of a call, and which one "auto" is."""

from typing import Literal, NamedTuple

import torch

from zoo.kernels.attention.fastest import fastest_first
from zoo.kernels.attention.xformers_ops import missing_xformers
from zoo.kernels.triton_support import missing_for_heads

__all__ = ["BACKENDS", "IMPLS", "Call", "MaskKind", "check_impl", "choose", "mask_kind"]

BACKENDS = ("sdpa", "flash", "flex", "xformers", "triton")
IMPLS = ("auto", *BACKENDS, "reference")
MaskKind = Literal["pairs", "blocks"]

_HALVES = (torch.bfloat16, torch.float16)
_INT32 = 2**31 - 1  # above, cuDNN's gradients are wrong without a word, and the others' may read elsewhere
_FLASH_MULTIPLE, _FLASH_MAX_HEAD_DIM = 8, 256
_FLEX_HEAD_DIMS = 16, 256  # above, its kernels need more shared memory than there is


class Call(NamedTuple):
    """What decides who can compute a call, and who is fastest.

    Attributes:
        device: of the tensors.
        dtype: of the values.
        key_dim: D.
        value_dim: D_v.
        windowed: whether there is a window.
        packed: whether documents are packed.
        numel: of the largest of q, k, v and o, with a key/value head for each query head.
    """

    device: torch.device
    dtype: torch.dtype
    key_dim: int
    value_dim: int
    windowed: bool
    packed: bool
    numel: int = 0


def check_impl(impl: str) -> None:
    """Refuse what is not one of `IMPLS`.

    Raises:
        ValueError: as it says.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(IMPLS)}, got {impl!r}")


def mask_kind(impl: str, call: Call) -> MaskKind | None:
    """What is made to say what is visible: a mask of all pairs of tokens, FlexAttention's blocks, or nothing.

    Args:
        impl: one of `IMPLS`.
        call: for which.
    """
    backend = _fastest(call) if impl == "auto" else impl
    if backend == "flex":
        return "blocks"
    return "pairs" if backend == "reference" or (backend == "sdpa" and (call.windowed or call.packed)) else None


def choose(impl: str, call: Call) -> str:
    """The backend of a call, or "reference"; for "auto" the fastest that can serve it, as far as was measured.

    Args:
        impl: one of `IMPLS`.
        call: for which.

    Raises:
        ValueError: it cannot serve the call, and why.
    """
    backend = _fastest(call) if impl == "auto" else impl
    missing = _missing(backend, call)
    if missing is not None:
        raise ValueError(f"impl: {impl!r} needs {missing}")
    return backend


def _fastest(call: Call) -> str:
    """On CUDA the first of those measured that can serve the call, elsewhere "sdpa"."""
    if call.device.type != "cuda":
        return "sdpa"
    head_dim = max(call.key_dim, call.value_dim)
    names = fastest_first(call.dtype, head_dim, windowed=call.windowed, packed=call.packed)
    return next((name for name in (*names, "triton") if _missing(name, call) is None), "sdpa")


def _missing(backend: str, call: Call) -> str | None:
    """What a call lacks, or None."""
    if backend == "reference":
        return None
    if backend == "sdpa":
        return _missing_for_int32(call)
    if backend == "triton":
        return missing_for_heads(call.device, call.dtype, D=call.key_dim, D_v=call.value_dim)
    missing = missing_xformers() if backend == "xformers" else None
    if missing is None and call.device.type != "cuda":
        missing = f"CUDA tensors, got {call.device}"
    if backend == "flex":
        return missing or _missing_for_flex(call) or _missing_for_int32(call)
    return missing or _missing_for_flash(call) or _missing_for_int32(call)


def _missing_for_int32(call: Call) -> str | None:
    if call.device.type == "cuda" and call.numel > _INT32:
        return f"at most 2^31 - 1 numbers in each tensor on CUDA, got {call.numel} with all heads"
    return None


def _missing_for_flex(call: Call) -> str | None:
    if call.dtype not in (*_HALVES, torch.float32):
        return f"v in bfloat16, float16 or float32, got {call.dtype}"
    least, most = _FLEX_HEAD_DIMS
    if not least <= min(call.key_dim, call.value_dim) <= max(call.key_dim, call.value_dim) <= most:
        return f"D and D_v from {least} to {most}, got {call.key_dim} and {call.value_dim}"
    return None


def _missing_for_flash(call: Call) -> str | None:
    if call.dtype not in _HALVES:
        return f"v in bfloat16 or float16, got {call.dtype}"
    size = call.key_dim
    if size != call.value_dim or size % _FLASH_MULTIPLE or size > _FLASH_MAX_HEAD_DIM:
        allowed = f"a multiple of {_FLASH_MULTIPLE} up to {_FLASH_MAX_HEAD_DIM}"
        return f"D = D_v, {allowed}, got {size} and {call.value_dim}"
    return None
