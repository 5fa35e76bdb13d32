"""The recipes: what there is, which layers each has, and how large each is."""

from pathlib import Path
from typing import Any

import pytest

import zoo
from zoo import recipes
from zoo.config import ModelConfig, resolve

D, DF, F, S = "delta_net", "deltaformer", "full_attention", "sliding_window"
KINDS = {
    "transformer": [F],
    "deltanet": [D],
    "deltanet-swa": [D, S],
    "deltaformer": [DF],
    "deltaformer-swa": [DF, S],
    "swa-full": [S, S, S, F],
}  # repeated
FAMILIES = (*KINDS, "deltanet-global")
ALL = [f"{family}-{size}" for family in FAMILIES for size in recipes.SIZES]
SHAPES = {"tiny": (4, 128, 384, 256, 32), "340m": (24, 1024, 2816, 32000, 1024), "1.3b": (24, 2048, 5632, 32000, 1024)}


def parts(config: ModelConfig, part: str) -> list[Any]:
    return [getattr(layer.options, part) for layer in config.layers]


def test_there_are_these_recipes() -> None:
    assert set(recipes.names()) == set(zoo.list(kind="recipe")) == set(ALL)


def test_small_sizes_come_first() -> None:
    sizes = [name.rpartition("-")[2] for name in recipes.names()]
    assert sizes == sorted(sizes, key=recipes.SIZES.index)


@pytest.mark.parametrize("name", ALL)
def test_the_file_says_its_name_and_what_it_is(name: str) -> None:
    assert resolve(name).name == name
    assert recipes.path(name).read_text().startswith("# ")


@pytest.mark.parametrize("name", ALL)
def test_layers(name: str) -> None:
    family, _, size = name.rpartition("-")
    config = resolve(name)
    found = [mixer.name for mixer in parts(config, "mixer")]
    count = SHAPES[size][0]
    if family == "deltanet-global":
        assert [index for index, kind in enumerate(found) if kind == F] == [1, count // 2]
        assert set(found) == {D, F}
    else:
        assert found == (KINDS[family] * count)[:count]


@pytest.mark.parametrize("name", ALL)
def test_shape(name: str) -> None:
    config = resolve(name)
    num_layers, dim, hidden_dim, vocab_size, window = SHAPES[name.rpartition("-")[2]]
    assert (config.num_layers, config.dim, config.vocab_size) == (num_layers, dim, vocab_size)
    assert not config.tie_embeddings
    assert {(mlp.name, mlp.options.hidden_dim) for mlp in parts(config, "mlp")} == {("swiglu", hidden_dim)}
    for mixer in parts(config, "mixer"):
        assert getattr(mixer.options, "window", window) == window
        num_heads, num_kv_heads, head_dim = mixer.options.heads
        assert (num_heads * head_dim, num_kv_heads) == (dim, num_heads)
        assert head_dim == (128 if mixer.name == D else 64)


@pytest.mark.parametrize("name", ALL)
def test_size(name: str) -> None:
    config = resolve(name)
    model = zoo.build(name, device="meta")
    assert config.num_params == sum(parameter.numel() for parameter in model.parameters())
    target = {"340m": 374e6, "1.3b": 1.36e9}.get(name.rpartition("-")[2])
    assert target is None or config.num_params == pytest.approx(target, rel=0.02)


@pytest.mark.parametrize("size", recipes.SIZES)
def test_recipes_of_one_size_are_within_two_percent(size: str) -> None:
    counts = [resolve(f"{family}-{size}").num_params for family in FAMILIES]
    assert max(counts) <= 1.02 * min(counts)


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_resolves_to_itself(name: str, tmp_path: Path) -> None:
    config = resolve(name)
    file = tmp_path / "resolved.yaml"
    file.write_text(config.to_yaml())
    assert resolve(config.to_dict()) == resolve(file) == config
    assert hash(resolve(file)) == hash(config)
