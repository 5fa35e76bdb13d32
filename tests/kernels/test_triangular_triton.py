"""Triton's inverses of unit lower triangular tiles, on a CUDA device or in Triton's interpreter.

Without a device they run in a process of their own, like the other kernels there (see `test_deltaformer_triton`).
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 and a process of its own", allow_module_level=True)

import triton
import triton.language as tl

from zoo.kernels.triton.triangular import unit_lower_inverse, unit_lower_inverse_refined

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, LEVELS = 64, 6


@triton.jit
def _inverse_kernel(a, x, FORM: tl.constexpr, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    index = tl.arange(0, SIZE)
    place = index[:, None] * SIZE + index[None, :]
    tl.store(x + place, FORM(tl.load(a + place), SIZE, LEVELS))


@triton.jit
def _refined_in_float32(a, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    return unit_lower_inverse_refined(a, SIZE, LEVELS, tl.float32)


def assert_inverse(a: Tensor, form: Callable[..., Any], bound: float) -> None:
    x = torch.empty_like(a)
    launch: Any = _inverse_kernel[1,]
    launch(a, x, form, SIZE, LEVELS)
    expected = torch.linalg.inv(a.double() + torch.eye(SIZE, dtype=torch.float64, device=DEVICE))
    error = float((x.double() - expected).norm() / expected.norm())
    assert error <= bound, f"relative error {error:.1e} > {bound}"


@pytest.mark.parametrize("total", [-2.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(
    ("form", "bound"), [(unit_lower_inverse, 1e-6), (unit_lower_inverse_refined, 1e-5), (_refined_in_float32, 1e-5)]
)
def test_inverse(form: Callable[..., Any], bound: float, equal: bool, total: float) -> None:
    """Of rows that add up to `total`, as softmax's times beta do."""
    weights = torch.rand(SIZE, SIZE, dtype=torch.float64, device=DEVICE) ** (0 if equal else 4)
    weights = weights.tril(-1)
    a = (total * weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)).float()
    assert_inverse(a, form, bound)


@pytest.mark.parametrize("beta", [1.2, 2.0])
@pytest.mark.parametrize(("form", "bound"), [(unit_lower_inverse, 10 * 2**-22), (_refined_in_float32, 1e-4)])
def test_an_inverse_that_grows(form: Callable[..., Any], bound: float, beta: float) -> None:
    """Each row reads the one before it: entries up to beta^63, more than float16 holds.

    Each level adds the errors of its two products, each about 2^-22, to those of the blocks that it merges.
    """
    assert_inverse(beta * torch.ones(SIZE - 1, device=DEVICE).diag(-1), form, bound)
