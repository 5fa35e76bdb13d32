"""How tests of kernels compare results, and the memory layouts that they try."""

import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

FLOAT32_BOUND = 1e-4
# What errors may be, in those that rounding the exact results makes.
ROUNDINGS = {"o": 2.0, "u": 1.5, "q": 3.0, "w": 3.0, "k": 3.0, "v": 3.0, "alpha": 3.0, "beta": 7.0}

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


def assert_near_or_zero(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """The same, relative to the largest one where the expected one is 0."""
    assert actual.keys() == expected.keys()
    norms = {name: float(y.norm()) for name, y in expected.items()}
    largest = max(norms.values())
    for name, y in expected.items():
        norm = norms[name] if norms[name] > 1e-9 * largest else largest
        error = float((actual[name] - y).norm()) / norm
        assert error <= bound, f"{name}: relative error {error:.1e} > {bound}"


def assert_rounded(
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    dtype: torch.dtype,
    alternatives: dict[str, float] | None = None,
    *,
    least: float = 0.0,
) -> None:
    """Every error a few times that of rounding the exact result to `dtype`, or its alternative; in float32 1e-4 of it.

    Where the result is 0, it is compared with the largest one. In half precision errors may be `least` of a result,
    which rounding may leave as it is.
    """
    assert actual.keys() == expected.keys()
    largest = max(float(y.norm()) for y in expected.values())
    for name, y in expected.items():
        norm = float(y.norm())
        if norm <= 1e-9 * largest:
            allowed = largest * (FLOAT32_BOUND if dtype == torch.float32 else torch.finfo(dtype).eps / 2)
        elif dtype == torch.float32:
            allowed = FLOAT32_BOUND * norm
        else:
            allowed = max(ROUNDINGS[name] * float((y.to(dtype).double() - y).norm()), least * norm)
        allowed = max(allowed, (alternatives or {}).get(name, 0.0))
        error = float((actual[name].double() - y).norm())
        assert error <= allowed, f"{name}: error {error:.1e} > {allowed:.1e}, of {norm:.1e}"


def bytes_kept(call: Callable[[], Tensor], inputs: Iterable[Tensor]) -> int:
    """What a call keeps for its backward beside its inputs and the result, which it keeps, too."""
    saved: list[Tensor] = []

    def keep(y: Tensor) -> Tensor:
        saved.append(y)
        return y

    with saved_tensors_hooks(keep, lambda y: y):
        result = call()
    kept = {y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in saved}
    assert result.untyped_storage().data_ptr() in kept
    known = {y.untyped_storage().data_ptr() for y in (result, *inputs)}
    return sum(size for place, size in kept.items() if place not in known)


def compiled_kernels() -> int:
    """How many variants of our kernels Triton has compiled in this process, or loaded."""
    modules = [module for name, module in sys.modules.items() if name.startswith("zoo.kernels.")]
    kernels = {id(y): y for module in modules for y in vars(module).values() if hasattr(y, "device_caches")}
    return sum(len(cache[0]) for kernel in kernels.values() for cache in kernel.device_caches.values())
