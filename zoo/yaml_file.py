"""Reading YAML: safely, with one clear error, into plain mappings."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from zoo.errors import ZooConfigError

__all__ = ["interpolate", "parse_value", "plain_mapping", "read_mapping", "refuse_interpolation"]

_MOST_BYTES = 1 << 20
_MOST_NODES = 200_000  # with every alias written out, so that a small file cannot stand for a huge one
_ERRORS = (yaml.YAMLError, OmegaConfBaseException, RecursionError, ValueError)


def read_mapping(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file, interpolations left as they stand.

    Raises:
        ZooConfigError: the file cannot be read, is larger than 1 MiB, or holds no mapping.
    """
    try:
        text = _read(path)
        _require_mapping(text)
        return _load(text)
    except ZooConfigError as error:
        error.source = str(path)
        raise


def parse_value(text: str) -> Any:
    """The value of an override, written as YAML.

    Raises:
        ZooConfigError: it is no YAML, or missing.
    """
    if not text.strip():
        raise ZooConfigError("the value is missing", allowed="KEY=VALUE")
    mapping = _load(text, prefix="value: ")
    if mapping.keys() != {"value"}:
        raise ZooConfigError(f"got {text!r}", allowed="one value, in YAML")
    return mapping["value"]


def plain_mapping(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """A copy of a mapping as if it came from a YAML file: of dicts and lists all the way down.

    Raises:
        ZooConfigError: it contains itself.
    """
    try:
        return _plain(OmegaConf.to_container(mapping) if isinstance(mapping, DictConfig) else mapping)
    except RecursionError as error:
        raise _explain(error) from None


def refuse_interpolation(value: Any, key: str = "") -> None:
    """Nothing may be looked up, nor a resolver called, on behalf of a file that is not trusted.

    Raises:
        ZooConfigError: some text in it has ``${``.
    """
    if isinstance(value, dict):
        for name, part in value.items():
            refuse_interpolation(name, key)
            refuse_interpolation(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            refuse_interpolation(part, f"{key}.{index}")
    elif isinstance(value, str) and "${" in value:
        raise ZooConfigError(f"got {value!r}", key=key, allowed="values without ${...} in a file that is not trusted")


def interpolate(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """The mapping with every ``${key}`` replaced by what it names.

    Raises:
        ZooConfigError: an interpolation leads nowhere, or a mandatory value (``???``) is missing.
    """
    try:
        return _plain(OmegaConf.to_container(OmegaConf.create(mapping), resolve=True, throw_on_missing=True))
    except _ERRORS as error:
        raise _explain(error) from None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ZooConfigError("the file is too large", allowed=f"at most {_MOST_BYTES} bytes")
        return content.decode("utf-8")
    except OSError as error:
        raise ZooConfigError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ZooConfigError(f"not UTF-8: {error.reason} at byte {error.start}") from None


def _require_mapping(text: str) -> None:
    """Look at the outermost node: OmegaConf would read plain text as a key, and nothing at all as {}."""
    try:
        node = next((event for event in yaml.parse(text, yaml.SafeLoader) if isinstance(event, yaml.NodeEvent)), None)
    except yaml.YAMLError as error:
        raise _explain(error) from None
    if node is None or (isinstance(node, yaml.ScalarEvent) and not node.value):
        raise ZooConfigError("the file is empty", allowed="a mapping of keys")
    if not isinstance(node, yaml.MappingStartEvent):
        raise ZooConfigError("not a mapping", allowed="a mapping of keys")


def _load(text: str, prefix: str = "") -> dict[Any, Any]:
    try:
        config = OmegaConf.create(prefix + text, max_yaml_expanded_nodes=_MOST_NODES)
        return OmegaConf.to_container(config, resolve=False)  # pyright: ignore[reportReturnType]
    except _ERRORS as error:
        explained = _explain(error, places=not prefix)
        if prefix:
            explained.problem, explained.key = f"got {text!r}, {explained.problem}", ""
        if isinstance(error, yaml.YAMLError) and "${" in text:
            explained.allowed = 'quotes around interpolations inside { } and [ ]: "${dim}"'
        raise explained from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _explain(error: Exception, *, places: bool = True) -> ZooConfigError:
    """One line about what PyYAML or OmegaConf say in many."""
    if isinstance(error, RecursionError):
        return ZooConfigError("nested too deeply, or within itself")
    if isinstance(error, OmegaConfBaseException):
        return _explain_value(error)
    if not isinstance(error, yaml.MarkedYAMLError):
        return ZooConfigError(f"not valid YAML: {error}")
    problem = " ".join(filter(None, (error.context, error.problem))).partition(". See ")[0]
    mark = error.problem_mark if places else None
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return ZooConfigError(f"not valid YAML: {place}{problem}")


def _explain_value(error: OmegaConfBaseException) -> ZooConfigError:
    key = re.sub(r"\[(\w+)\]", r".\1", error.full_key or "")
    if isinstance(error, MissingMandatoryValue):
        return ZooConfigError("the value is missing", key=key, allowed="a value in place of ???")
    problem, allowed = str(error).partition("\n")[0], ""
    if isinstance(error, GrammarParseError | InterpolationResolutionError):
        problem, allowed = f"bad interpolation: {problem}", "${KEY} of a key in the configuration, such as ${dim}"
    return ZooConfigError(problem, key=key, allowed=allowed)
