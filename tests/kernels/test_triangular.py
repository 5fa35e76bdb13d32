"""The inverse of small unit lower triangular matrices.

Shapes: P matrices, C rows and columns.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.kernels.triangular import unit_lower_inverse

SIZES = [1, 2, 7, 16, 32, 64]


def of_keys(size: int, cos: float, beta: float) -> Tensor:
    """What the delta rule inverts: tril(beta K K^T, -1) of unit keys with mean cosine `cos`, [P, C, C] in float32."""
    generator = torch.Generator().manual_seed(size)
    common, own = (F.normalize(torch.randn(20, n, 64, generator=generator), dim=-1) for n in (1, size))
    k = F.normalize(cos**0.5 * common + (1 - cos) ** 0.5 * own, dim=-1)
    return (beta * k @ k.mT).tril(-1)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    errors = (actual.double() - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
    return float(errors.max())


@pytest.mark.parametrize("size", SIZES)
def test_equals_the_general_inverse(size: int) -> None:
    a = (torch.randn(5, size, size, dtype=torch.float64) / size**0.5).tril(-1)
    before = a.clone()
    inverse = unit_lower_inverse(a)
    torch.testing.assert_close(inverse, torch.linalg.inv(torch.eye(size) + a), rtol=1e-11, atol=1e-11)
    assert torch.equal(a, before)
    assert torch.equal(inverse, inverse.tril())
    assert torch.equal(inverse.diagonal(dim1=1, dim2=2), torch.ones(5, size, dtype=a.dtype))


@pytest.mark.parametrize("size", SIZES)
def test_any_strides(size: int) -> None:
    a = (torch.randn(size, 5, size, dtype=torch.float64) / size**0.5).transpose(0, 1).tril(-1)
    wide = torch.stack([a, torch.full_like(a, torch.nan)], -1)[..., 0]
    assert not wide.is_contiguous()
    torch.testing.assert_close(unit_lower_inverse(wide), unit_lower_inverse(a.contiguous()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("cos", "beta", "bound"),
    [(0.5, 2.0, 6e-7), (0.9, 2.0, 6e-6), (0.99, 1.0, 3e-7), (0.99, 2.0, 3e-5), (1.0, 2.0, 4e-6)],
)
def test_correlated_keys_in_float32(size: int, cos: float, beta: float, bound: float) -> None:
    """The delta rule stays within 5e-5 on such keys. Bounds: 1.5 to 2 times the largest error measured, at 64 rows.

    Repeated squaring, (I - a)(I + a^2)(I + a^4)..., has errors from 1e-2 at 16 rows to 1e20 at 64.
    """
    a = of_keys(size, cos, beta)
    error = relative_error(unit_lower_inverse(a), torch.linalg.inv(torch.eye(size, dtype=torch.float64) + a.double()))
    assert error <= bound, f"{error:.1e}"
