"""Compiling Triton kernels for Hopper where there is no device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

__all__ = ["compile_only"]


class _CompilerDriver:
    """What Triton asks of a device when it only compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1  # which no device is: what was compiled for one stays its own

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """From now on launching a kernel is no more than compiling it; kernels by name, as they come.

    Args:
        monkeypatch: what takes it back.
        folder: for compiled kernels.
    """
    found: dict[str, Any] = {}
    run = JITFunction.run

    def compile_it(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found[self.fn.__name__] = kernel
        return kernel

    monkeypatch.setattr(JITFunction, "run", compile_it)
    monkeypatch.setattr(driver, "_active", _CompilerDriver())  # without a GPU there is no other to go back to
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return found
