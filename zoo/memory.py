"""How much memory tensors take."""

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["give_back", "peak_bytes", "peak_cpu_bytes", "total_bytes"]


def total_bytes(device: torch.device) -> int:
    """The memory of a CUDA device, or of this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def give_back(device: torch.device) -> None:
    """What nothing refers to any more, on a CUDA device also to the processes beside this one."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that a call holds at a time in tensors of its own, its results with it.

    Args:
        call: what to run, once.
        device: where its work runs, a CPU or the current CUDA device.
    """
    if device.type != "cuda":
        return peak_cpu_bytes(call)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def peak_cpu_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that a call on the CPU holds at a time in tensors of its own.

    Args:
        call: what to run, once.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    changes = [event for event in events if event.name() == "[memory]"]
    growth = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        growth += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        most = max(most, growth)
    return most
