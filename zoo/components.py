"""From a YAML value to a validated component, and from a component to a module."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

from torch import nn

from zoo import registry
from zoo.errors import ZooConfigError, one_of
from zoo.mixers.options import Component, NoOptions, OptionError

__all__ = ["make", "plain", "resolve"]


def resolve(kind: str, value: Any, dim: int, *, key: str = "", trust_code: bool = True) -> Component:
    """Validate a component and fill in its defaults.

    Args:
        kind: a kind of component.
        value: a name or {name, options}.
        dim: the model's width.
        key: path of the value, for errors.
        trust_code: whether class paths may be imported.

    Raises:
        ZooConfigError: the component or one of its options is unknown, missing or not allowed.
    """
    if value is None or value == {}:
        raise ZooConfigError("the value is missing", key=key, allowed=f"a {kind}, as NAME or {{name: NAME, options}}")
    if isinstance(value, str):
        value = {"name": value}
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(name, str):
        raise ZooConfigError(f"got {value!r}", key=key, allowed=f"a {kind}, as NAME or {{name: NAME, options}}")
    try:
        config = _config_class(registry.find(kind, name, trust_code=trust_code))
    except ZooConfigError as error:
        error.key = key
        raise
    given = {option: part for option, part in value.items() if option != "name"}
    given |= _nested(config, given, dim, key, trust_code)
    _check_names(config, given, name, key)
    try:
        return Component(name, config(**given).resolve(dim))
    except OptionError as error:
        raise ZooConfigError(f"got {error.value!r}", key=_join(key, error.key), allowed=error.allowed) from None


def _config_class(entry: registry.Entry) -> Any:
    return getattr(entry.load(), "Config", NoOptions)


def _join(key: str, option: str) -> str:
    return f"{key}.{option}" if key else option


def _nested(config: Any, given: Mapping[str, Any], dim: int, key: str, trust_code: bool) -> dict[str, Component]:
    """The options that are components themselves."""
    return {
        option.name: resolve(
            option.metadata["kind"],
            given.get(option.name, option.metadata["default"]),
            dim,
            key=_join(key, option.name),
            trust_code=trust_code,
        )
        for option in fields(config)
        if "kind" in option.metadata
    }


def _check_names(config: Any, given: Mapping[str, Any], name: str, key: str) -> None:
    options = {option.name: option for option in fields(config) if option.init}
    for option in given:
        if option not in options:
            raise ZooConfigError(
                f"unknown option of {name}", key=_join(key, str(option)), allowed=one_of(option, options) or "none"
            )
    for option in options.values():
        if option.name not in given and option.default is MISSING and option.default_factory is MISSING:
            raise ZooConfigError("the value is missing", key=_join(key, option.name))


def plain(component: Component) -> Any:
    """A component as YAML has it: its name, or {name, options} with every option."""
    options = {option.name: getattr(component.options, option.name) for option in fields(component.options)}  # pyright: ignore[reportArgumentType]
    if not options:
        return component.name
    return {"name": component.name} | {
        name: plain(value) if isinstance(value, Component) else value for name, value in options.items()
    }


def make(kind: str, component: Component, dim: int) -> nn.Module:
    """Build the module of a resolved component; components inside it reach its class as factories."""
    cls = registry.find(kind, component.name).load()
    if not hasattr(cls, "Config"):
        return cls()
    factories = {
        option.name: partial(make, option.metadata["kind"], getattr(component.options, option.name), dim)
        for option in fields(component.options)  # pyright: ignore[reportArgumentType]
        if "kind" in option.metadata
    }
    return cls(component.options, dim, **factories)
