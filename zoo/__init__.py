"""A torch.compile-first zoo of sequence-model architectures with swappable token mixers.

The public face; every name loads on first use, so that ``import zoo`` stays light::

    model = zoo.build("deltanet-tiny", ["layers.3.mixer=full_attention"])
"""

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.builder import build
    from zoo.checkpoint import load, save
    from zoo.compilation import compile, compile_cache
    from zoo.errors import ZooConfigError
    from zoo.model import LanguageModel
    from zoo.registry import list_names as list
    from zoo.registry import register, register_mixer

__all__ = [
    "LanguageModel",
    "ZooConfigError",
    "build",
    "compile",
    "compile_cache",
    "list",
    "load",
    "register",
    "register_mixer",
    "save",
]
__version__ = "0.1.0"

_HOME = {
    "LanguageModel": ("zoo.model", "LanguageModel"),
    "ZooConfigError": ("zoo.errors", "ZooConfigError"),
    "build": ("zoo.builder", "build"),
    "compile": ("zoo.compilation", "compile"),
    "compile_cache": ("zoo.compilation", "compile_cache"),
    "list": ("zoo.registry", "list_names"),
    "load": ("zoo.checkpoint", "load"),
    "register": ("zoo.registry", "register"),
    "register_mixer": ("zoo.registry", "register_mixer"),
    "save": ("zoo.checkpoint", "save"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}")
    module, attribute = _HOME[name]
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> Iterable[str]:
    return sorted({*globals(), *__all__})
