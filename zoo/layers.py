"""From ``layers`` in YAML to an explicit list: the pattern repeated, single layers changed, overrides applied."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zoo.errors import ZooConfigError, one_of

__all__ = ["Layer", "Override", "expand", "layer_index", "merge"]

_INDEX = re.compile(
    r"(?P<at>[0-9]{1,9})|N//(?P<divisor>[1-9][0-9]{0,8})(\+(?P<plus>[0-9]{1,9}))?|N-(?P<minus>[1-9][0-9]{0,8})"
)
_SECTIONS = ("pattern", "at")


@dataclass(frozen=True, slots=True)
class Override:
    """``layers.3.mixer.window=64`` as (("layers", "3", "mixer", "window"), 64)."""

    path: tuple[str, ...]
    value: Any

    @property
    def key(self) -> str:
        """How errors name it."""
        return ".".join(self.path)

    @property
    def depth(self) -> int:
        """How many parts of the path lead to a single layer, ``layers.3`` or ``layers.at.3``; 0 if it names none."""
        if len(self.path) > 1 and self.path[0] == "layers" and self.path[1] not in _SECTIONS:
            return 2
        return 3 if len(self.path) > 2 and self.path[:2] == ("layers", "at") else 0


@dataclass(slots=True)
class Layer:
    """One layer's options, and which places in the file they came from.

    Attributes:
        index: of the layer.
        values: the merged options.
        origins: for the path of each option, the place that gave it last.
    """

    index: int
    values: Any = field(default_factory=dict)
    origins: dict[tuple[str, ...], str] = field(default_factory=dict)

    def add(self, origin: str, values: Any) -> None:
        """Merge what one place says."""
        self.values = merge(self.values, values)
        origins = self.origins | dict.fromkeys(_paths(values), origin)
        self.origins = {path: origins[path] for path in _paths(self.values) if path in origins}

    def locate(self, key: str) -> str:
        """The path, in the file, of a key of this layer."""
        path = (*filter(None, key.split(".")), "name")
        known = next(path[:depth] for depth in range(len(path), -1, -1) if path[:depth] in self.origins)
        return self.origins[known] + (f".{key}" if key else "")


def _paths(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every option, and of all that hold options; text may be the name of a component."""
    yield path
    if isinstance(values, str):
        yield (*path, "name")
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _paths(value, (*path, str(key)))


def merge(base: Any, new: Any) -> Any:
    """``new`` over ``base``: options of the same component merge, anything else replaces.

    A component is a name or a mapping with a ``name``; a mapping without a name keeps the base's. Another name, or a
    name alone, starts from that component's defaults.
    """
    if not isinstance(new, Mapping):
        return new
    if isinstance(base, str):
        base = {"name": base}
    if not isinstance(base, Mapping) or new.get("name", base.get("name")) != base.get("name"):
        return dict(new)
    return {**base, **{key: merge(base.get(key), value) for key, value in new.items()}}


def layer_index(key: Any, num_layers: int) -> int:
    """The layer that ``3``, ``N//2``, ``N//2+1`` or ``N-1`` names, N being the number of layers.

    Raises:
        ZooConfigError: it is none of these, or past the end.
    """
    match = _INDEX.fullmatch(str(key))
    if match is None:
        raise ZooConfigError(f"{key!r} names no layer", allowed="an index from 0, N//k, N//k+j or N-j")
    if match["at"]:
        index = int(match["at"])
    elif match["divisor"]:
        index = num_layers // int(match["divisor"]) + int(match["plus"] or 0)
    else:
        index = num_layers - int(match["minus"])
    if not 0 <= index < num_layers:
        raise ZooConfigError(f"there is no layer {index}, num_layers is {num_layers}", allowed=f"0 to {num_layers - 1}")
    return index


def expand(layers: Any, block: Any, num_layers: int, overrides: list[Override]) -> list[Layer]:
    """The explicit list of layers.

    Args:
        layers: {pattern, at}, or a list with an entry for each layer.
        block: the defaults of every layer.
        num_layers: how many.
        overrides: those that address single layers, in order.

    Raises:
        ZooConfigError: with the path of what is wrong.
    """
    result = [Layer(index) for index in range(num_layers)]
    entries, singles = _sections(layers, num_layers)
    for layer in result:
        layer.add("block", block)
        position = layer.index % len(entries)
        layer.add(f"layers{'' if isinstance(layers, list) else '.pattern'}.{position}", entries[position])
    for key, values in singles.items():
        result[_index(key, num_layers, f"layers.at.{key}")].add(f"layers.at.{key}", values)
    for override in overrides:
        layer, rest = override.path[: override.depth], override.path[override.depth :]
        origin = f"override {'.'.join(layer)}"
        values = override.value
        for part in reversed(rest):
            values = {part: values}
        _require_mapping(values, origin)
        result[_index(layer[-1], num_layers, origin)].add(origin, values)
    return result


def _index(key: Any, num_layers: int, origin: str) -> int:
    try:
        return layer_index(key, num_layers)
    except ZooConfigError as error:
        error.key = origin
        raise


def _sections(layers: Any, num_layers: int) -> tuple[list[Any], Mapping[Any, Any]]:
    """The repeated entries, and the single layers."""
    if isinstance(layers, list):
        if len(layers) != num_layers:
            raise ZooConfigError(
                f"the list has {len(layers)} entries", key="layers", allowed=f"num_layers = {num_layers} entries"
            )
        entries, singles, place = layers, {}, "layers"
    elif isinstance(layers, Mapping):
        for key in layers:
            if key not in _SECTIONS:
                raise ZooConfigError("unknown key", key=f"layers.{key}", allowed=one_of(key, _SECTIONS))
        entries, place = layers.get("pattern", [{}]), "layers.pattern"
        singles = {} if layers.get("at") is None else layers["at"]
    else:
        raise ZooConfigError(f"got {layers!r}", key="layers", allowed="{pattern, at}, or a list of num_layers entries")
    if not isinstance(entries, list) or not entries:
        raise ZooConfigError(f"got {entries!r}", key=place, allowed="a list with at least one entry")
    if not isinstance(singles, Mapping):
        raise ZooConfigError(f"got {singles!r}", key="layers.at", allowed="a mapping, such as {0: {mixer: NAME}}")
    for position, entry in enumerate(entries):
        _require_mapping(entry, f"{place}.{position}")
    for key, values in singles.items():
        _require_mapping(values, f"layers.at.{key}")
    return entries, singles


def _require_mapping(value: Any, key: str) -> None:
    if not isinstance(value, Mapping):
        raise ZooConfigError(f"got {value!r}", key=key, allowed="a mapping, such as {mixer: NAME}")
