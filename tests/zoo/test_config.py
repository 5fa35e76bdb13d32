"""Configurations: what one may say, and what is filled in."""

from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from config_cases import YAML, Raw, at, mixer, model, names, options
from omegaconf import OmegaConf

from zoo import registry
from zoo.config import resolve


@pytest.mark.parametrize(
    "source",
    [
        MappingProxyType(mixer("delta_net")),
        OmegaConf.create(mixer("delta_net")),
        model(layers=MappingProxyType({"pattern": ({"mixer": "delta_net"},)})),
    ],
)
def test_any_mapping_will_do(source: Any) -> None:
    assert options(resolve(source, ["layers.pattern.0.mixer.conv_size=0"])).conv_size == 0


def test_the_source_is_never_changed() -> None:
    source = model(block={"norm": "rms_norm"})
    before = deepcopy(source)
    resolve(source, ["dim=256", "layers.pattern.0.mixer.conv_size=2", "layers.3.mixer.window=3", "block.norm.eps=1e-3"])
    assert source == before


def test_interpolation(file: Path) -> None:
    file.write_text(YAML.replace("window: 32", "window: ${dim}"))
    assert options(resolve(file)).window == 128
    assert options(resolve(file, ["dim=64"])).window == 64


@pytest.mark.parametrize("num_layers", [1, 4, 5])
def test_the_pattern_repeats(num_layers: int) -> None:
    expected = ["delta_net", "sliding_window", "delta_net", "sliding_window", "delta_net"][:num_layers]
    assert names(resolve(model(num_layers=num_layers))) == expected


@pytest.mark.parametrize(
    ("key", "layer"),
    [
        (0, 0),
        ("3", 3),
        (7, 7),
        ("N//2", 4),
        ("N//3", 2),
        ("N//2+1", 5),
        ("N//9", 0),
        ("N//9+7", 7),
        ("N-1", 7),
        ("N-8", 0),
    ],
)
def test_at_addresses_one_layer(key: Any, layer: int) -> None:
    config = resolve(at({key: {"mixer": "full_attention"}}) | {"num_layers": 8})
    assert [i for i, name in enumerate(names(config)) if name == "full_attention"] == [layer]


def test_two_keys_of_one_layer_apply_in_order() -> None:
    first, second = {2: {"mixer": "full_attention"}}, {"N//2": {"mixer": "sliding_window"}}
    assert names(resolve(at(first | second)))[2] == "sliding_window"
    assert names(resolve(at(second | first)))[2] == "full_attention"


WINDOWED = {"mixer": {"name": "sliding_window", "window": 32, "num_heads": 4}}


@pytest.mark.parametrize(
    ("entry", "name", "window", "num_heads"),
    [
        ({"mixer": {"window": 3}}, "sliding_window", 3, 4),
        ({"mixer": {"name": "sliding_window", "window": 3}}, "sliding_window", 3, 4),
        ({"mixer": "sliding_window"}, "sliding_window", 1024, 2),
        ({"mixer": {"name": "full_attention", "rope": False}}, "full_attention", None, 2),
        ({"mlp": "gelu"}, "sliding_window", 32, 4),
    ],
)
def test_options_merge_under_one_name_and_a_name_resets(
    entry: Raw, name: str, window: int | None, num_heads: int
) -> None:
    config = resolve(model(layers={"pattern": [WINDOWED], "at": {1: entry}}))
    found = options(config, 1)
    assert (names(config)[1], getattr(found, "window", None), found.num_heads) == (name, window, num_heads)
    assert options(config, 0).window == 32


def test_block_gives_the_defaults_of_every_layer() -> None:
    block = {"mixer": "delta_net", "norm": "layer_norm", "mlp": {"hidden_dim": 77}}
    config = resolve(model(block=block, layers={"at": {1: {"norm": {"bias": True}, "mlp": "gelu"}}}))
    assert names(config) == ["delta_net"] * 4
    assert config.norm.name == "layer_norm"
    assert [options(config, layer, "norm").bias for layer in range(2)] == [False, True]
    assert [options(config, layer, "mlp").hidden_dim for layer in range(2)] == [77, 512]


@pytest.mark.parametrize("block", [None, {}, "pre_norm", {"name": "pre_norm"}])
def test_the_default_block(block: Any) -> None:
    assert resolve(model(block=block)) == resolve(model())


ATTENTION = {"qk_norm": "none", "rope": True, "rope_theta": 10000, "backend": "auto"}
DELTA_NET = {
    "beta": "sigmoid", "qk_norm": "l2", "conv_size": 4, "conv_bias": False, "output_gate": False,
    "expand_k": 1, "expand_v": 1,
}  # fmt: skip
DEFAULTS = {
    "delta_net": DELTA_NET,
    "gated_delta_net": {**DELTA_NET, "output_gate": True},
    "deltaformer": {
        "kappa1": "softmax", "kappa2": "softmax", "round_decimals": 0, "compare": "kk", "alpha": 1, "beta": "sigmoid",
        "qk_norm": "rms", "rope": True, "rope_theta": 10000, "conv_size": 0, "conv_bias": False,
    },
    "full_attention": ATTENTION,
    "sliding_window": {**ATTENTION, "window": 1024},
}  # fmt: skip


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name: str) -> None:
    found = options(resolve(mixer(name)))
    assert {key: getattr(found, key) for key in DEFAULTS[name]} == DEFAULTS[name]
    assert "delta_net" not in name or found.feature_map.name == "silu"


