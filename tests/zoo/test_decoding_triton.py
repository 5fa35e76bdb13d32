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
from zoo.kernels import cache_read, delta_rule

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 and a process of its own", allow_module_level=True)

from zoo.kernels.cache_read.triton import launch
from zoo.kernels.delta_rule.triton import recurrent

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


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True])
def test_steps_equal_the_whole(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("deltanet-tiny", MIXERS, seed=0)
    tokens = torch.randint(256, (2, 30))
    expected = model(tokens)
    _, state = model(tokens[:, :20], max_length=30)
    launches = {"read_splits": 0, "recurrent_forward": 0}
    for module, launcher in ((cache_read, launch), (delta_rule, recurrent)):
        monkeypatch.setattr(module, "missing_for_heads", lambda *_, **__: None)
        for name in launches.keys() & vars(launcher).keys():
            monkeypatch.setattr(launcher, name, counted(launches, getattr(launcher, name)))
    places = [value.data_ptr() for value in state.values(True, True)]
    call = torch.compile(model, fullgraph=True) if compiled else model
    for place in range(20, 30):
        with torch._dynamo.config.patch(error_on_recompile=place > 20):
            logits, state = call(tokens[:, place : place + 1], state=state)
        torch.testing.assert_close(logits[:, 0], expected[:, place], rtol=1e-4, atol=1e-5)
    assert [value.data_ptr() for value in state.values(True, True)] == places
    assert launches == {"read_splits": 10 * 3, "recurrent_forward": 10}
