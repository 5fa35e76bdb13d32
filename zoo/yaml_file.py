"""Reading YAML: safely, with one clear error, into plain mappings."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from zoo.errors import ZooConfigError

__all__ = ["interpolate", "parse_value", "read_mapping"]

_MOST_BYTES = 1 << 20


def read_mapping(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file, interpolations left as they stand.

    Raises:
        ZooConfigError: the file cannot be read, is larger than 1 MiB, or holds no mapping.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ZooConfigError(
                f"the file has {path.stat().st_size} bytes", allowed=f"at most {_MOST_BYTES}", source=str(path)
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ZooConfigError(f"cannot be read: {error}", source=str(path)) from None
    if not text.strip():
        raise ZooConfigError("the file is empty", allowed="a mapping of keys", source=str(path))
    try:
        config = OmegaConf.create(text)
        if not isinstance(config, DictConfig) or list(config.values()) == [None]:
            raise ZooConfigError("not a mapping", allowed="a mapping of keys", source=str(path))
        return OmegaConf.to_container(config, resolve=False)  # pyright: ignore[reportReturnType]
    except (YAMLError, OmegaConfBaseException, RecursionError, ValueError) as error:
        if isinstance(error, ZooConfigError):
            raise
        raise ZooConfigError(f"not valid YAML: {error}", source=str(path)) from None


def parse_value(text: str, key: str) -> Any:
    """The value of an override, written as YAML.

    Raises:
        ZooConfigError: it is no YAML, or missing.
    """
    try:
        config = OmegaConf.create(f"value: {text}")
        value = OmegaConf.to_container(config, resolve=False)["value"]  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (YAMLError, OmegaConfBaseException, RecursionError, ValueError) as error:
        raise ZooConfigError(f"{text!r} is not valid YAML: {error}", key=key) from None
    if value is None and not text.strip():
        raise ZooConfigError("the value is missing", key=key, allowed="KEY=VALUE")
    return value


def interpolate(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """The mapping with every ``${key}`` replaced by what it names.

    Raises:
        ZooConfigError: an interpolation leads nowhere, or a mandatory value (``???``) is missing.
    """
    try:
        return OmegaConf.to_container(OmegaConf.create(mapping), resolve=True, throw_on_missing=True)  # pyright: ignore[reportReturnType]
    except (OmegaConfBaseException, RecursionError, ValueError) as error:
        message, key = str(error).splitlines()[0], getattr(error, "full_key", None) or ""
        raise ZooConfigError(message, key=key) from None
