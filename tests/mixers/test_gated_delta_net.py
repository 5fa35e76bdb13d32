"""Gated DeltaNet's own: the decay, its initialisation, and the layer written out.

Shapes: D model width, d_k and d_v sizes of a key and a value.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from zoo import components
from zoo.mixers.context import Context
from zoo.mixers.delta_net import DeltaNet
from zoo.mixers.feature_maps import Decay

D = 24
Q, K, V, BETA, DECAY, GATE = range(6)


def build(name: str = "gated_delta_net", **options: Any) -> Any:
    return components.make("mixer", components.resolve("mixer", {"name": name} | options, D), D)


def mix(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, Context.from_tokens(x[..., 0]))[0]


def rows(layer: DeltaNet, part: int) -> Tensor:
    """The fused projection's rows of one part, a view."""
    return layer.in_proj.weight.split(layer.options.projected)[part]


def assert_started(decay: Decay) -> None:
    """Within the ranges of Mamba-2; the bounds allow for float32."""
    rate, step = decay.A_log.exp(), F.softplus(decay.dt_bias)
    assert 0.999 < rate.min() < rate.max() < 16.001
    assert 0.999e-3 < step.min() < step.max() < 0.1001


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_decay_is_the_formula(dtype: torch.dtype) -> None:
    decay, logits = Decay(3).to(dtype), torch.randn(2, 7, 3, dtype=dtype)
    g, x = decay(logits), logits.double() + decay.dt_bias.double()
    assert g.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(g.double(), -decay.A_log.double().exp() * x.exp().log1p(), rtol=1e-6, atol=0)


def test_decay_never_grows() -> None:
    logits = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])[:, None]
    g = Decay(1)(logits)
    assert (g <= 0).all()
    assert torch.isfinite(g).all()


def test_decay_starts_as_in_mamba2() -> None:
    decay = Decay(4096)
    assert_started(decay)
    assert decay.A_log.exp().mean().item() == pytest.approx(8.5, abs=0.5)
    assert F.softplus(decay.dt_bias).log().mean().item() == pytest.approx(math.log(0.01), abs=0.1)


def test_the_model_leaves_the_start_of_the_decay_alone() -> None:
    layers = [{"mixer": {"name": "gated_delta_net", "num_heads": 4}}]
    config = {"vocab_size": 37, "dim": D, "num_layers": 1, "layers": layers}
    model = zoo.build(config, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.reset_parameters()
    (decay,) = (module for module in model.modules() if isinstance(module, Decay))
    assert_started(decay)


def test_equals_the_layer_written_out() -> None:
    """Two query heads read one memory."""
    layer = build(num_heads=2, num_kv_heads=1, expand_v=2).double()
    x, (d_k, d_v) = torch.randn(3, 21, D, dtype=torch.float64), (12, 24)
    parts = [x @ rows(layer, part).t() for part in range(6)]
    for part, taps in zip((Q, K, V), layer.conv.weight.split(layer.qkv_widths, 1), strict=True):
        padded = F.pad(parts[part].mT, (3, 0))
        parts[part] = F.silu(F.conv1d(padded, taps.flip(0).t()[:, None], groups=taps.shape[1]).mT)
    q, k = (y / (y.square().sum(-1, True) + 1e-6).sqrt() for y in (parts[Q].unflatten(-1, (2, d_k)), parts[K]))
    g = -layer.decay.A_log.exp() * F.softplus(parts[DECAY] + layer.decay.dt_bias)
    state, reads = torch.zeros(3, d_k, d_v, dtype=torch.float64), []
    for t in range(21):
        key, value, beta = k[:, t, :, None], parts[V][:, t, None], parts[BETA][:, t, :, None].sigmoid()
        state = g[:, t, :, None].exp() * (torch.eye(d_k) - beta * key * key.mT) @ state + beta * key * value
        reads.append(d_k**-0.5 * q[:, t] @ state)
    o = F.rms_norm(torch.stack(reads, 1), (d_v,), layer.norm.weight, 1e-6).flatten(-2) * F.silu(parts[GATE])
    torch.testing.assert_close(mix(layer, x), o @ layer.out_proj.weight.t(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("output_gate", [True, False])
def test_without_decay_it_is_delta_net(output_gate: bool) -> None:
    gated, plain = (build(name, num_heads=2, output_gate=output_gate) for name in ("gated_delta_net", "delta_net"))
    weights = {name: value for name, value in gated.state_dict().items() if not name.startswith("decay.")}
    weights["in_proj.weight"] = torch.cat([rows(gated, part) for part in range(6) if part != DECAY])
    plain.load_state_dict(weights)
    nn.init.constant_(gated.decay.A_log, -math.inf)
    x = torch.randn(2, 70, D)
    torch.testing.assert_close(mix(gated, x), mix(plain, x))


@torch.no_grad()
@pytest.mark.parametrize("token", [1, 64, 100])
@pytest.mark.parametrize("logit", [0.0, 1000.0])
def test_a_huge_decay_forgets(token: int, logit: float) -> None:
    """Channel 0 of x reaches the decay alone."""
    layer, x = build(num_heads=2, conv_size=0), torch.randn(2, 130, D)
    layer.in_proj.weight[:, 0] = 0
    rows(layer, DECAY)[:] = 0
    rows(layer, DECAY)[:, 0] = 1
    x[..., 0] = 0
    x[:, token, 0] = logit
    changed = x.clone()
    changed[:, :token, 1:] = torch.randn(2, token, D - 1)
    difference = (mix(layer, changed) - mix(layer, x))[:, token:].abs().max()
    assert difference < 1e-6 if logit else difference > 1e-3


def test_counts_the_decay() -> None:
    """Of two memories of 6 * 24 numbers."""
    values = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "expand_k": 0.5, "expand_v": 2, "output_gate": True}
    gated, plain = (
        components.resolve("mixer", {"name": name} | values, D).options for name in ("gated_delta_net", "delta_net")
    )
    assert gated.num_params(D) - plain.num_params(D) == 2 * D + 2 * 2
    assert gated.flops_per_token(D, 64) - plain.flops_per_token(D, 64) == 2 * 2 * D + 2 * 6 * 24
    assert gated.state_bytes(D, 64) == plain.state_bytes(D, 64)
