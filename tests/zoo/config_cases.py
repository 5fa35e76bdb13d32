"""What the tests of configurations share: small valid ones, what is read of one, and what a mistake is told."""

from pathlib import Path
from typing import Any

import pytest

from zoo.config import ModelConfig, resolve
from zoo.errors import ZooConfigError
from zoo.mixers.options import Component

Raw = dict[str, Any]

YAML = """\
vocab_size: 256
dim: 128
num_layers: 4
layers:
  pattern:
    - mixer:
        name: sliding_window
        window: 32
"""


def model(**changes: Any) -> Raw:
    """A small valid configuration with some top-level keys replaced."""
    layers = {"pattern": [{"mixer": "delta_net"}, {"mixer": {"name": "sliding_window", "window": 32}}]}
    return {"vocab_size": 256, "dim": 128, "num_layers": 4, "layers": layers, **changes}


def mixer(name: str, **options: Any) -> Raw:
    return model(layers={"pattern": [{"mixer": {"name": name, **options}}]})


def at(entries: Any) -> Raw:
    return model(layers={"pattern": [{"mixer": "delta_net"}], "at": entries})


def parts(config: ModelConfig, part: str = "mixer") -> list[Component]:
    return [getattr(layer.options, part) for layer in config.layers]


def options(config: ModelConfig, layer: int = 0, part: str = "mixer") -> Any:
    return parts(config, part)[layer].options


def names(config: ModelConfig) -> list[str]:
    return [component.name for component in parts(config)]


def message(source: Any, *overrides: str) -> str:
    with pytest.raises(ZooConfigError) as caught:
        resolve(source, overrides)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def at_message(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    text = message(path)
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")
