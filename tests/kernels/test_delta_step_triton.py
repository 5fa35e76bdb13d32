"""The Triton kernel for one token of a layer with the delta rule, on a CUDA device or in the interpreter.

Without a device it runs in a process of its own, for the interpreter is chosen when the kernel is imported:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_delta_step_triton.py
"""

import os
from typing import Any

import pytest
import torch
from delta_step_cases import CASES, Case, exact, inputs

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 and a process of its own", allow_module_level=True)

from zoo.kernels.delta_step.triton.launch import launch_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_the_separate_operations(case: Case, dtype: torch.dtype) -> None:
    given = inputs(case, dtype)
    expected = exact(given)
    there: dict[str, Any] = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    normalize = there.pop("qk_l2norm")
    o = launch_step(**there, normalize=normalize)
    # One rounding; the interpreter cuts off where it rounds to bfloat16.
    o_tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 2**-7}[dtype]
    for one, other, tolerance in zip((o, there["taps"], there["state"]), expected, (o_tolerance, 0, 2e-6), strict=True):
        assert (one.double().cpu() - other).norm() <= tolerance * other.norm()
