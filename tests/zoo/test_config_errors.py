"""Configurations: what each mistake is told."""

from pathlib import Path
from typing import Any

import pytest
from config_cases import YAML, Raw, at, at_message, message, mixer, model

from zoo.config import ModelConfig

WRONG_NAMES = {
    "dimm": (model(dimm=3), "unknown key; allowed: name, vocab_size, dim,", "'dim'"),
    "layers.patern": (model(layers={"patern": []}), "unknown key; allowed: pattern, at", "'pattern'"),
    "layers.pattern.0.mixer": (mixer("delta_nett"), "unknown mixer 'delta_nett'; allowed: delta_net,", "'delta_net'"),
    "layers.pattern.0.mixer.windw": (mixer("sliding_window", windw=3), "unknown option of sliding_window", "'window'"),
    "layers.pattern.0.nrom": (
        model(layers={"pattern": [{"mixer": "delta_net", "nrom": 3}]}),
        "unknown option of pre_norm; allowed: mixer, norm, mlp",
        "'norm'",
    ),
    "layers.pattern.1.mixr": (
        model(layers={"pattern": [{"mixer": "delta_net"}, {"mixr": "delta_net"}]}),
        "unknown option of pre_norm",
        "'mixer'",
    ),
    "layers.at.1.mixer.windw": (
        at({1: {"mixer": {"name": "sliding_window", "windw": 3}}}),
        "unknown option",
        "'window'",
    ),
    "layers.at.N//2.mixer.conv_sise": (at({"N//2": {"mixer": {"conv_sise": 3}}}), "unknown option", "'conv_size'"),
    "layers.3.mixer.windw": (
        model(layers=[{"mixer": "delta_net"}] * 3 + [{"mixer": {"name": "sliding_window", "windw": 3}}]),
        "unknown option",
        "'window'",
    ),
    "layers.pattern.0.mixer.feature_map": (mixer("delta_net", feature_map="sillu"), "unknown feature_map", "'silu'"),
    "block": (model(block="pre_nrom"), "unknown block 'pre_nrom'; allowed: pre_norm, a class path", "'pre_norm'"),
    "block.mpl": (model(block={"mpl": "gelu"}), "unknown option of pre_norm", "'mlp'"),
    "block.mlp": (model(block={"mlp": "gleu"}), "unknown mlp 'gleu'; allowed: swiglu, gelu", "'gelu'"),
    "block.mlp.hiddn_dim": (model(block={"mlp": {"hiddn_dim": 3}}), "unknown option of swiglu", "'hidden_dim'"),
    "block.norm": (model(block={"norm": "rmsnorm"}), "unknown norm 'rmsnorm'", "'rms_norm'"),
    "block.norm.epz": (
        model(block={"norm": {"name": "layer_norm", "epz": 3}}),
        "unknown option of layer_norm",
        "'eps'",
    ),
}


@pytest.mark.parametrize("key", WRONG_NAMES)
def test_a_wrong_name_is_told_its_path_and_what_was_meant(key: str) -> None:
    source, problem, meant = WRONG_NAMES[key]
    text = message(source)
    assert text.startswith(f"mapping: {key}: {problem}")
    assert text.endswith(f"(did you mean {meant}?)")


