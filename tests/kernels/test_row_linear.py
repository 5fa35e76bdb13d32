"""A matrix times one row in PyTorch, against float64; what is refused.

Shapes: K numbers of the row, d the size of what is normalised, N rows of the matrix.
"""

import re
from typing import Any

import pytest
import torch
from row_linear_cases import CASES, Case, exact, inputs
from torch._subclasses.fake_tensor import FakeTensorMode

from zoo.kernels.row_linear import missing_for_row_linear, row_linear

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_the_equation(case: Case, dtype: torch.dtype) -> None:
    given = inputs(case, dtype)
    y = row_linear(**given)
    assert (y.dtype, y.shape) == (dtype, (case.num_rows,))
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(y.double(), exact(**given), rtol=tolerance, atol=tolerance)


def test_takes_no_gradients() -> None:
    x = torch.randn(8, requires_grad=True)
    assert not row_linear(x, torch.randn(3, 8)).requires_grad


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "impl": ({"impl": "cuda"}, "impl: expected one of 'auto', 'torch', 'triton', got 'cuda'"),
    "triton": ({"impl": "triton"}, "impl: 'triton' needs CUDA tensors, got cpu"),
    "empty": ({"x": torch.ones(1, 0)}, r"x: expected [..., d], no size 0, got [1, 0]"),
    "weight": ({"weight": torch.ones(4, 9)}, "weight: expected [N, K] = [4, 8], got [4, 9]"),
    "flat weight": ({"weight": torch.ones(8)}, "weight: expected [N, K], no size 0, got [8]"),
    "norm": ({"norm_weight": torch.ones(8)}, "norm_weight: expected [d] = [4], got [8]"),
    "gate": ({"gate": torch.ones(4)}, "gate: expected 8 numbers, got [4]"),
    "residual": ({"residual": torch.ones(8)}, "residual: expected 5 numbers, got [8]"),
    "dtype": ({"gate": torch.ones(8).half()}, "gate: expected the dtype of x, torch.float32, got torch.float16"),
    "integers": ({"x": torch.ones(2, 4, dtype=torch.int64)}, "x: expected a floating-point dtype, got torch.int64"),
    "device": ({"weight": torch.ones(5, 8, device="meta")}, "weight: expected the device of x, cpu, got meta"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG.keys())
def test_refuses(wrong: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"x": torch.ones(2, 4), "weight": torch.ones(5, 8)} | wrong
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        row_linear(**given)


@pytest.mark.parametrize(
    ("shape", "dtype", "norm", "missing"),
    [
        ((1, 1024), torch.bfloat16, True, None),
        ((8, 128), torch.float32, True, None),
        ((3, 48), torch.float16, False, None),
        ((3, 48), torch.float16, True, "a norm over all K = 144 numbers, or over a power of two, got d = 48"),
        ((16385,), torch.float16, True, "K of at most 16384, got 16385"),
        ((8,), torch.float64, False, "x in bfloat16, float16 or float32, got torch.float64"),
    ],
)
def test_what_triton_cannot(shape: tuple[int, ...], dtype: torch.dtype, norm: bool, missing: str | None) -> None:
    pytest.importorskip("triton")
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(shape, dtype=dtype, device="cuda")
        assert missing_for_row_linear(x, x.new_empty(shape[-1]) if norm else None) == missing
