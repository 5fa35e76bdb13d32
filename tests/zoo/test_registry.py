"""The registry: what exists, what users add, and which class paths are followed."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo import recipes, registry
from zoo.blocks.pre_norm import PreNorm
from zoo.config import ModelConfig, resolve
from zoo.errors import ZooConfigError
from zoo.mixers.contract import Mixer
from zoo.mixers.options import Component, NoOptions, Options, component

PACKAGE = """
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn

from zoo.mixers.contract import Mixer
from zoo.mixers.options import AtLeast, Options


@dataclass(frozen=True, kw_only=True, slots=True)
class MineOptions(Options):
    width: Annotated[int, AtLeast(1)]
    scale: float = 1.0

    def resolve(self, dim):
        if dim % self.width:
            raise ValueError("width does not divide dim")
        return self

    def num_params(self, dim):
        return dim * dim


class Mine(Mixer):
    Config = MineOptions

    def __init__(self, options, dim):
        super().__init__()
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.scale = options.scale

    def forward(self, x, context, state=None):
        return self.scale * self.out_proj(x), state

    def init_state(self, batch_size, max_length, device, dtype):
        return {}


@dataclass
class Plain:
    width: int = 3


class Planned(Mine):
    Config = Plain


@dataclass(frozen=True, kw_only=True, slots=True)
class NameOptions(Options):
    name: str = "x"


class Named(Mine):
    Config = NameOptions


class Nothing(Mine):
    Config = None


class Unfinished(Mixer):
    def forward(self, x, context, state=None):
        return x, state


class NotAMixer(nn.Module):
    pass


