"""The delta rule's Triton kernel token by token, against the reference, on a CUDA device or in the interpreter.

Without a device they run in a process of their own, for the interpreter is chosen when the kernels are imported:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_delta_rule_recurrent_triton.py

Shapes: B batch, T tokens, H query heads, G key/value heads, N documents (N = B unless packed).
"""

import os
from typing import Any

import pytest
import torch
from comparing import assert_near
from delta_rule_triton_cases import (
    FORMS,
    Form,
    each_form,
    inputs,
    on_device,
    plainest_and_fullest,
    reference,
    upstream,
)

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 and a process of its own", allow_module_level=True)

from zoo.kernels.delta_rule.triton.recurrent import recurrent_forward


def check_recurrent(x: dict[str, Any], form: Form, *, dtype: torch.dtype = torch.float32, scale: float = 0.3) -> None:
    q, k, v, beta, g, state, cu_seqlens = on_device(x, dtype, lambda y: y)
    o, final_state = recurrent_forward(q, k, v, beta, g, state, cu_seqlens, scale, normalize=form.normalize)
    assert (o.dtype, final_state.dtype) == (dtype, torch.float32)
    expected = reference(x, upstream(x, dtype), normalize=form.normalize, scale=scale)
    actual = {"o": o.double().cpu(), "final_state": final_state.double().cpu()}
    assert_near(actual, {name: expected[name] for name in actual}, 1e-6 if dtype == torch.float32 else 1e-3)
    if state is not None:  # and in place
        memory = state.clone()
        again, same = recurrent_forward(
            q, k, v, beta, g, memory, cu_seqlens, scale, normalize=form.normalize, final_state=memory
        )
        assert same is memory
        assert torch.equal(again, o)
        assert torch.equal(memory, final_state)


@pytest.mark.parametrize("seq_len", [1, 2, 7])
@each_form
def test_recurrent(form: Form, seq_len: int) -> None:
    check_recurrent(inputs(seq_len, form, batch=2, heads=(4, 2), dims=(20, 48)), form)


@pytest.mark.parametrize("dims", [(16, 16), (48, 32), (100, 20), (16, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_recurrent_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    check_recurrent(inputs(5, heads=(4, 1), dims=dims, dtype=dtype, state=False), FORMS["plain"], dtype=dtype)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@plainest_and_fullest
def test_recurrent_packed(form: Form, index: torch.dtype) -> None:
    x = inputs(10, form, heads=(4, 2), pieces=(0, 1, 2, 0, 7, 0))
    check_recurrent(x | {"cu_seqlens": x["cu_seqlens"].to(index)}, form)


def test_recurrent_with_zeros() -> None:
    x = inputs(5, FORMS["both"])
    x["k"] = torch.zeros_like(x["k"]).requires_grad_()
    check_recurrent(x, FORMS["both"], scale=0.0)
