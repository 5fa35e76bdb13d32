"""What every Triton kernel here needs of a call, and what it asks of a device."""

from importlib.util import find_spec

import torch

__all__ = ["MAX_HEAD_DIM", "missing_for_heads", "missing_for_triton", "num_multiprocessors", "shared_memory"]

MAX_HEAD_DIM = 256
_MIN_SHARED_MEMORY = 227 * 1024  # of a program, as the largest heads need; Hopper and Blackwell for data centers
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INSTALLED = find_spec("triton") is not None


def missing_for_triton(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """What a call lacks, or None.

    Args:
        name: of the argument whose dtype the kernels take.
        device: of the tensors.
        dtype: of that argument.
    """
    if not _INSTALLED:
        return "the package triton, which is not installed"
    if device.type != "cuda":
        return f"CUDA tensors, got {device}"
    if dtype not in _DTYPES:
        return f"{name} in bfloat16, float16 or float32, got {dtype}"
    return None


def missing_for_heads(device: torch.device, dtype: torch.dtype, name: str = "v", **sizes: int) -> str | None:
    """What a call lacks whose kernels hold whole heads, or None.

    Args:
        device: of the tensors.
        dtype: of the argument whose dtype the kernels take.
        name: of that argument.
        sizes: of the heads, by name.
    """
    missing = missing_for_triton(name, device, dtype)
    if missing is not None:
        return missing
    if max(sizes.values()) > MAX_HEAD_DIM:
        got = " and ".join([f"{size}" for size in sizes.values()])  # in a graph str() takes no symbols
        return f"{' and '.join(sizes)} of at most {MAX_HEAD_DIM}, got {got}"
    available = shared_memory(device)
    if available < _MIN_SHARED_MEMORY:
        return f"a GPU with {_MIN_SHARED_MEMORY} bytes of shared memory for a program, got one with {available}"
    return None


def num_multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; 1 of any other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@torch.compiler.assume_constant_result
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on a CUDA device; enough where there is none, for fake tensors."""
    if not torch.cuda.is_available():
        return _MIN_SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