a_function = len
"""


class Copy(Mixer):
    """Give back what comes in.

    More about it.
    """

    def __init__(self, options: NoOptions, dim: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, context: Any, state: Any = None) -> tuple[Tensor, Any]:
        return x, state

    def init_state(
        self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        return {}


@pytest.fixture
def registered() -> Any:
    """The entries, put back as they were afterwards."""
    entries = registry._entries()
    before = dict(entries)
    yield entries
    entries.clear()
    entries.update(before)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module of ``mypkg``, a package on the path; its modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mypkg").mkdir()

    def write(name: str, text: str) -> None:
        (tmp_path / "mypkg" / f"{name}.py").write_text(text)

    write("__init__", "")
    write("mixers", PACKAGE)
    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "mypkg"]:
        del sys.modules[name]


def model(mixer: Any, **changes: Any) -> dict[str, Any]:
    return {"vocab_size": 64, "dim": 32, "num_layers": 1, "layers": [{"mixer": mixer}], **changes}


def chosen(config: ModelConfig) -> Component:
    options: Any = config.layers[0].options
    return options.mixer


def message(source: Any, **arguments: Any) -> str:
    with pytest.raises(ZooConfigError) as caught:
        resolve(source, **arguments)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


@pytest.mark.parametrize("entry", registry.entries(), ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_every_entry_is_complete(entry: registry.Entry) -> None:
    assert issubclass(entry.load(), Mixer if entry.kind == "mixer" else nn.Module)
    assert entry.summary
    assert set(entry.supports) <= set(registry.CAPABILITIES)
    assert "." not in entry.name


def test_kinds() -> None:
    assert registry.kinds() == ("mixer", "block", "norm", "mlp", "feature_map")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("mixer", {"delta_net", "full_attention", "sliding_window"}),
        ("block", {"pre_norm"}),
        ("norm", {"rms_norm", "layer_norm"}),
        ("mlp", {"swiglu", "gelu"}),
        ("feature_map", {"silu", "relu", "elu1", "identity"}),
        ("recipe", {"deltanet-tiny", "transformer-340m", "swa-full-1.3b"}),
    ],
)
def test_list_by_kind(kind: str, names: set[str]) -> None:
    assert names <= set(zoo.list(kind=kind))
    assert set(zoo.list(kind=kind)) <= set(zoo.list())


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("delta_n*", ["delta_net"]),
        ("*_attention", ["full_attention"]),
        ("deltanet-t?ny", ["deltanet-tiny"]),
        ("[rs]*lu", ["silu", "relu"]),
        ("nothing*", []),
        ("Delta_net", []),
    ],
)
def test_list_with_wildcards(pattern: str, names: list[str]) -> None:
    assert sorted(set(zoo.list(pattern)) - {"swiglu"}) == sorted(names)


def test_list_holds_everything_once() -> None:
    assert zoo.list() == [entry.name for entry in registry.entries()] + recipes.names()
    assert zoo.list("delta*", kind="recipe") == [name for name in recipes.names() if name.startswith("delta")]


def test_list_of_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match=r"kind: got 'mixr', allowed: recipe, mixer, .* \(did you mean 'mixer'\?\)"):
        zoo.list(kind="mixr")


def test_register_mixer(registered: Any) -> None:
    assert zoo.register_mixer("copy", paper="0000.00000", supports=("packed",))(Copy) is Copy
    entry = registered["mixer", "copy"]
    assert (entry.summary, entry.paper, entry.supports) == ("Give back what comes in.", "0000.00000", ("packed",))
    assert zoo.list("copy") == ["copy"]
    config = resolve(model("copy"))
    assert chosen(config) == Component("copy", NoOptions())
    assert resolve(config.to_dict(), trust_code=False) == config
    assert zoo.build(config.to_dict())(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 64)


def test_what_is_registered_is_suggested(registered: Any) -> None:
    zoo.register_mixer("copy")(Copy)
    assert message(model("cpoy")).endswith(", copy, a class path (did you mean 'copy'?)")


def test_register_another_kind(registered: Any) -> None:
    zoo.register("norm", "no_norm")(nn.Identity)
    assert resolve(model("full_attention", block={"norm": "no_norm"})).norm == Component("no_norm", NoOptions())


@pytest.mark.parametrize(
    "changes", [{"block": {"name": "twin", "norm": "layer_norm"}}, {"layers": [{"name": "twin", "mixer": "delta_net"}]}]
)
def test_a_block_of_another_name_resolves_to_itself(registered: Any, changes: dict[str, Any]) -> None:
    zoo.register("block", "twin")(PreNorm)
    config = resolve(model("delta_net", **changes))
    assert config.layers[0].name == "twin"
    assert resolve(config.to_dict()) == config


@pytest.mark.parametrize("name", ["delta_net", "copy"])
def test_a_duplicate(registered: Any, name: str) -> None:
    zoo.register_mixer("copy")(Copy)
    with pytest.raises(ValueError, match=f"name: a mixer called '{name}' exists already"):
        zoo.register_mixer(name)(Copy)


def test_a_duplicate_between_two_decorators(registered: Any) -> None:
    first, second = zoo.register_mixer("copy"), zoo.register_mixer("copy")
    first(Copy)
    with pytest.raises(ValueError, match="a mixer called 'copy' exists already"):
        second(Copy)


def test_one_name_may_serve_two_kinds(registered: Any) -> None:
    zoo.register("norm", "delta_net")(nn.Identity)
    assert len(zoo.list("delta_net")) == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"kind": "mixr", "name": "x"}, r"kind: got 'mixr', allowed: .*did you mean 'mixer'"),
        ({"kind": "recipe", "name": "x"}, "kind: got 'recipe'"),
        *(({"kind": "mixer", "name": name}, "name: got .*without a dot") for name in ("", "a.b", None, 3, Copy)),
        ({"kind": "mixer", "name": "x", "supports": ("decod",)}, r"supports: got 'decod'.*did you mean 'decode'"),
    ],
)
def test_bad_registrations(registered: Any, arguments: dict[str, Any], problem: str) -> None:
    before = dict(registered)
    with pytest.raises(ValueError, match=problem):
        zoo.register(**arguments)
    assert registered == before


@dataclass
class Unchecked:
    """Options that know nothing of the zoo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Names(Options):
    """Options of which one cannot be told from the component's name."""

    name: str = "x"


