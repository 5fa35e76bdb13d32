"""Validated options: every component has a dataclass of them, whose fields are its YAML keys.

The types and bounds stand in the annotations, so that a wrong value is refused wherever the options are made::

    @dataclass(frozen=True, kw_only=True, slots=True)
    class WindowOptions(Options):
        window: Annotated[int, AtLeast(1)] = 1024
"""

import sys
from dataclasses import dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import torch

__all__ = [
    "AtLeast",
    "Between",
    "Checked",
    "Component",
    "NoOptions",
    "OptionError",
    "Options",
    "check",
    "component",
    "describe",
]


class OptionError(ValueError):
    """An option has a value that is not allowed.

    Args:
        key: the option's name.
        value: the bad value.
        allowed: what is allowed, in words.
    """

    def __init__(self, key: str, value: Any, allowed: str) -> None:
        super().__init__(f"{key}: got {value!r}, allowed: {allowed}")
        self.key, self.value, self.allowed = key, value, allowed


@dataclass(frozen=True, slots=True)
class AtLeast:
    """A bound for ``Annotated``: the number is not below ``low``."""

    low: float

    def __call__(self, value: float) -> bool:
        """Whether the bound holds."""
        return value >= self.low

    def __str__(self) -> str:
        return f"at least {self.low}"


@dataclass(frozen=True, slots=True)
class Between:
    """A bound for ``Annotated``: the number lies between ``low`` and ``high``, both included."""

    low: float
    high: float

    def __call__(self, value: float) -> bool:
        """Whether both bounds hold."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"between {self.low} and {self.high}"


@cache
def _hints(options: type) -> dict[str, Any]:
    return get_type_hints(options, include_extras=True)


def _matches(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _matches(value, args[0]) and all(bound(value) for bound in args[1:])
    if origin in (Union, UnionType):
        return any(_matches(value, arm) for arm in args)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in args)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return hint is Any or isinstance(value, get_origin(hint) or hint)


_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def _describe(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join([_describe(args[0]), *map(str, args[1:])])
    if origin in (Union, UnionType):
        return " or ".join(_describe(arm) for arm in args)
    if origin is Literal:
        return ", ".join(map(repr, args))
    return _WORDS.get(hint) or getattr(hint, "__name__", str(hint))


def describe(options: type, name: str) -> str:
    """What a dataclass's annotation allows as the value of one field, in words."""
    return _describe(_hints(options)[name])


def check(options: type, name: str, value: Any) -> None:
    """Check a value against a dataclass's annotation.

    Raises:
        OptionError: it is not allowed.
    """
    if not _matches(value, _hints(options)[name]):
        raise OptionError(name, value, describe(options, name))


class Checked:
    """Base of dataclasses whose annotations say what is allowed: a wrong value raises `OptionError`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for option in fields(self):  # pyright: ignore[reportArgumentType]  # every subclass is a dataclass
            check(type(self), option.name, getattr(self, option.name))
        self.validate()

    def validate(self) -> None:
        """Check what concerns several options together.

        Raises:
            OptionError: they do not fit together.
        """


class Options(Checked):
    """Base of every component's options.

    The counts are known from the options alone, without building anything: ``dim`` is the model's width.
    """

    __slots__ = ()

    def resolve(self, dim: int) -> Self:
        """The same options with every default that depends on the model's width filled in.

        Raises:
            OptionError: an option does not fit ``dim``.
        """
        del dim
        return self

    def num_params(self, dim: int) -> int:
        """Number of parameters."""
        del dim
        return 0

    def flops_per_token(self, dim: int, length: int) -> float:
        """Forward FLOPs for each token of a sequence of ``length`` tokens; a multiply-add counts as 2."""
        del dim, length
        return 0

    def state_bytes(self, dim: int, length: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of the decoding state of one sequence that may grow to ``length`` tokens, in a model of ``dtype``."""
        del dim, length, dtype
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions(Options):
    """The options of a component that has none."""


@dataclass(frozen=True, slots=True)
class Component:
    """A chosen component: its name in the registry (or its class path) and its validated options."""

    name: str
    options: Options


def component(kind: str, default: str | None = None) -> Any:
    """A dataclass field whose value is itself a component of ``kind``.

    In YAML it is a name or ``{name, options}``. The registry turns it into a `Component`, and hands the built class a
    factory under the field's name.

    Args:
        kind: a kind in registry.yaml.
        default: the registered name that the registry takes when nothing is given; without one the field must be given.
    """
    return field(metadata={"kind": kind, "default": default})