@pytest.mark.parametrize(
    ("name", "typical"),
    [
        ("delta_net", 128),
        ("gated_delta_net", 128),
        ("deltaformer", 64),
        ("full_attention", 64),
        ("sliding_window", 64),
    ],
)
def test_heads(name: str, typical: int) -> None:
    def heads(dim: int = 512, **given: int) -> tuple[int, int, int]:
        return options(resolve(mixer(name, **given) | {"dim": dim})).heads

    assert heads() == (512 // typical, 512 // typical, typical)
    assert heads(dim=32) == (1, 1, 32)
    assert heads(num_heads=2) == (2, 2, 256)
    assert heads(num_heads=4, head_dim=24) == (4, 4, 24)
    assert heads(head_dim=32) == (16, 16, 32)
    assert heads(num_heads=4, num_kv_heads=2) == (4, 2, 128)


def test_top_level_defaults() -> None:
    config = resolve(model())
    assert (config.name, config.tie_embeddings, config.activation_checkpointing) == ("model", False, False)
    assert (config.norm.name, options(config, part="norm").eps) == ("rms_norm", 1e-6)
    assert options(config, part="mlp").hidden_dim == 512  # 8/3 of 128, rounded up to a multiple of 256


HEADS = {"num_heads": 4, "head_dim": 16, "num_kv_heads": 2}
ATTENTION_OPTIONS = {**HEADS, "qk_norm": "rms", "rope": False, "rope_theta": 1e6, "backend": "sdpa"}
DELTA_NET_OPTIONS = {
    **HEADS, "beta": 1.5, "feature_map": "elu1", "qk_norm": "l1", "conv_size": 2, "conv_bias": True,
    "output_gate": True, "expand_k": 0.5, "expand_v": 2,
}  # fmt: skip
EVERY_OPTION: dict[str, Raw] = {
    "delta_net": DELTA_NET_OPTIONS,
    "gated_delta_net": {**DELTA_NET_OPTIONS, "output_gate": False},
    "deltaformer": {
        **HEADS, "kappa1": "relu", "kappa2": "round", "round_decimals": 2, "compare": "wk", "alpha": 0.5,
        "beta": "2sigmoid", "qk_norm": "none", "rope": False, "rope_theta": 1e6, "conv_size": 2, "conv_bias": True,
    },
    "full_attention": ATTENTION_OPTIONS,
    "sliding_window": {**ATTENTION_OPTIONS, "window": 7},
}  # fmt: skip


def every_option() -> Raw:
    layers = [
        {"mixer": {"name": name, **given}, "norm": {"name": "layer_norm", "eps": 1e-5, "bias": True}, "mlp": "gelu"}
        for name, given in EVERY_OPTION.items()
    ]
    block = {"norm": {"name": "layer_norm", "eps": 1e-7}, "mlp": {"name": "swiglu", "hidden_dim": 96}}
    top = {"name": "all: of #it", "tie_embeddings": True, "activation_checkpointing": True}
    return model(num_layers=len(layers), layers=layers, block=block, **top)


def test_every_option_is_tried() -> None:
    for name, given in EVERY_OPTION.items():
        cls: Any = registry.find("mixer", name).load()
        assert set(given) == {option.name for option in fields(cls.Config)}


@pytest.mark.parametrize("source", [model(), every_option(), model(num_layers=300)], ids=["plain", "every", "deep"])
def test_a_resolved_configuration_resolves_to_itself(source: Raw, file: Path) -> None:
    config = resolve(source)
    file.write_text(config.to_yaml())
    assert resolve(config.to_dict()) == resolve(file) == config
    assert resolve(file).to_yaml() == config.to_yaml()
    assert hash(resolve(file)) == hash(config)


def test_resolved_layers_say_everything() -> None:
    saved = resolve(every_option()).to_dict()
    assert [layer["mixer"] for layer in saved["layers"]] == [{"name": n, **o} for n, o in EVERY_OPTION.items()]
    assert saved["block"]["norm"] == {"name": "layer_norm", "eps": 1e-7, "bias": False}


@pytest.mark.parametrize("number", ["1e-6", "1.0e-06", "0.000001", "1E-6"])
def test_small_numbers_survive(number: str, file: Path) -> None:
    file.write_text(f"{YAML}block: {{norm: {{eps: {number}}}}}\n")
    config = resolve(file)
    file.write_text(config.to_yaml())
    assert options(config, part="norm").eps == options(resolve(file), part="norm").eps == 1e-6


def test_different_configurations_differ() -> None:
    assert resolve(model()) != resolve(model(name="other"))
    assert resolve(model()) != resolve(model(), ["layers.3.mixer.window=31"])
