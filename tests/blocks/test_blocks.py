"""Blocks, norms and MLPs: counts against the modules, and each written out.

Shapes: B batch, T sequence length, D model width.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from zoo import ZooConfigError, components
from zoo.mixers.context import Context

BLOCKS: list[dict[str, Any]] = [
    {"mixer": {"name": "full_attention", "num_heads": 2}},
    {"mixer": {"name": "delta_net", "num_heads": 2}, "norm": "layer_norm", "mlp": "gelu"},
    {"mixer": {"name": "delta_net", "num_heads": 2}, "norm": {"name": "layer_norm", "bias": True, "eps": 1e-3}}
    | {"mlp": {"name": "swiglu", "hidden_dim": 7}},
]


def make(kind: str, value: Any, dim: int = 24) -> tuple[Any, Any]:
    component = components.resolve(kind, value, dim)
    return component.options, components.make(kind, component, dim)


@pytest.mark.parametrize("block", BLOCKS)
def test_block_is_two_residual_branches(block: dict[str, Any]) -> None:
    options, module = make("block", {"name": "pre_norm"} | block)
    x = torch.randn(2, 9, 24)
    context = Context.from_tokens(x[..., 0]).share(module.mixer.shared)
    between = x + module.mixer(module.mixer_norm(x), context)[0]
    y, state = module(x, context)
    torch.testing.assert_close(y, between + module.mlp(module.mlp_norm(between)))
    assert state is None
    assert options.num_params(24) == sum(parameter.numel() for parameter in module.parameters())
    assert options.flops_per_token(24, 9) > 2 * (options.num_params(24) - 200)


@pytest.mark.parametrize("value", ["rms_norm", {"name": "rms_norm", "eps": 0.5}, "layer_norm"])
def test_norm_counts_and_eps(value: Any) -> None:
    options, module = make("norm", value)
    x = torch.randn(3, 24)
    centred = x - x.mean(-1, keepdim=True) if value == "layer_norm" else x
    expected = centred / (centred.square().mean(-1, keepdim=True) + options.eps).sqrt()
    torch.testing.assert_close(module(x), expected)
    assert options.num_params(24) == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("value", ["swiglu", "gelu", {"name": "swiglu", "hidden_dim": 5}])
def test_mlp_counts(value: Any) -> None:
    options, module = make("mlp", value)
    size = sum(parameter.numel() for parameter in module.parameters())
    assert (options.num_params(24), options.flops_per_token(24, 9)) == (size, 2 * size)


@pytest.mark.parametrize(("name", "dim", "hidden_dim"), [("swiglu", 1024, 2816), ("swiglu", 96, 256), ("gelu", 24, 96)])
def test_default_hidden_dim(name: str, dim: int, hidden_dim: int) -> None:
    assert components.resolve("mlp", name, dim).options.hidden_dim == hidden_dim  # pyright: ignore[reportAttributeAccessIssue]


def test_mlps_written_out() -> None:
    x = torch.randn(2, 3, 24)
    _, swiglu = make("mlp", {"name": "swiglu", "hidden_dim": 10})
    gate, value = (x @ weight.t() for weight in swiglu.in_proj.weight.split(10))
    torch.testing.assert_close(swiglu(x), (F.silu(gate) * value) @ swiglu.out_proj.weight.t())
    _, gelu = make("mlp", {"name": "gelu", "hidden_dim": 10})
    torch.testing.assert_close(gelu(x), F.gelu(x @ gelu.in_proj.weight.t()) @ gelu.out_proj.weight.t())


@pytest.mark.parametrize(
    ("kind", "value", "match"),
    [
        ("norm", {"name": "rms_norm", "eps": -1}, "eps.*-1"),
        ("norm", {"name": "rms_norm", "bias": True}, "bias"),
        ("mlp", {"name": "swiglu", "hidden_dim": 0}, "hidden_dim.*0"),
        ("block", {"name": "pre_norm"}, "mixer.*missing"),
    ],
)
def test_bad_options_are_named(kind: str, value: Any, match: str) -> None:
    with pytest.raises(ZooConfigError, match=match):
        components.resolve(kind, value, 24)
