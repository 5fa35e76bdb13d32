"""One token of a layer with the delta rule, of the separate operations, against whole sequences; what is refused.

Shapes: B rows, C channels, K taps, H query heads, G key/value heads, d_k and d_v their sizes.
"""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from delta_step_cases import CASES, Case, exact, inputs

from zoo.kernels.delta_rule import recurrent_delta_rule
from zoo.kernels.delta_step import delta_step

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@each_case
def test_step_by_step_is_the_whole(case: Case) -> None:
    """Nine tokens one by one, and at once by torch's own convolution."""
    case = case._replace(start=(0, 0))
    (heads, groups), (key_dim, value_dim) = case.heads, case.dims
    given = [inputs(case, torch.float64) for _ in range(9)]
    first = given[0]
    taps, state, start = torch.zeros_like(first["taps"]), first["state"].clone(), first["start"]
    fixed: dict[str, Any] = {name: first[name] for name in ("weight", "bias", "strength", "qk_l2norm")}
    steps = []
    for position, token in enumerate(given):
        now = {name: token[name] for name in ("x", "logits", "g")}
        steps.append(delta_step(taps=taps, start=start + position, state=state, **fixed, **now))

    x = torch.stack([token["x"] for token in given], -1)
    filters = first["weight"].flip(0).t()[:, None]
    y = F.silu(F.conv1d(F.pad(x, (case.size - 1, 0)), filters, first["bias"], groups=x.shape[1])).mT
    q, k, v = y.split([heads * key_dim, groups * key_dim, groups * value_dim], -1)
    beta = torch.full((2, 9, groups), first["strength"], dtype=torch.float64)
    if case.learned:
        beta = beta * torch.stack([token["logits"] for token in given], 1).sigmoid()
    o, final = recurrent_delta_rule(
        q.unflatten(-1, (heads, key_dim)),
        k.unflatten(-1, (groups, key_dim)),
        v.unflatten(-1, (groups, value_dim)),
        beta,
        g=torch.stack([token["g"] for token in given], 1) if case.decays else None,
        initial_state=first["state"],
        qk_l2norm=case.normalize,
    )
    torch.testing.assert_close(torch.stack(steps, 1), o, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state, final, rtol=1e-10, atol=1e-10)


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision(case: Case, dtype: torch.dtype) -> None:
    given = inputs(case, dtype)
    expected = exact(given)
    actual = delta_step(**given), given["taps"], given["state"]
    assert actual[0].dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for one, other in zip(actual, expected, strict=True):
        assert (one.double() - other).norm() <= tolerance * other.norm()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "impl": ({"impl": "cuda"}, "impl: expected one of 'auto', 'torch', 'triton', got 'cuda'"),
    "triton": ({"impl": "triton"}, "impl: 'triton' needs CUDA tensors, got cpu"),
    "x": (
        {"x": torch.ones(2, 20, 2)[..., 0]},
        "x: expected [B, C] with dense rows, got [2, 20] with strides [40, 2]",
    ),
    "weight": ({"weight": torch.ones(4, 19)}, "weight: expected [K, C] = [4, 20], got [4, 19]"),
    "taps": ({"taps": torch.ones(2, 3, 20)}, "taps: expected [B, K, C] = [2, 4, 20], got [2, 3, 20]"),
    "split taps": (
        {"taps": torch.ones(2, 20, 4).mT},
        "taps: expected contiguous, got strides [80, 1, 4]",
    ),
    "start": ({"start": torch.zeros(2, dtype=torch.int32)}, "start: expected int64, got torch.int32"),
    "state": (
        {"state": torch.ones(3, 1, 4, 4)},
        "state: expected [B, G, d_k, d_v] with B = 2, got [3, 1, 4, 4]",
    ),
    "channels": (
        {"state": torch.ones(2, 1, 7, 7)},
        "x: expected C = H d_k + G d_k + G d_v, G dividing H, for G = 1, d_k = 7, d_v = 7, got 20",
    ),
    "half a state": (
        {"state": torch.ones(2, 1, 4, 4).half()},
        "state: expected contiguous torch.float32, got torch.float16 with strides [16, 16, 4, 1]",
    ),
    "logits": ({"logits": torch.ones(2, 2)}, "logits: expected [B, G] = [2, 1], got [2, 2]"),
    "g": ({"g": torch.ones(1, 1)}, "g: expected [B, G] = [2, 1], got [1, 1]"),
    "bias": ({"bias": torch.ones(4)}, "bias: expected [C] = [20], got [4]"),
    "device": ({"bias": torch.ones(20, device="meta")}, "bias: expected the device of x, cpu, got meta"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG.keys())
def test_refuses_before_anything_changes(wrong: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "x": torch.ones(2, 20),
        "weight": torch.ones(4, 20),
        "taps": torch.ones(2, 4, 20),
        "start": torch.zeros(2, dtype=torch.int64),
        "state": torch.ones(2, 1, 4, 4),
    } | wrong
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        delta_step(**given)
    assert (given["taps"] == 1).all()
    assert (given["state"] == 1).all()
