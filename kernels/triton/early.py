"""Programmatic dependent launch: a kernel begins while the one before it ends (CUDA C++ Programming Guide).

A kernel that is launched so may first read what no kernel in flight writes; then it waits, and all that was launched
before it has finished, and only then lets the next one begin. In this order a wait covers everything before.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["early_options", "release_next", "wait_for_last"]

_CAPABILITY = (9, 0)  # Hopper


def early_options(device: torch.device) -> dict[str, Any]:
    """Options of a launch: EARLY, for the functions below, and Triton's own."""
    on_cuda = device.type == "cuda" and torch.version.hip is None
    early = on_cuda and torch.cuda.get_device_capability(device) >= _CAPABILITY
    return {"EARLY": early, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    """Until all that was launched before has finished, and its results are there."""
    if EARLY:
        gdc_wait()


@triton.jit
def release_next(EARLY: tl.constexpr):
    """The next kernel may begin, if it is launched early."""
    if EARLY:
        gdc_launch_dependents()
