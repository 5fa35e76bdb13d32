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
    check(inputs(case, dtype), dtype)


def test_any_strides() -> None:
    given = inputs(CASES["groups"])
    for name in ("logits", "bias", "g", "weight", "start"):
        twice = torch.stack([given[name]] * 2, -1)[..., 0]
        one = given[name].flatten()[:1].expand(given[name].shape)
        for strided in (twice, one):
            changed = {other: x.clone() if isinstance(x, torch.Tensor) else x for other, x in given.items()}
            if name != "start" or strided is twice:  # other taps would be empty
                check(changed | {name: strided}, torch.float32)


def test_taps_of_another_dtype() -> None:
    """As under autocast, where x comes from a product in half precision and the state is of the weights' dtype."""
    given = inputs(CASES["gated"], torch.bfloat16)
    check(given | {name: given[name].float() for name in ("taps", "weight", "bias")}, torch.bfloat16)


def check(given: dict[str, Any], dtype: torch.dtype) -> None:
    expected = exact(given)
    normalize = given["qk_l2norm"]
    there: dict[str, Any] = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    del there["qk_l2norm"]
    o = launch_step(**there, normalize=normalize)
    # One rounding; the interpreter cuts off where it rounds to bfloat16.
    o_tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 2**-7}[dtype]
    for one, other, tolerance in zip((o, there["taps"], there["state"]), expected, (o_tolerance, 0, 2e-6), strict=True):
        assert (one.double().cpu() - other).norm() <= tolerance * other.norm()