@pytest.mark.parametrize(
    ("cls", "problem"),
    [
        (nn.Linear, "is no mixer; allowed: a subclass of zoo.mixers.contract.Mixer"),
        (len, "is no mixer"),
        (Mixer, "is abstract; allowed: a class that defines forward, init_state"),
        (type("A", (Copy,), {"Config": Unchecked}), "Config is .*allowed: a dataclass derived from zoo.mixers.options"),
        (type("B", (Copy,), {"Config": None}), "Config is None; allowed: a dataclass derived from zoo.mixers.options"),
        (type("C", (Copy,), {"Config": Names}), "Config has the option 'name'"),
    ],
)
def test_bad_classes_are_not_registered(registered: Any, cls: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        zoo.register_mixer("x")(cls)
    assert ("mixer", "x") not in registered


def test_a_component_of_a_users_own(registered: Any) -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class MapOptions(Options):
        feature_map: Component = component("feature_map")

    class Mapped(Copy):
        Config = MapOptions

        def __init__(self, options: Any, dim: int, feature_map: Callable[[], nn.Module]) -> None:
            super().__init__(options, dim)
            self.feature_map = feature_map()

    zoo.register_mixer("mapped")(Mapped)
    assert message(model("mapped")).startswith(
        "mapping: layers.0.mixer.feature_map: the value is missing; allowed: silu"
    )
    built = zoo.build(model({"name": "mapped", "feature_map": "relu"}))
    assert isinstance(built.mixers()[0].feature_map, nn.ReLU)


def test_a_class_path(package: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "{vocab_size: 64, dim: 32, num_layers: 1, layers: [{mixer: {name: mypkg.mixers.Mine, width: 8, scale: 0.5}}]}"
    )
    config = resolve(file)
    assert chosen(config).name == "mypkg.mixers.Mine"
    built = zoo.build(file)
    assert sum(p.numel() for p in built.parameters()) == config.num_params
    file.write_text(config.to_yaml())
    assert resolve(file) == config


@pytest.mark.parametrize(
    ("mixer", "problem"),
    [
        ({"name": "mypkg.mixers.Mine", "width": 0}, ".width: got 0; allowed: an integer at least 1"),
        (
            {"name": "mypkg.mixers.Mine", "widht": 8},
            ".widht: unknown option of mypkg.mixers.Mine; allowed: width, scale",
        ),
        ("mypkg.mixers.Mine", ".width: the value is missing; allowed: an integer at least 1"),
        ({"name": "mypkg.mixers.Mine", "width": 3}, ": width does not divide dim"),
        ("mypkg.mixers.Planned", ": mypkg.mixers.Planned.Config is <class 'mypkg.mixers.Plain'>; allowed: a dataclass"),
        ("mypkg.mixers.Nothing", ": mypkg.mixers.Nothing.Config is None; allowed: a dataclass derived from zoo.mixers"),
        ("mypkg.mixers.Named", ": mypkg.mixers.Named.Config has the option 'name'; allowed: "),
        ("mypkg.mixers.Unfinished", ": mypkg.mixers.Unfinished is abstract; allowed: a class that defines init_state"),
        (
            "mypkg.mixers.NotAMixer",
            ": mypkg.mixers.NotAMixer is no mixer; allowed: a subclass of zoo.mixers.contract.Mixer",
        ),
        ("mypkg.mixers.a_function", ": mypkg.mixers.a_function is no mixer"),
        ("os.path", ": os.path is no mixer"),
        ("mypkg.mixers.Mein", ": cannot import 'mypkg.mixers.Mein': AttributeError: module 'mypkg.mixers' has no"),
        ("mypkg.nowhere.Mine", ": cannot import 'mypkg.nowhere.Mine': ModuleNotFoundError: No module named"),
        ("torch.nn.Linear", ": torch.nn.Linear is no mixer"),
        *((path, f": cannot import {path!r}: ") for path in (".", "a.", ".a", "a..b", "mypkg/mixers.Mine")),
    ],
)
def test_bad_class_paths(package: Any, mixer: Any, problem: str) -> None:
    assert message(model(mixer)).startswith(f"mapping: layers.0.mixer{problem}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise RuntimeError('on\\nimport')", "RuntimeError: on import"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("x = (", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_fails_on_import(package: Any, text: str, problem: str) -> None:
    package("broken", text)
    assert message(model("mypkg.broken.Mine")).startswith(
        f"mapping: layers.0.mixer: cannot import 'mypkg.broken.Mine': {problem}"
    )


PATH = "mypkg.effect.Mine"


@pytest.mark.parametrize(
    ("key", "source"),
    [
        ("layers.0.mixer", model(PATH)),
        ("layers.0.mixer.feature_map", model({"name": "delta_net", "feature_map": PATH})),
        ("layers.0.mlp", model("delta_net", layers=[{"mixer": "delta_net", "mlp": PATH}])),
        ("layers.0", model("delta_net", layers=[{"name": PATH, "mixer": "delta_net"}])),
        ("block", model("delta_net", block=PATH)),
        ("block.norm", model("delta_net", block={"norm": PATH})),
    ],
)
def test_nothing_is_imported_without_trust(package: Any, tmp_path: Path, key: str, source: dict[str, Any]) -> None:
    package("effect", f"open({str(tmp_path / 'effect')!r}, 'w').close()\nfrom mypkg.mixers import Mine")
    text = message(source, trust_code=False)
    assert text.startswith(f"mapping: {key}: '{PATH}' is a class path, which is imported only from trusted files")
    assert not [name for name in sys.modules if name.startswith("mypkg")]
    assert not (tmp_path / "effect").exists()
    with pytest.raises(ZooConfigError):
        resolve(source)
    assert (tmp_path / "effect").exists()


def test_names_need_no_trust() -> None:
    assert resolve("deltanet-tiny", trust_code=False) == resolve("deltanet-tiny")
