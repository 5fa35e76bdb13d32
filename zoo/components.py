"""From a YAML value to a validated component, and from a component to a module."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

from torch import nn

from zoo import registry
from zoo.errors import ZooConfigError, one_of
from zoo.mixers.options import Component, NoOptions, OptionError, describe

__all__ = ["make", "plain", "plain_options", "resolve"]


def resolve(
    kind: str, value: Any, dim: int, *, default: str | None = None, key: str = "", trust_code: bool = True
) -> Component:
    """Validate a component and fill in its defaults.

    Args:
        kind: a kind of component.
        value: a name or {name, options}.
        dim: the model's width.
        default: the name if there are only options.
        key: path of the value, for errors.
        trust_code: whether class paths may be imported.

    Raises:
        ZooConfigError: the component or one of its options is unknown, missing or not allowed.
    """
    name, given = _split(kind, value, default, key)
    try:
        config: Any = getattr(registry.find(kind, name, trust_code=trust_code).load(), "Config", NoOptions)
    except ZooConfigError as error:
        error.key = key
        raise
    _check_names(config, given, name, key)
    given |= _nested(config, given, dim, key, trust_code)
    try:
        return Component(name, config(**given).resolve(dim))
    except OptionError as error:
        raise ZooConfigError(f"got {error.value!r}", key=_join(key, error.key), allowed=error.allowed) from None
    except ValueError as error:  # of a user's own class
        raise ZooConfigError(str(error), key=key) from error


def _split(kind: str, value: Any, default: str | None, key: str) -> tuple[str, dict[Any, Any]]:
    """The component's name and its options."""
    options = {"name": value} if isinstance(value, str) else value
    if isinstance(options, Mapping):
        options = ({"name": default} if default else {}) | dict(options)
        if isinstance(name := options.pop("name", None), str):
            return name, options
    problem = "the value is missing" if value in (None, {}) else f"{value!r} names no {kind}"
    raise ZooConfigError(
        problem, key=key, allowed=", ".join(registry.choices(kind)) + ", or {name: NAME, OPTION: VALUE}"
    )


def _join(key: str, option: str) -> str:
    return f"{key}.{option}" if key else option


def _nested(config: Any, given: Mapping[str, Any], dim: int, key: str, trust_code: bool) -> dict[str, Component]:
    """The options that are components themselves."""
    return {
        option.name: resolve(
            option.metadata["kind"],
            given.get(option.name, option.metadata["default"]),
            dim,
            default=option.metadata["default"],
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
        required = option.default is MISSING and option.default_factory is MISSING and "kind" not in option.metadata
        if required and option.name not in given:
            allowed = describe(config, option.name)
            raise ZooConfigError("the value is missing", key=_join(key, option.name), allowed=allowed)


def plain(component: Component) -> Any:
    """A component as YAML has it: its name, or {name, options} with every option."""
    options = plain_options(component)
    return {"name": component.name} | options if options else component.name


def plain_options(component: Component) -> dict[str, Any]:
    """Every option of a component as YAML has it."""
    values = {option.name: getattr(component.options, option.name) for option in fields(component.options)}  # pyright: ignore[reportArgumentType]
    return {name: plain(value) if isinstance(value, Component) else value for name, value in values.items()}


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
