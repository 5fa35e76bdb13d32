"""From ``layers`` in YAML to an explicit list: the pattern repeated, single layers changed, overrides applied."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zoo.errors import ZooConfigError, one_of

__all__ = ["Layer", "Override", "expand", "layer_index", "merge"]

_INDEX = re.compile(r"(?P<at>\d+)|N//(?P<divisor>[1-9]\d*)(\+(?P<plus>\d+))?|N-(?P<minus>[1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Override:
    """``layers.3.mixer.window=64`` as (("layers", "3", "mixer", "window"), 64)."""

    path: tuple[str, ...]
    value: Any

    @property
    def addresses_a_layer(self) -> bool:
        """Whether it concerns one layer of the resolved list."""
        return len(self.path) > 1 and self.path[0] == "layers" and _INDEX.fullmatch(self.path[1]) is not None


@dataclass(slots=True)
class Layer:
    """One layer's options, and which places in the file they came from, last one first in rank.

    Attributes:
        values: the merged options.
        origins: (path of a place, what it said).
    """

    index: int
    values: Any
    origins: list[tuple[str, Any]] = field(default_factory=list)

    def add(self, origin: str, values: Any) -> None:
        """Merge what one place says."""
        self.values = merge(self.values, values)
        self.origins.append((origin, values))

    def locate(self, key: str) -> str:
        """The path, in the file, of a key of this layer."""
        parts = key.split(".")
        for depth in range(len(parts), 0, -1):
            for origin, values in reversed(self.origins):
                if _holds(values, parts[:depth]):
                    return f"{origin}.{key}"
        return f"layers.{self.index}.{key}"


def _holds(values: Any, parts: list[str]) -> bool:
    for part in parts:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


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
    match = _INDEX.fullmatch(str(key)) if not isinstance(key, bool) else None
    if match is None:
        raise ZooConfigError(f"{key!r} names no layer", allowed="an index, N//k, N//k+j or N-j")
    if match["at"]:
        index = int(match["at"])
    elif match["divisor"]:
        index = num_layers // int(match["divisor"]) + int(match["plus"] or 0)
    else:
        index = num_layers - int(match["minus"])
    if not 0 <= index < num_layers:
        raise ZooConfigError(f"{key} is layer {index} of {num_layers}", allowed=f"0 to {num_layers - 1}")
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
    result = [Layer(index, block, [("block", block)]) for index in range(num_layers)]
    entries, singles = _sections(layers, num_layers)
    for layer in result:
        position = layer.index % len(entries)
        layer.add(f"layers{'' if isinstance(layers, list) else '.pattern'}.{position}", entries[position])
    for key, values in singles.items():
        result[_index(key, num_layers, f"layers.at.{key}")].add(f"layers.at.{key}", values)
    for override in overrides:
        origin = f"override layers.{override.path[1]}"
        values = override.value
        for part in reversed(override.path[2:]):
            values = {part: values}
        _require_mapping(values, origin)
        result[_index(override.path[1], num_layers, origin)].add(origin, values)
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
            if key not in ("pattern", "at"):
                raise ZooConfigError("unknown key", key=f"layers.{key}", allowed=one_of(key, ("pattern", "at")))
        entries, singles, place = layers.get("pattern", [{}]), layers.get("at") or {}, "layers.pattern"
    else:
        raise ZooConfigError(f"got {layers!r}", key="layers", allowed="{pattern, at}, or a list of num_layers entries")
    if not isinstance(entries, list) or not entries:
        raise ZooConfigError(f"got {entries!r}", key=place, allowed="a list with at least one entry")
    _require_mapping(singles, "layers.at")
    for position, entry in enumerate(entries):
        _require_mapping(entry, f"{place}.{position}")
    for key, values in singles.items():
        _require_mapping(values, f"layers.at.{key}")
    return entries, singles


def _require_mapping(value: Any, key: str) -> None:
    if not isinstance(value, Mapping):
        raise ZooConfigError(f"got {value!r}", key=key, allowed="a mapping, such as {mixer: NAME}")