INT = "an integer at least 1"
WRONG_VALUES: list[tuple[Raw, str, str, str]] = [
    *((model(dim=x), "dim", f"got {x!r}", "an integer between 1") for x in ("x", True, 1.5, 0, -1, [1], {}, 10**9)),
    *((model(dim=x), "dim", f"got {x}", "an integer between 1") for x in (float("nan"), float("inf"))),
    *((model(num_layers=x), "num_layers", f"got {x!r}", "an integer between 1") for x in (0, -1, "4", True, 10**6)),
    (model(vocab_size=0), "vocab_size", "got 0", "an integer between 1 and 2147483647"),
    *((model(tie_embeddings=x), "tie_embeddings", f"got {x!r}", "true or false") for x in (1, "yes", [])),
    (model(activation_checkpointing=0), "activation_checkpointing", "got 0", "true or false"),
    *((model(name=x), "name", f"got {x!r}", "text") for x in (3, True, [], {})),
    *((mixer("sliding_window", window=x), "window", f"got {x!r}", INT) for x in (0, "x", True, 1.0, [3], None, {})),
    *((mixer("delta_net", num_heads=x), "num_heads", f"got {x!r}", f"{INT} or null") for x in (0, -2, "x", True)),
    (mixer("delta_net", head_dim=0), "head_dim", "got 0", INT),
    (mixer("delta_net", num_kv_heads=0), "num_kv_heads", "got 0", INT),
    (mixer("delta_net", num_heads=3), "num_heads", "got 3", "a divisor of dim = 128"),
    (mixer("delta_net", num_heads=4, num_kv_heads=3), "num_kv_heads", "got 3", "a divisor of num_heads = 4"),
    (mixer("full_attention", num_heads=2, head_dim=3), "head_dim", "got 3", "an even number, or rope: false"),
    *((mixer("delta_net", beta=x), "beta", f"got {x!r}", "'sigmoid', '2sigmoid' or a number between 0 and 2")
      for x in (2.1, -0.1, "x", True, None)),
    *((mixer("delta_net", beta=float(x)), "beta", f"got {x}", "a number between 0 and 2") for x in ("nan", "inf")),
    (mixer("delta_net", qk_norm="rms"), "qk_norm", "got 'rms'", "'l2', 'l1', 'none'"),
    (mixer("full_attention", qk_norm="l1"), "qk_norm", "got 'l1'", "'rms', 'l2', 'none'"),
    (mixer("delta_net", conv_size=-1), "conv_size", "got -1", "an integer between 0"),
    (mixer("delta_net", conv_size=0, conv_bias=True), "conv_bias", "got True", "false where conv_size is 0"),
    (mixer("delta_net", expand_v=0.3), "expand_v", "got 0.3", "whole"),
    *((mixer("full_attention", rope_theta=x), "rope_theta", f"got {x!r}", "a number at least 1") for x in ("x", 0)),
    *((mixer("full_attention", rope_theta=float(x)), "rope_theta", f"got {x}", "a number") for x in ("nan", "inf")),
    (mixer("full_attention", rope_theta=10**300 * 10**9), "rope_theta", "got 1000", "a number at least 1"),
    (mixer("full_attention", rope=1), "rope", "got 1", "true or false"),
    (mixer("full_attention", backend="fast"), "backend", "got 'fast'", "'auto'"),
    (mixer("delta_net", feature_map=3), "feature_map", "3 names no feature_map", "silu, relu, elu1, identity"),
    (mixer("delta_net", feature_map={"name": "silu", "x": 3}), "feature_map.x", "unknown option of silu", "none"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "key", "problem", "allowed"), WRONG_VALUES)
def test_a_wrong_value_is_told_with_what_is_allowed(source: Raw, key: str, problem: str, allowed: str) -> None:
    path = key if key in ModelConfig.__slots__ else f"layers.pattern.0.mixer.{key}"
    before, _, after = message(source).partition("; allowed: ")
    assert before.startswith(f"mapping: {path}: {problem}")
    assert allowed in after


WRONG_STRUCTURE: dict[str, list[tuple[Raw, str]]] = {
    "layers": [
        (model(layers="delta_net"), "got 'delta_net'; allowed: {pattern, at}, or a list"),
        (model(layers=[{"mixer": "delta_net"}] * 3), "the list has 3 entries; allowed: num_layers = 4 entries"),
        (model(layers=[]), "the list has 0 entries"),
    ],
    "layers.pattern": [(model(layers={"pattern": x}), f"got {x!r}; allowed: a list") for x in ([], None, {"mixer": 1})],
    "layers.pattern.0": [
        *((model(layers={"pattern": [x]}), f"got {x!r}; allowed: a mapping") for x in ("delta_net", None, [])),
        (model(layers={"pattern": [{"name": "blok"}]}), "unknown block 'blok'"),
    ],
    "layers.pattern.0.mixer": [
        (model(layers={"pattern": [{"mixer": x}]}), f"{x!r} names no mixer; allowed: delta_net, ")
        for x in (3, [1], {"window": 3}, True, {"name": None})
    ],
    "layers.at": [(at([1]), "got [1]; allowed: a mapping")],
    "layers.at.1": [(at({1: "full_attention"}), "got 'full_attention'; allowed: a mapping, such as {mixer: NAME}")],
    "block": [(model(block=x), f"got {x!r}; allowed: a block's name, or a mapping") for x in ([1], 3, False)],
    "block.norm": [(model(block={"norm": x}), f"{x!r} names no norm; allowed: rms_norm") for x in (3, [1])],
}


