"""What exists: the entries of registry.yaml, what users register, and class paths in their own files."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib import import_module
from inspect import isabstract
from pathlib import Path
from typing import Any, TypeVar

from zoo import recipes
from zoo.errors import ZooConfigError, one_of
from zoo.yaml_file import read_mapping

__all__ = ["Entry", "choices", "entries", "find", "kinds", "list_names", "register", "register_mixer"]

T = TypeVar("T", bound=type)

CAPABILITIES = ("packed", "decode", "grouped_heads", "constant_state")


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered class.

    Attributes:
        kind: mixer, block, norm, mlp or feature_map.
        name: what YAML calls it; its class path if it has no other name.
        path: class path.
        summary: one line.
        paper: arXiv number, or None.
        supports: a subset of packed, decode, grouped_heads, constant_state.
        registered: the class itself where it was registered at run time.
    """

    kind: str
    name: str
    path: str
    summary: str = ""
    paper: str | None = None
    supports: tuple[str, ...] = ()
    registered: type | None = None

    def load(self) -> type:
        """The class.

        Raises:
            ZooConfigError: it cannot be imported, is not of this kind, or has no proper Config.
        """
        from zoo.mixers.options import NoOptions, Options  # loads torch, which a list of names can do without

        found = self.registered or _import(self.path)
        contract = _import(_contracts()[self.kind])
        if not isinstance(found, type) or not issubclass(found, contract):
            raise ZooConfigError(f"{self.path} is no {self.kind}", allowed=f"a subclass of {_path(contract)}")
        if isabstract(found):
            missing = ", ".join(sorted(found.__abstractmethods__))
            raise ZooConfigError(f"{self.path} is abstract", allowed=f"a class that defines {missing}")
        config = getattr(found, "Config", NoOptions)
        if not (isinstance(config, type) and issubclass(config, Options) and is_dataclass(config)):
            raise ZooConfigError(
                f"{self.path}.Config is {config!r}", allowed=f"a dataclass derived from {_path(Options)}"
            )
        if any(option.name == "name" for option in fields(config)):
            raise ZooConfigError(
                f"{self.path}.Config has the option 'name'", allowed="any other, as YAML's name is taken"
            )
        return found


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise ZooConfigError(f"cannot import {path!r}: {type(error).__name__}: {error}") from error


@cache
def _file() -> dict[str, Any]:
    return read_mapping(Path(__file__).parent / "registry.yaml")


@cache
def _contracts() -> dict[str, str]:
    return {kind: section["contract"] for kind, section in _file().items()}


@cache
def _entries() -> dict[tuple[str, str], Entry]:
    return {
        (kind, name): Entry(kind=kind, name=name, **row | {"supports": tuple(row.get("supports", ()))})
        for kind, section in _file().items()
        for name, row in section["entries"].items()
    }


def kinds() -> tuple[str, ...]:
    """Every kind of component."""
    return tuple(_contracts())


def entries(kind: str | None = None) -> list[Entry]:
    """Every entry, or those of one kind, in the order in which they were registered."""
    return [entry for entry in _entries().values() if kind in (None, entry.kind)]


def choices(kind: str) -> list[str]:
    """What may stand as the name of a component, in words."""
    return [*(entry.name for entry in entries(kind)), "a class path"]


def find(kind: str, name: str, *, trust_code: bool = True) -> Entry:
    """The entry called ``name``, or one made for it if it is a class path (it has a dot).

    Args:
        kind: a kind of component.
        name: a registered name, or a class path.
        trust_code: whether a class path may be followed.

    Raises:
        ZooConfigError: no such entry, or a class path where none may be followed.
    """
    if (kind, name) in _entries():
        return _entries()[kind, name]
    if "." not in name:
        raise ZooConfigError(f"unknown {kind} {name!r}", allowed=one_of(name, choices(kind)))
    if not trust_code:
        raise ZooConfigError(f"{name!r} is a class path, which is imported only from trusted files", allowed="a name")
    return Entry(kind=kind, name=name, path=name, supports=getattr(_import(name), "supports", ()))


def register(
    kind: str, name: str, *, summary: str = "", paper: str | None = None, supports: tuple[str, ...] | None = None
) -> Callable[[T], T]:
    """Class decorator: make a class of your own available in YAML under ``name``.

    Args:
        kind: mixer, block, norm, mlp or feature_map.
        name: new, without a dot.
        summary: one line; the docstring's first if empty.
        paper: arXiv number.
        supports: of packed, decode, grouped_heads, constant_state; the class's own ``supports`` if None.

    Raises:
        ValueError: unknown kind or capability, a name that is taken or has a dot, or a class not of this kind.
    """
    if kind not in kinds():
        raise ValueError(f"kind: got {kind!r}, allowed: {one_of(kind, kinds())}")
    if not isinstance(name, str) or not name or "." in name:
        raise ValueError(f"name: got {name!r}, allowed: a name without a dot (dots mark class paths)")
    _require_free(kind, name)
    for capability in supports or ():
        if capability not in CAPABILITIES:
            raise ValueError(f"supports: got {capability!r}, allowed: {one_of(capability, CAPABILITIES)}")

    def add(cls: T) -> T:
        line = summary or (cls.__doc__ or "").strip().partition("\n")[0]
        can = getattr(cls, "supports", ()) if supports is None else supports
        entry = Entry(kind, name, _path(cls), line, paper, tuple(can), registered=cls)
        entry.load()
        _require_free(kind, name)
        _entries()[kind, name] = entry
        return cls

    return add


def _require_free(kind: str, name: str) -> None:
    if (kind, name) in _entries():
        raise ValueError(f"name: a {kind} called {name!r} exists already ({_entries()[kind, name].path})")


register_mixer = partial(register, "mixer")
"""`register` for a token mixer: ``@zoo.register_mixer("mine")``."""


def list_names(pattern: str = "*", kind: str | None = None) -> list[str]:
    """Names of components and recipes.

    Args:
        pattern: with the wildcards * ? [ ].
        kind: only this kind, or "recipe".

    Raises:
        ValueError: unknown kind.
    """
    if kind not in (None, "recipe", *kinds()):
        raise ValueError(f"kind: got {kind!r}, allowed: {one_of(kind, ('recipe', *kinds()))}")
    names = [entry.name for entry in entries(kind)]
    if kind in (None, "recipe"):
        names += recipes.names()
    return [name for name in names if fnmatchcase(name, pattern)]
