"""DeltaNet's own: each option, and the layer written out.

Shapes: B batch, T sequence length, D model width.
"""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from zoo import ZooConfigError, components
from zoo.kernels.delta_rule.reference import delta_rule_reference
from zoo.mixers.context import Context
from zoo.mixers.delta_net import DeltaNet

OPTIONS: list[dict[str, Any]] = [
    {"beta": "2sigmoid", "feature_map": "relu", "conv_size": 0},
    {"beta": 0.5, "feature_map": "elu1", "qk_norm": "l1"},
    {"beta": 1, "feature_map": "identity", "qk_norm": "none", "conv_size": 1, "conv_bias": True},
    {"output_gate": True, "expand_k": 0.5, "expand_v": 2, "conv_bias": True},
    {"num_kv_heads": 1, "expand_v": 0.25, "conv_size": 7},
]


def delta_net(dim: int = 24, **options: Any) -> DeltaNet:
    component = components.resolve("mixer", {"name": "delta_net"} | options, dim)
    return cast(DeltaNet, components.make("mixer", component, dim))


def test_every_option_trains_in_one_graph(fresh_compiler: None) -> None:
    """dynamic=True would make symbols of float options (a number as beta) that it can see."""
    layers = [{"mixer": {"name": "delta_net", "num_heads": 2} | options} for options in OPTIONS]
    config = {"vocab_size": 29, "dim": 24, "num_layers": len(layers), "layers": layers}
    model = zoo.build(config | {"block": {"mlp": {"name": "gelu", "hidden_dim": 20}}}, seed=0)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    tokens, weights = torch.randint(29, (3, 70)), torch.randn(3, 70, 29)
    results = []
    for run in (model, compiled):
        y = run(tokens)
        results.append([y, *torch.autograd.grad((y * weights).sum(), list(model.parameters()))])
    for expected, actual in zip(*results, strict=True):
        assert expected.abs().max() > 0
        assert (actual - expected).norm() <= 1e-5 * expected.norm()


def test_equals_the_layer_written_out() -> None:
    layer, x = delta_net(num_heads=2), torch.randn(3, 21, 24)
    weights = layer.in_proj.weight.split([24, 24, 24, 2])
    assert layer.conv is not None
    projected = []
    for weight, taps in zip(weights[:3], layer.conv.weight.split(24, 1), strict=True):
        padded = F.pad((x @ weight.t()).mT, (3, 0))
        projected.append(F.silu(F.conv1d(padded, taps.flip(0).t()[:, None], groups=24).mT).unflatten(-1, (2, 12)))
    q, k = (F.normalize(y, dim=-1) for y in projected[:2])
    o, _ = delta_rule_reference(q, k, projected[2], (x @ weights[3].t()).sigmoid())
    expected = nn.functional.rms_norm(o, (12,), layer.norm.weight, 1e-6).flatten(-2) @ layer.out_proj.weight.t()
    actual, _ = layer(x, Context.from_tokens(x[..., 0]))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_zero_beta_writes_nothing() -> None:
    x = torch.randn(2, 9, 24)
    assert not delta_net(beta=0)(x, Context.from_tokens(x[..., 0]))[0].any()


def test_output_gate_multiplies_by_silu() -> None:
    gated, plain, x = delta_net(output_gate=True), delta_net(), torch.randn(2, 9, 24)
    plain.load_state_dict(gated.state_dict() | {"in_proj.weight": gated.in_proj.weight[:-24]})
    gate = F.silu(x @ gated.in_proj.weight[-24:].t())
    outputs = []
    for layer in (gated, plain):
        layer.out_proj = nn.Linear(24, 24, bias=False)
        nn.init.eye_(layer.out_proj.weight)
        outputs.append(layer(x, Context.from_tokens(x[..., 0]))[0])
    torch.testing.assert_close(outputs[0], outputs[1] * gate)


@pytest.mark.parametrize("expand", [1.1, 0.7, 0.1])
def test_expansion_only_needs_a_whole_result(expand: float) -> None:
    """1.1 * 10 is 11.000000000000002."""
    layer = delta_net(dim=30, num_heads=1, head_dim=10, expand_v=expand)
    assert layer.d_v == round(10 * expand)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"expand_k": 0.3, "head_dim": 8}, "expand_k.*0.3"),
        ({"expand_v": 0}, "expand_v.*0"),
        ({"conv_size": 0, "conv_bias": True}, "conv_bias.*True"),
        ({"num_heads": 5}, "num_heads.*5.*divisor of dim = 24"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads.*3.*divisor of num_heads = 4"),
        ({"beta": 2.5}, "beta.*2.5"),
        ({"beta": "tanh"}, "beta.*tanh"),
        ({"feature_map": "gelu"}, "feature_map.*gelu"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ZooConfigError, match=match):
        delta_net(**options)


def test_a_learned_feature_map_is_counted() -> None:
    path = "zoo.blocks.norms.RMSNorm"
    with pytest.raises(ZooConfigError, match="feature_map"):
        delta_net(feature_map={"name": path, "eps": -1})
    component = components.resolve("mixer", {"name": "delta_net", "num_heads": 1, "feature_map": path}, 24)
    layer = components.make("mixer", component, 24)
    assert component.options.num_params(24) == sum(parameter.numel() for parameter in layer.parameters())