@pytest.mark.parametrize(("key", "case"), [(key, case) for key, cases in WRONG_STRUCTURE.items() for case in cases])
def test_a_wrong_structure_is_told_where(key: str, case: tuple[Raw, str]) -> None:
    assert message(case[0]).startswith(f"mapping: {key}: {case[1]}")


MISSING = {
    "vocab_size": model(vocab_size=None),
    "dim": {key: value for key, value in model().items() if key != "dim"},
    "num_layers": model(num_layers="???"),
    "name": model(name=None),
    "layers": {"vocab_size": 256, "dim": 128, "num_layers": 4},
    "layers.pattern.0.mixer": model(layers={"pattern": [{}]}),
    "layers.pattern.0.mixer.window": mixer("sliding_window", window="???"),
    "layers.pattern.0.mixer.feature_map": mixer("delta_net", feature_map=None),
    "layers.at.1.mixer": at({1: {"mixer": None}}),
    "block.norm": model(block={"norm": None}),
}


@pytest.mark.parametrize("key", MISSING)
def test_a_missing_value_is_told_with_what_is_allowed(key: str) -> None:
    assert message(MISSING[key]).startswith(f"mapping: {key}: the value is missing; allowed: ")


@pytest.mark.parametrize(("key", "index"), [(4, 4), ("N//2+2", 4), ("N//1", 4), ("N-5", -1), (999, 999)])
def test_an_index_past_the_end(key: Any, index: int) -> None:
    expected = f"mapping: layers.at.{key}: there is no layer {index}, num_layers is 4; allowed: 0 to 3"
    assert message(at({key: {"mixer": "full_attention"}})) == expected


NO_LAYER = [-1, "-1", True, False, 1.0, "1.5", "N", "N-0", "N//0", "N/2", "n//2", "N//2-1", "N // 2", " 1", "1_0", "x"]


@pytest.mark.parametrize("key", [*NO_LAYER, "", "\u0661", "9" * 30])
def test_a_key_that_names_no_layer(key: Any) -> None:
    assert "names no layer; allowed: an index from 0, N//k, N//k+j or N-j" in message(at({key: {"mixer": "delta_net"}}))


def test_the_place_that_gave_a_value_last_is_named() -> None:
    source = model(
        dim=200,
        layers={
            "pattern": [{"mixer": {"name": "sliding_window", "num_heads": 2}}],
            "at": {1: {"mixer": "full_attention"}},
        },
    )
    expected = "layers.at.1.mixer.num_heads: got None; allowed: a divisor of dim = 200 (the default, 3, is none)"
    assert message(source).startswith(f"mapping: {expected}")


@pytest.mark.parametrize("source", ["nope", "", "nope.yaml", "a\0b", "x" * 5000])
def test_neither_a_recipe_nor_a_file(source: str) -> None:
    name, _, problem = message(source).partition(": ")
    assert name[:9] == (source or "''")[:9]
    assert problem.startswith("neither a recipe nor a file; allowed: the path of a YAML file, ")


def test_an_unknown_recipe_is_told_what_was_meant() -> None:
    assert message("transformer-tinny").endswith("(did you mean 'transformer-tiny'?)")


def test_a_directory(tmp_path: Path) -> None:
    assert message(tmp_path).startswith(f"{tmp_path}: is a directory; allowed: the path of a YAML file, ")


@pytest.mark.parametrize("source", [None, 3, b"transformer-tiny", ["transformer-tiny"]])
def test_no_source_at_all(source: Any) -> None:
    assert "names no configuration; allowed: a recipe, the path of a YAML file, or a mapping" in message(source)


def test_an_empty_mapping() -> None:
    assert message({}) == "mapping: the mapping is empty; allowed: a mapping of keys"


def test_an_unreadable_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    file.write_text(YAML)
    monkeypatch.setattr(Path, "open", refuse)  # root may read whatever its mode says
    assert message(file) == f"{file}: cannot be read: Permission denied"


