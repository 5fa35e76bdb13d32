"""How tests of kernels compare results, and the memory layouts that they try."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: y.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda y: torch.stack([y, torch.full_like(y, torch.nan)], -1)[..., 0],
    "sliced": lambda y: torch.cat([torch.full_like(y[..., :1], torch.nan), y], -1)[..., 1:],
    "expanded": lambda y: y[:, :, :1].expand_as(y),
    "misaligned": lambda y: torch.cat([y.new_full((1,), torch.nan), y.flatten()])[1:].view_as(y),
}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every result equal to the expected one, bit for bit."""
    assert actual.keys() == expected.keys()
    for name, y in expected.items():
        assert torch.equal(actual[name], y), name


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Every result within `bound` of the expected one, relative to its norm."""
    assert actual.keys() == expected.keys()
    for name, y in expected.items():
        error = (actual[name].double() - y.double()).norm() / y.double().norm().clamp_min(1e-30)
        assert error <= bound, f"{name}: relative error {error:.1e} > {bound}"


def compiled_kernels() -> int:
    """How many variants of our kernels Triton has compiled in this process, or loaded."""
    modules = [module for name, module in sys.modules.items() if name.startswith("zoo.kernels.")]
    kernels = {id(y): y for module in modules for y in vars(module).values() if hasattr(y, "device_caches")}
    return sum(len(cache[0]) for kernel in kernels.values() for cache in kernel.device_caches.values())
