"""The Triton kernel that multiplies a matrix by one row, against float64, on a CUDA device or in the interpreter.

Without a device it runs in a process of its own, for the interpreter is chosen when the kernel is imported:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_row_linear_triton.py
"""

import os
from typing import Any

import pytest
import torch
from row_linear_cases import CASES, Case, exact, inputs

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 and a process of its own", allow_module_level=True)

from zoo.kernels.row_linear.triton import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def check(given: dict[str, Any], constant: bool) -> None:
    given = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    y = launch.multiply_row(**given, constant=constant)
    tolerance = TOLERANCE[y.dtype]
    torch.testing.assert_close(y.double().cpu(), exact(**given), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("constant", [False, True])
def test_equals_the_equation(case: Case, dtype: torch.dtype, constant: bool) -> None:
    check(inputs(case, dtype), constant)


@pytest.mark.parametrize("block", [64, 1 << 20])
def test_however_many_rows_a_program_has(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_NUMBERS", block)
    check(inputs(CASES["gated heads"]), constant=True)


@pytest.mark.parametrize("eps", [0.0, 1e-46])
def test_a_norm_without_eps(eps: float) -> None:
    check(inputs(CASES["gated heads"]) | {"eps": eps}, constant=False)
    check(inputs(Case((1, 3, 4), 5, norm=True)) | {"eps": eps}, constant=False)


@pytest.mark.parametrize("constant", [False, True])
def test_any_strides(constant: bool) -> None:
    given = inputs(Case((2, 32), 9, norm=True, gate=True, residual=True))
    given["weight"] = apart = torch.zeros(9, 70)[:, :64].copy_(given["weight"])
    check(given, constant)
    for name in ("x", "norm_weight", "gate", "residual"):
        twice = torch.stack([given[name]] * 2, -1)[..., 0]
        one = given[name].flatten()[:1].expand(given[name].shape)
        for strided in (twice, one):
            check(given | {name: strided}, constant)
    check(given | {"weight": apart.t().contiguous().t()}, constant)
    check(given | {"x": torch.randn(2, 40)[:, :32]}, constant)
