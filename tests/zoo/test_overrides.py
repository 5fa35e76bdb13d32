"""Overrides: what `key=value` changes, in which order, and what each mistake is told."""

from pathlib import Path
from typing import Any

import pytest

from zoo.config import ModelConfig, resolve
from zoo.errors import ZooConfigError

MODEL = {
    "vocab_size": 256,
    "dim": 128,
    "num_layers": 4,
    "layers": {
        "pattern": [{"mixer": "delta_net"}, {"mixer": {"name": "sliding_window", "window": 32, "num_heads": 4}}]
    },
}
GLOBAL = {**MODEL, "layers": {"pattern": [{"mixer": "delta_net"}], "at": {1: {"mixer": "full_attention"}}}}
LISTED = {**MODEL, "num_layers": 2, "layers": [{"mixer": "delta_net"}, {"mixer": "sliding_window"}]}
D, F, S = "delta_net", "full_attention", "sliding_window"


def names(config: ModelConfig) -> list[str]:
    return [layer["mixer"]["name"] for layer in config.to_dict()["layers"]]


def option(path: str, *overrides: str, source: Any = MODEL) -> Any:
    """``3.mixer.window`` of the resolved configuration; a component's name under ``name``."""
    layer, part, name = path.split(".")
    component = getattr(resolve(source, overrides).layers[int(layer)].options, part)
    return component.name if name == "name" else getattr(component.options, name)


def message(*overrides: Any, source: Any = MODEL) -> str:
    with pytest.raises(ZooConfigError) as caught:
        resolve(source, overrides)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text.removeprefix("mapping: ")


def test_num_layers_and_dim_come_before_the_pattern() -> None:
    assert names(resolve(MODEL, ["num_layers=8"])) == [D, S] * 4
    assert option("0.mixer.num_heads", "dim=512") == 4
    assert option("0.mlp.hidden_dim", "dim=512") == 1536
    assert names(resolve(GLOBAL, ["layers.at={N//2: {mixer: full_attention}}", "num_layers=6"])) == [D, F, D, F, D, D]


def test_the_name_of_the_model_resets_nothing() -> None:
    config = resolve(MODEL, ["name=foo"])
    assert config.name == "foo"
    assert config.layers == resolve(MODEL).layers


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["layers.pattern.1.mixer=full_attention"], [D, F, D, F]),
        (["layers.pattern.1.mixer.name=full_attention"], [D, F, D, F]),
        (["layers.pattern=[{mixer: full_attention}]"], [F] * 4),
        (["layers.pattern.0={mixer: full_attention}"], [F, S, F, S]),
        (["layers.at={1: {mixer: delta_net}}"], [D, D, D, S]),
        (["layers={at: {1: {mixer: delta_net}}}"], [D, D, D, S]),
        (["layers.3.mixer=full_attention"], [D, S, D, F]),
        (["layers.3={mixer: full_attention}"], [D, S, D, F]),
        (["layers.N-1.mixer=full_attention"], [D, S, D, F]),
        (["layers.N//2.mixer=full_attention"], [D, S, F, S]),
        (["layers.at.3.mixer=full_attention"], [D, S, D, F]),
        (["layers.3.mixer=delta_net", "layers.3.mixer=full_attention"], [D, S, D, F]),
        (["layers.at.3.mixer=delta_net", "layers.3.mixer=full_attention"], [D, S, D, F]),
        (["layers.3.mixer=delta_net", "layers.at.3.mixer=full_attention"], [D, S, D, F]),
        (["layers.7.mixer=full_attention", "num_layers=8"], [D, S, D, S, D, S, D, F]),
    ],
)
def test_mixers(overrides: list[str], expected: list[str]) -> None:
    assert names(resolve(MODEL, overrides)) == expected


def test_at_may_be_dropped_or_changed() -> None:
    assert names(resolve(GLOBAL, ["layers.at=null"])) == [D] * 4
    assert names(resolve(GLOBAL, ["layers.at.1.mixer.rope=false"])) == [D, F, D, D]
    assert option("1.mixer.rope", "layers.at.1.mixer.rope=false", source=GLOBAL) is False


def test_a_list_of_layers() -> None:
    assert names(resolve(LISTED, ["layers.0.mixer=full_attention"])) == [F, S]
    assert option("1.mixer.window", "layers.1.mixer.window=3", source=LISTED) == 3


@pytest.mark.parametrize(
    ("overrides", "name", "window", "num_heads"),
    [
        (["layers.3.mixer={name: sliding_window, window: 64}"], S, 64, 4),
        (["layers.3.mixer.window=512"], S, 512, 4),
        (["layers.3.mixer=sliding_window"], S, 1024, 2),
        (["layers.3.mixer=sliding_window", "layers.3.mixer.window=3"], S, 3, 2),
        (["layers.3.mixer.window=3", "layers.3.mixer=sliding_window"], S, 1024, 2),
        (["layers.pattern.1.mixer=sliding_window"], S, 1024, 2),
        (["layers.pattern.1.mixer=sliding_window", "layers.pattern.1.mixer.window=3"], S, 3, 2),
        (["layers.3.mixer=full_attention", "layers.3.mixer={name: sliding_window, window: 64}"], S, 64, 2),
        (["layers.3.mixer.name=sliding_window"], S, 32, 4),
        (["layers.3.mixer.window=5", "layers.3.mixer.window=6"], S, 6, 4),
    ],
)
def test_options_merge_under_one_name_and_a_name_resets(
    overrides: list[str], name: str, window: int, num_heads: int
) -> None:
    found = [option(f"3.mixer.{key}", *overrides) for key in ("name", "window", "num_heads")]
    assert found == [name, window, num_heads]


