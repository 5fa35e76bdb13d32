"""How much memory tensors take."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

__all__ = ["peak_cpu_bytes"]


def peak_cpu_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that a call on the CPU holds at a time in tensors of its own.

    Args:
        call: what to run, once.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()  # held until the end, so that it counts
    del result
    events = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")  # pyright: ignore[reportAttributeAccessIssue]
    growth = most = 0
    for _, change in changes:
        growth += change
        most = max(most, growth)
    return most
