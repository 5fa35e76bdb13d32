"""A whole model's decoding step by the Triton kernels, in one compiled graph, in Triton's interpreter.

On a CUDA device the other tests run these kernels. Without one this needs a process of its own, for the interpreter is
chosen when the kernels are imported:

    TRITON_INTERPRET=1 python -m pytest tests/zoo/test_decoding_triton.py
"""

import os

import pytest
import torch

import zoo
from zoo.kernels import cache_read, delta_rule

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 and a process of its own", allow_module_level=True)

MIXERS = [
    "layers.1.mixer={name: sliding_window, window: 8}",
    "layers.2.mixer=deltaformer",
    "layers.3.mixer={name: full_attention, num_heads: 4, num_kv_heads: 2}",
]


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True])
def test_steps_equal_the_whole(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("deltanet-tiny", MIXERS, seed=0)
    tokens = torch.randint(256, (2, 30))
    expected = model(tokens)
    _, state = model(tokens[:, :20], max_length=30)
    for module in (cache_read, delta_rule):
        monkeypatch.setattr(module, "missing_for_heads", lambda *_, **__: None)
    places = [value.data_ptr() for value in state.values(True, True)]
    call = torch.compile(model, fullgraph=True) if compiled else model
    for place in range(20, 30):
        with torch._dynamo.config.patch(error_on_recompile=place > 20):
            logits, state = call(tokens[:, place : place + 1], state=state)
        torch.testing.assert_close(logits[:, 0], expected[:, place], rtol=1e-4, atol=1e-5)
    assert [value.data_ptr() for value in state.values(True, True)] == places