@pytest.mark.parametrize("source", [MODEL, {**MODEL, "block": {}}, {**MODEL, "block": "pre_norm"}, "transformer-tiny"])
def test_block(source: Any) -> None:
    assert resolve(source, ["block.norm.eps=1e-5"]).to_dict()["block"]["norm"] == {"name": "rms_norm", "eps": 1e-5}
    assert option("2.norm.eps", "block.norm.eps=1e-5", source=source) == 1e-5
    assert option("2.mlp.hidden_dim", "block.mlp.hidden_dim=77", source=source) == 77
    assert resolve(source, ["block.norm=layer_norm"]).norm.name == "layer_norm"
    assert option("2.norm.name", "block.norm=layer_norm", source=source) == "layer_norm"


def test_parts_of_one_layer() -> None:
    overrides = "layers.1.norm.eps=1e-3", "layers.1.mlp={name: gelu, hidden_dim: 9}"
    assert [option(f"{layer}.norm.eps", *overrides) for layer in (0, 1)] == [1e-6, 1e-3]
    assert [option(f"{layer}.mlp.name", *overrides) for layer in (0, 1)] == ["swiglu", "gelu"]
    assert option("1.mlp.hidden_dim", *overrides) == 9


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("layers.0.mixer.beta=2sigmoid", "0.mixer.beta", "2sigmoid"),
        ("layers.0.mixer.beta=1.5", "0.mixer.beta", 1.5),
        ("layers.0.mixer.qk_norm=none", "0.mixer.qk_norm", "none"),
        ("layers.0.mixer.num_heads=null", "0.mixer.num_heads", 1),
        (" layers.1.mixer.rope = no # comment", "1.mixer.rope", False),
        ("layers.1.mixer=\n  name: sliding_window\n  window: 7", "1.mixer.window", 7),
        ("layers.1.mixer.window=${dim}", "1.mixer.window", 128),
        ("layers.1.mixer={name: sliding_window, window: '${dim}'}", "1.mixer.window", 128),
        ("layers.pattern.1.mixer.window=${dim}", "1.mixer.window", 128),
        ("layers.1.mixer.window=${layers.pattern.1.mixer.num_heads}", "1.mixer.window", 4),
    ],
)
def test_values(override: str, path: str, value: Any) -> None:
    assert option(path, override) == value


def test_interpolation_sees_other_overrides() -> None:
    assert option("1.mixer.window", "layers.1.mixer.window=${dim}", "dim=64") == 64


def test_the_value_may_hold_an_equals_sign() -> None:
    assert resolve(MODEL, ["name=a=b"]).name == "a=b"


@pytest.mark.parametrize("override", ["dim", "=3", "", "a..b=3", ".dim=3", "dim.=3", 3, None])
def test_no_override(override: Any) -> None:
    assert message(override) == f"override: got {override!r}; allowed: KEY=VALUE, such as dim=512"


def test_one_text_for_a_list() -> None:
    with pytest.raises(ZooConfigError, match=r"^mapping: overrides: got 'dim=512'; allowed: a list of KEY=VALUE$"):
        resolve(MODEL, "dim=512")


@pytest.mark.parametrize(
    "key", ["dim", "num_layers", "layers", "layers.3.mixer", "block.norm", "layers.pattern.0.mixer"]
)
@pytest.mark.parametrize("value", ["", " ", "null", "???", "# nothing"])
def test_a_missing_value(key: str, value: str) -> None:
    assert message(f"{key}={value}").startswith(f"override {key}: the value is missing; allowed: ")


