"""A whole model's decoding step by the Triton kernels, in one compiled graph, in Triton's interpreter.

On a CUDA device the other tests run these kernels. Without one this needs a process of its own, for the interpreter is
chosen when the kernels are imported:

    TRITON_INTERPRET=1 python -m pytest tests/zoo/test_decoding_triton.py
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zoo
from zoo import row_fusion
from zoo.kernels import cache_read, delta_step, row_linear

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 and a process of its own", allow_module_level=True)

from zoo.kernels.cache_read.triton import launch as cache_launch
from zoo.kernels.delta_step.triton import launch as step_launch
from zoo.kernels.row_linear.triton import launch as row_launch

MIXERS = [
    "layers.1.mixer={name: sliding_window, window: 8}",
    "layers.2.mixer=deltaformer",
    "layers.3.mixer={name: full_attention, num_heads: 4, num_kv_heads: 2}",
]


def counted(launches: dict[str, int], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, each call of which is counted under its name."""

    def call(*args: Any, **options: Any) -> Any:
        launches[function.__name__] += 1
        return function(*args, **options)

    return call


LAUNCHERS = {
    "read_splits": (cache_launch, cache_read, "missing_for_heads"),
    "launch_step": (step_launch, delta_step, "missing_for_heads"),
    "multiply_row": (row_launch, row_linear, "missing_for_row_linear"),
}


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("batch_size", "how"), [(2, None), (2, {}), (1, {"backend": row_fusion.compile_rows})])
def test_steps_equal_the_whole(batch_size: int, how: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("deltanet-tiny", MIXERS, seed=0)
    tokens = torch.randint(256, (batch_size, 30))
    expected = model(tokens)
    _, state = model(tokens[:, :20], max_length=30)
    launches = dict.fromkeys(LAUNCHERS, 0)
    for name, (launcher, module, missing) in LAUNCHERS.items():
        monkeypatch.setattr(module, missing, lambda *_, **__: None)
        monkeypatch.setattr(launcher, name, counted(launches, getattr(launcher, name)))
    monkeypatch.setattr(row_fusion, "missing_for_row_linear", lambda *_: None)
    places = [value.data_ptr() for value in state.values(True, True)]
    call = model if how is None else torch.compile(model, fullgraph=True, **how)
    for place in range(20, 30):
        with torch._dynamo.config.patch(error_on_recompile=place > 20):
            logits, state = call(tokens[:, place : place + 1], state=state)
        torch.testing.assert_close(logits[:, 0], expected[:, place], rtol=1e-4, atol=1e-5)
    assert [value.data_ptr() for value in state.values(True, True)] == places
    products = 0 if batch_size > 1 else 4 * len(model.blocks) + 1
    assert launches == {"read_splits": 10 * 3, "launch_step": 10, "multiply_row": 10 * products}