@pytest.mark.parametrize("content", ["", " \n\n", "# only this\n", "---\n", "---\n...\n", "\ufeff"])
def test_an_empty_file(file: Path, content: str) -> None:
    assert at_message(file, content) == "the file is empty; allowed: a mapping of keys"


@pytest.mark.parametrize("content", ["- a\n- b\n", "[]\n", "plain text\n", "3\n", "true\n", "null\n", "|\n dim: 3\n"])
def test_not_a_mapping(file: Path, content: str) -> None:
    assert at_message(file, content) == "not a mapping; allowed: a mapping of keys"


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
NOT_YAML = {
    "flow": (f"{YAML}block: [1,\n", "line 10, column 1: while parsing a flow node"),
    "indent": (f"{YAML}  x: 1\n y: 2\n", "line 10, column 2"),
    "two documents": (f"{YAML}---\n{YAML}", "line 9, column 1: expected a single document"),
    "duplicate": (f"{YAML}dim: 3\n", "line 9, column 1: while constructing a mapping found duplicate key dim"),
    "duplicate below": (f"{YAML}        window: 3\n", "line 9, column 9: while constructing a mapping found duplicate"),
    "NUL": (f"{YAML}\0", "unacceptable character #x0000"),
    "recursive": ("a: &a {b: *a}\n", "recursive aliases are not supported"),
    "bomb": (BOMB, "node expansion exceeds the configured limit"),
    "deep": (f"a: {'[' * 5000}{']' * 5000}", "nest"),
    "deep mapping": (f"a: {'{a: ' * 5000}1{'}' * 5000}", "nest"),
    "unknown tag": (f"{YAML}name: !foo bar\n", "could not determine a constructor"),
    "key": (f"{YAML}? [a]\n: 3\n", "found unhashable key"),
    "digits": (f"{YAML}name: {'9' * 5000}\n", "Exceeds the limit"),
    "interpolation": (f"{YAML}block: {{norm: ${{dim}}}}\n", "allowed: quotes around interpolations inside { } and [ ]"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_YAML)
def test_not_yaml(file: Path, case: str) -> None:
    content, problem = NOT_YAML[case]
    text = at_message(file, content)
    assert text.startswith("not valid YAML: ")
    assert problem in text


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:pathlib.Path.touch [{0}]", "!!python/object/new:open ['{0}', 'w']"]
)
def test_python_tags_execute_nothing(file: Path, tmp_path: Path, tag: str) -> None:
    assert "could not determine a constructor" in at_message(file, f"{YAML}name: {tag.format(tmp_path / 'ran')}\n")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_not_utf8(file: Path, encoding: str) -> None:
    assert at_message(file, f"{YAML}name: caf\u00e9\n".encode(encoding)).startswith("not UTF-8: ")


def test_a_huge_file(file: Path) -> None:
    assert at_message(file, YAML + "#" * (1 << 20)) == "the file is too large; allowed: at most 1048576 bytes"


def test_a_mapping_within_itself() -> None:
    loop: Raw = model()
    loop["block"] = loop
    assert message(loop) == "mapping: nested too deeply, or within itself"


@pytest.mark.parametrize("value", [object(), {1}, 10**400], ids=["object", "set", "integer"])
def test_a_python_value_that_no_yaml_has(value: Any) -> None:
    assert message(model(block={"norm": {"eps": value}})).startswith("mapping: block.norm.eps: ")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("${nowhere}", "Interpolation key 'nowhere' not found"),
        ("${name}", "Recursive interpolation detected"),
        ("${tie_embeddings}\ntie_embeddings: ${name}", "Recursive interpolation detected"),
        ("${dim", "no viable alternative at input '${dim'"),
        ("${foo:bar}", "Unsupported interpolation type foo"),
    ],
)
def test_a_bad_interpolation(file: Path, name: str, problem: str) -> None:
    text = at_message(file, f"{YAML}name: {name}\n")
    assert text.startswith(f"name: bad interpolation: {problem}; allowed: ${{KEY}} of a key in the configuration")


def test_an_interpolation_names_its_place(file: Path) -> None:
    content = YAML.replace("window: 32", "window: ${dimm}")
    assert at_message(file, content).startswith("layers.pattern.0.mixer.window: bad interpolation: ")