WRONG = {
    "dim=x": "dim: got 'x'; allowed: an integer between 1",
    "dim=1e3": "dim: got 1000.0; allowed: an integer between 1",
    "num_layers=0": "num_layers: got 0; allowed: an integer between 1",
    "num_layers=.inf": "num_layers: got inf; allowed: an integer between 1",
    "tie_embeddings=1": "tie_embeddings: got 1; allowed: true or false",
    "foo=3": "foo: unknown key; allowed: name, vocab_size",
    "layer_overrides=3": "layer_overrides: unknown key",
    "layers=3": "layers: got 3; allowed: {pattern, at}, or a list",
    "layers=[]": "layers: the list has 0 entries; allowed: num_layers = 4 entries",
    "layers.pattern.5.mixer=delta_net": "layers.pattern.5: '5' is no entry of the list; allowed: an index below 2",
    "layers.pattern.-1.mixer=delta_net": "layers.pattern.-1: '-1' is no entry of the list; allowed: an index below 2",
    "layers.pattern.0.mixer.windw=3": "layers.pattern.0.mixer.windw: unknown option of delta_net",
    "layers.pattern.0=delta_net": "layers.pattern.0: got 'delta_net'; allowed: a mapping",
    "layers.patern.0.mixer=delta_net": "layers.patern: 'patern' names no layer; allowed: an index from 0, N//k",
    "layers.4.mixer=delta_net": "layers.4: there is no layer 4, num_layers is 4; allowed: 0 to 3",
    "layers.at.9.mixer=delta_net": "layers.at.9: there is no layer 9, num_layers is 4; allowed: 0 to 3",
    "layers.N//2+2.mixer=delta_net": "layers.N//2+2: there is no layer 4, num_layers is 4; allowed: 0 to 3",
    "layers.-1.mixer=delta_net": "layers.-1: '-1' names no layer; allowed: an index from 0, N//k, N//k+j or N-j",
    "layers.True.mixer=delta_net": "layers.True: 'True' names no layer",
    "layers.3=full_attention": "layers.3: got 'full_attention'; allowed: a mapping, such as {mixer: NAME}",
    "layers.3.mixer=delta_nett": "layers.3.mixer: unknown mixer 'delta_nett'; allowed: delta_net",
    "layers.3.mixer=[delta_net]": "layers.3.mixer: ['delta_net'] names no mixer; allowed: delta_net",
    "layers.3.mixer.windw=3": "layers.3.mixer.windw: unknown option of sliding_window",
    "layers.3.mixer={name: sliding_window, windw: 3}": "layers.3.mixer.windw: unknown option of sliding_window",
    "layers.3.mixer.window=0": "layers.3.mixer.window: got 0; allowed: an integer at least 1",
    "layers.3.mixer.window.x=3": "layers.3.mixer.window: got {'x': 3}; allowed: an integer at least 1",
    "layers.3.mixer.num_kv_heads=3": "layers.3.mixer.num_kv_heads: got 3; allowed: a divisor of num_heads = 4",
    "layers.3.mxer=delta_net": "layers.3.mxer: unknown option of pre_norm; allowed: mixer, norm, mlp (did you",
    "layers.0.mixer.feature_map=sillu": "layers.0.mixer.feature_map: unknown feature_map 'sillu'",
    "layers.3.mixer.window=${dimm}": "layers.3.mixer.window: bad interpolation: Interpolation key 'dimm' not found",
    "layers.3.mixer={name: delta_net, beta: '${x}'}": "layers.3.mixer.beta: bad interpolation: ",
    "block=pre": "block: unknown block 'pre'; allowed: pre_norm",
    "block.norm.epz=3": "block.norm.epz: unknown option of rms_norm; allowed: eps",
    "block.norm.eps=x": "block.norm.eps: got 'x'; allowed: a number between 0 and 1",
    "block.mlp.hidden_dim=0": "block.mlp.hidden_dim: got 0; allowed: an integer at least 1 or null",
    "dim=[1": "dim: got '[1', not valid YAML: while parsing a flow sequence",
    "dim=a: b": "dim: got 'a: b', not valid YAML: mapping values are not allowed",
    "dim=1\nfoo: 2": "dim: got '1\\nfoo: 2'; allowed: one value, in YAML",
    "dim=${dim}": "dim: bad interpolation: Recursive interpolation detected",
    "name=${dim": "name: got '${dim', bad interpolation: ",
    "layers.3.mixer={beta: ${dim}}": "layers.3.mixer: got '{beta: ${dim}}', not valid YAML: ",
}  # fmt: skip


@pytest.mark.parametrize("override", WRONG)
def test_a_mistake_is_told_where_it_is(override: str) -> None:
    assert message(override).startswith(f"override {WRONG[override]}")


def test_the_order_of_overrides_and_the_layers_that_are_left() -> None:
    assert message("num_layers=2", "layers.3.mixer=delta_net").startswith("override layers.3: there is no layer 3")


def test_a_mistake_in_the_file_is_not_put_on_the_override() -> None:
    source = {**MODEL, "layers": {"pattern": [{"mixer": {"name": "delta_nett"}}]}}
    assert message("layers.0.mixer.beta=1", source=source).startswith("layers.pattern.0.mixer: unknown mixer")
    assert message("dim=7").startswith("layers.pattern.1.mixer.num_heads: got 4; allowed: a divisor of dim = 7")


def test_the_recipe_is_named() -> None:
    assert message("layers.3.mixer.window=3", source="transformer-tiny").startswith(
        "transformer-tiny: override layers.3.mixer.window: unknown option of full_attention"
    )


def test_python_tags_execute_nothing(tmp_path: Path) -> None:
    text = message(f"name=!!python/object/apply:pathlib.Path.touch [{tmp_path / 'ran'}]")
    assert "could not determine a constructor" in text
    assert not list(tmp_path.iterdir())
