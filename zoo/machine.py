"""What a measurement ran on."""

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe", "find", "slug"]


def find(name: str | None) -> torch.device:
    """The device that a command was told to use, or CUDA when there is one.

    Raises:
        ValueError: there is none of that name.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device: got {name!r}, allowed: cpu, cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: got {name!r}, allowed: cpu, cuda")
    if device.type == "cpu" and device.index:
        raise ValueError(f"--device: got {name!r}, but there is one CPU, allowed: cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: got {name!r}, but there is no usable CUDA device, allowed: cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device: got {name!r}, allowed: cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return device


def describe(device: torch.device) -> dict[str, Any]:
    """The header of every result: processor or GPU, versions, commit (git's, or for a copy what ZOO_COMMIT says).

    Args:
        device: where the work runs.
    """
    told = os.environ.get("ZOO_COMMIT")
    changes = None if told else _git("status", "--porcelain", "--untracked-files=no")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "driver": _driver() if device.type == "cuda" else None,
        "zoo": _version("mixer-zoo"),
        "commit": told or _git("rev-parse", "HEAD"),
        "changed_since_commit": None if changes is None else changes != "",
    }


def slug(device: torch.device) -> str:
    """The name of a device for a file: h200 for NVIDIA H200, cpu for any processor."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return re.sub(r"[^a-z0-9]+", "_", name.lower().removeprefix("nvidia").strip()).strip("_")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _driver() -> str | None:
    """The version of NVIDIA's driver, as its module says."""
    told = Path("/proc/driver/nvidia/version")
    try:
        return next(iter(re.findall(r"\b\d+\.\d+(?:\.\d+)?\b", told.read_text())), None)
    except OSError:
        return _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _git(*arguments: str) -> str | None:
    """What git says of the checkout that this file lies in, or None outside one."""
    return _said("git", "-C", str(Path(__file__).resolve().parent), *arguments)


def _said(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
