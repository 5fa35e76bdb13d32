"""A model's configuration: from a recipe, a file or a mapping, with overrides, to validated dataclasses and back."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml

from zoo import components, recipes
from zoo.errors import ZooConfigError, one_of
from zoo.layers import Layer, Override, expand, merge
from zoo.mixers.options import Between, Checked, Component, OptionError
from zoo.yaml_file import interpolate, parse_value, read_mapping

__all__ = ["ModelConfig", "Source", "resolve"]

Source = str | PathLike[str] | Mapping[str, Any]
"""A recipe's name, a path of a YAML file, or a mapping."""

_OVERRIDES = "layer_overrides"  # they ride along in the mapping, so that they may interpolate too


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(Checked):
    """A resolved language model.

    Attributes:
        name: of the architecture.
        vocab_size: number of token ids.
        dim: width of the residual stream.
        num_layers: number of blocks.
        norm: the norm in front of the head.
        layers: one block each.
        tie_embeddings: whether the head uses the embedding's matrix.
        activation_checkpointing: whether each block is computed again in the backward pass, to save memory.
    """

    name: str = "model"
    vocab_size: Annotated[int, Between(1, 2**31 - 1)]
    dim: Annotated[int, Between(1, 2**20)]
    num_layers: Annotated[int, Between(1, 10_000)]
    norm: Component
    layers: tuple[Component, ...]
    tie_embeddings: bool = False
    activation_checkpointing: bool = False

    @property
    def num_params(self) -> int:
        """Number of parameters, embeddings included."""
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.dim
        return embeddings + sum(part.options.num_params(self.dim) for part in (self.norm, *self.layers))

    def flops_per_token(self, length: int) -> float:
        """Forward FLOPs for each token of a sequence of ``length``; a training step takes three times as many."""
        head = 2 * self.dim * self.vocab_size
        return head + sum(layer.options.flops_per_token(self.dim, length) for layer in self.layers)

    def state_bytes(self, length: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of the decoding state of one sequence of up to ``length`` tokens."""
        return sum(layer.options.state_bytes(self.dim, length, dtype) for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration as plain values, which resolve to an equal one."""
        block = self.layers[0].name
        scalars = {key: getattr(self, key) for key in _KEYS}
        layers = [components.plain(layer) for layer in self.layers]
        for layer in layers:
            if layer["name"] == block:
                del layer["name"]
        return scalars | {"block": {"name": block, "norm": components.plain(self.norm)}, "layers": layers}

    def to_yaml(self) -> str:
        """The resolved configuration as YAML."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=10_000)


_KEYS = tuple(field.name for field in fields(ModelConfig) if field.name not in ("norm", "layers"))


def resolve(source: Source, overrides: Sequence[str] = (), *, trust_code: bool = True) -> ModelConfig:
    """Read, override, expand and validate a configuration.

    Args:
        source: a recipe's name, the path of a YAML file, or a mapping.
        overrides: ``key=value`` in order, the values in YAML: ``dim=512``, ``layers.3.mixer=full_attention``.
        trust_code: whether class paths may be imported.

    Raises:
        ZooConfigError: anything in it is unknown, missing, of the wrong type or out of range.
    """
    label, raw = _read(source)
    try:
        return _resolve(raw, [_parse(override) for override in overrides], trust_code)
    except ZooConfigError as error:
        error.source = error.source or label
        raise


def _read(source: Source) -> tuple[str, dict[Any, Any]]:
    if isinstance(source, Mapping):
        if not source:
            raise ZooConfigError("the mapping is empty", allowed="a mapping of keys", source="mapping")
        return "mapping", dict(source)
    name = fspath(source)
    if name in recipes.names():
        return name, read_mapping(recipes.path(name))
    if not Path(name).is_file():
        raise ZooConfigError(
            f"{name!r} is neither a recipe nor a file", allowed=f"a path, or one of {one_of(name, recipes.names())}"
        )
    return name, read_mapping(Path(name))


def _parse(text: str) -> Override:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        raise ZooConfigError(f"got {text!r}", key="override", allowed="KEY=VALUE, such as dim=512")
    return Override(tuple(key.split(".")), parse_value(value, key))


def _resolve(raw: dict[Any, Any], overrides: list[Override], trust_code: bool) -> ModelConfig:
    for override in overrides:
        if not override.addresses_a_layer:
            raw = _set(raw, override.path, override.value, "")
    single = [override for override in overrides if override.addresses_a_layer]
    raw = interpolate(raw | {_OVERRIDES: [override.value for override in single]})
    single = [Override(old.path, value) for old, value in zip(single, raw.pop(_OVERRIDES), strict=True)]
    scalars = _scalars(raw)
    dim = scalars["dim"]
    block = merge("pre_norm", raw.get("block") or {})
    norm = merge("rms_norm", block.get("norm") or {}) if isinstance(block, Mapping) else "rms_norm"
    layers = expand(raw["layers"], block, scalars["num_layers"], single)
    return ModelConfig(
        **scalars,
        norm=components.resolve("norm", norm, dim, key="block.norm", trust_code=trust_code),
        layers=tuple(_component(layer, dim, trust_code) for layer in layers),
    )


def _set(base: Any, path: tuple[str, ...], value: Any, parent: str) -> Any:
    """``base`` with the value at a path of keys and list indices merged in."""
    if not path:
        return merge(base, value)
    head, rest = path[0], path[1:]
    key = f"{parent}.{head}" if parent else head
    if isinstance(base, list):
        if not head.isdecimal() or int(head) >= len(base):
            raise ZooConfigError(f"{head!r} is no entry of the list", key=key, allowed=f"0 to {len(base) - 1}")
        changed = list(base)
        changed[int(head)] = _set(base[int(head)], rest, value, key)
        return changed
    if isinstance(base, str):
        base = {"name": base}
    if not isinstance(base, Mapping):
        base = {}
    return {**base, head: _set(base.get(head), rest, value, key)}


def _scalars(raw: dict[Any, Any]) -> dict[str, Any]:
    """The validated top-level values; layers and block are only known to be there."""
    known = (*_KEYS, "block", "layers")
    for key in raw:
        if key not in known:
            raise ZooConfigError("unknown key", key=str(key), allowed=one_of(key, known))
    required = {field.name for field in fields(ModelConfig) if field.default is MISSING} - {"norm"}
    for key in known:
        if raw.get(key) is None and (key in required or (key in raw and key != "block")):
            raise ZooConfigError("the value is missing", key=key)
    scalars = {key: raw[key] for key in _KEYS if key in raw}
    placeholder = {"norm": Component("", components.NoOptions()), "layers": ()}
    try:
        ModelConfig(**scalars, **placeholder)
    except OptionError as error:
        raise ZooConfigError(f"got {error.value!r}", key=error.key, allowed=error.allowed) from None
    return scalars


def _component(layer: Layer, dim: int, trust_code: bool) -> Component:
    try:
        return components.resolve("block", layer.values, dim, trust_code=trust_code)
    except ZooConfigError as error:
        error.key = layer.locate(error.key) if error.key else f"layers.{layer.index}"
        raise
