"""A model's configuration: from a recipe, a file or a mapping, with overrides, to validated dataclasses and back."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from os import PathLike, fspath
from os.path import isdir, isfile
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml

from zoo import components, recipes
from zoo.errors import ZooConfigError, one_of
from zoo.layers import Layer, Override, expand, merge
from zoo.mixers.options import Between, Checked, Component, OptionError, check, describe
from zoo.yaml_file import interpolate, parse_value, plain_mapping, read_mapping, refuse_interpolation

__all__ = ["ModelConfig", "Source", "resolve"]

Source = str | PathLike[str] | Mapping[str, Any]
"""A recipe's name, a path of a YAML file, or a mapping."""

_BLOCK, _NORM = "pre_norm", "rms_norm"
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
    num_layers: Annotated[int, Between(1, 1000)]
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
        scalars = {key: getattr(self, key) for key in _KEYS}
        layers = [
            ({} if layer.name == _BLOCK else {"name": layer.name}) | components.plain_options(layer)
            for layer in self.layers
        ]
        return scalars | {"block": {"name": _BLOCK, "norm": components.plain(self.norm)}, "layers": layers}

    def to_yaml(self) -> str:
        """The resolved configuration as YAML."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=10_000)


_KEYS = tuple(field.name for field in fields(ModelConfig) if field.name not in ("norm", "layers"))
_REQUIRED = (
    *(field.name for field in fields(ModelConfig) if field.name in _KEYS and field.default is MISSING),
    "layers",
)


def resolve(source: Source, overrides: Sequence[str] = (), *, trust_code: bool = True) -> ModelConfig:
    """Read, override, expand and validate a configuration.

    Args:
        source: a recipe's name, the path of a YAML file, or a mapping.
        overrides: ``key=value`` in order, the values in YAML: ``dim=512``, ``layers.3.mixer=full_attention``.
        trust_code: whether class paths may be imported and ``${...}`` be followed.

    Raises:
        ZooConfigError: anything in it is unknown, missing, of the wrong type or out of range.
    """
    label = "mapping" if isinstance(source, Mapping) else str(source) or "''"
    parsed: list[Override] = []
    try:
        raw = _read(source)
        if not trust_code:
            refuse_interpolation(raw)
        if isinstance(overrides, str):
            raise ZooConfigError(f"got {overrides!r}", key="overrides", allowed="a list of KEY=VALUE")
        parsed += map(_parse, overrides)
        return _resolve(raw, parsed, trust_code)
    except ZooConfigError as error:
        error.source = error.source or label
        if any(f"{error.key}.".startswith(f"{override.key}.") for override in parsed if not override.depth):
            error.key = f"override {error.key}"
        raise


def _read(source: Source) -> dict[Any, Any]:
    if isinstance(source, Mapping):
        if not source:
            raise ZooConfigError("the mapping is empty", allowed="a mapping of keys")
        return plain_mapping(source)
    name = fspath(source) if isinstance(source, str | PathLike) else None
    if not isinstance(name, str):
        raise ZooConfigError("names no configuration", allowed="a recipe, the path of a YAML file, or a mapping")
    if name in recipes.names():
        path = recipes.path(name)
    elif isfile(name):
        path = Path(name)
    else:
        problem = "is a directory" if isdir(name) else "neither a recipe nor a file"
        raise ZooConfigError(problem, allowed=one_of(name, ["the path of a YAML file", *recipes.names()]))
    return read_mapping(path)


def _parse(text: str) -> Override:
    key, equals, value = text.partition("=") if isinstance(text, str) else ("", "", "")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ZooConfigError(f"got {text!r}", key="override", allowed="KEY=VALUE, such as dim=512")
    try:
        return Override(path, parse_value(value))
    except ZooConfigError as error:
        error.key = f"override {key.strip()}"
        raise


def _resolve(raw: dict[Any, Any], overrides: list[Override], trust_code: bool) -> ModelConfig:
    for override in overrides:
        if not override.depth:
            head, *rest = override.path
            raw = {**raw, head: _set(raw.get(head), rest, override.value, head)}
    raw, single = _interpolate(raw, [override for override in overrides if override.depth])
    dim, block = raw["dim"], _block(raw.get("block"))
    layers = expand(raw["layers"], block, raw["num_layers"], single)
    return ModelConfig(
        **{key: raw[key] for key in _KEYS if key in raw},
        norm=components.resolve(
            "norm", block.get("norm", _NORM), dim, default=_NORM, key="block.norm", trust_code=trust_code
        ),
        layers=tuple(_component(layer, dim, trust_code) for layer in layers),
    )


def _set(base: Any, path: Sequence[str], value: Any, parent: str) -> Any:
    """``base`` with the value at a path of keys and list indices merged in."""
    if not path:
        return merge(base, value)
    head, rest = path[0], path[1:]
    key = f"{parent}.{head}"
    if not isinstance(base, list):
        part = base.get(head) if isinstance(base, Mapping) else None
        return merge(base, {head: _set(part, rest, value, key)})
    if not head.isdecimal() or int(head) >= len(base):
        problem = f"{head!r} is no entry of the list"
        raise ZooConfigError(problem, key=f"override {key}", allowed=f"an index below {len(base)}")
    return [_set(part, rest, value, key) if index == int(head) else part for index, part in enumerate(base)]


def _interpolate(raw: dict[Any, Any], overrides: list[Override]) -> tuple[dict[Any, Any], list[Override]]:
    """Top-level keys, checked, and overrides of layers, with every interpolation resolved."""
    known = (*_KEYS, "block", "layers")
    for key in raw:
        if key not in known:
            raise ZooConfigError("unknown key", key=str(key), allowed=one_of(key, known))
    try:
        raw = interpolate(raw | {_OVERRIDES: [override.value for override in overrides]})
    except ZooConfigError as error:
        if error.key.startswith(_OVERRIDES):
            _, index, *rest = error.key.split(".")
            error.key = ".".join([f"override {overrides[int(index)].key}", *rest])
        raise
    values = raw.pop(_OVERRIDES)
    for key in (*_REQUIRED, *raw):
        if raw.get(key) is None and key != "block":
            allowed = describe(ModelConfig, key) if key in _KEYS else "{pattern, at}, or a list of num_layers entries"
            raise ZooConfigError("the value is missing", key=key, allowed=allowed)
        if key in _KEYS:
            _check(key, raw[key])
    return raw, [Override(override.path, value) for override, value in zip(overrides, values, strict=True)]


def _check(key: str, value: Any) -> None:
    try:
        check(ModelConfig, key, value)
    except OptionError as error:
        raise ZooConfigError(f"got {value!r}", key=key, allowed=error.allowed) from None


def _block(value: Any) -> dict[Any, Any]:
    """The defaults of every layer."""
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping | None):
        raise ZooConfigError(f"got {value!r}", key="block", allowed="a block's name, or a mapping such as {norm: NAME}")
    return {"name": _BLOCK} | dict(value or {})


def _component(layer: Layer, dim: int, trust_code: bool) -> Component:
    try:
        return components.resolve("block", layer.values, dim, trust_code=trust_code)
    except ZooConfigError as error:
        error.key = layer.locate(error.key)
        raise
