"""What commands have in common: options, and how their values are read."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import typer

__all__ = ["Device", "Dtype", "Overrides", "choice", "choices", "dtype", "listed", "number", "numbers"]

Value = TypeVar("Value")

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes, in order, e.g. dim=512 layers.3.mixer=full_attention"),
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda when there is one.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16. Default: float32 on a CPU, bfloat16 on CUDA.")
]
DTYPES = ("float32", "bfloat16", "float16")


def number(option: str, text: str, allowed: str) -> int:
    """A positive number, 2048 for 2k."""
    digits = text.lower().removesuffix("k")
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError(f"{option}: got {text!r}, allowed: {allowed}")
    return int(digits) * (1024 if digits != text else 1)


def numbers(option: str, text: str | None, allowed: str) -> tuple[int, ...] | None:
    """Several of them, or None where the option was not given."""
    return None if text is None else listed(text, lambda part: number(option, part, allowed))


def listed(text: str, read: Callable[[str], Value]) -> tuple[Value, ...]:
    """What stands between commas, each once."""
    return tuple(dict.fromkeys(read(part.strip()) for part in text.split(",")))


def choice(option: str, name: str, allowed: Iterable[str]) -> Any:
    """One of the names."""
    if name not in allowed:
        raise ValueError(f"{option}: got {name!r}, allowed: {', '.join(allowed)}")
    return name


def choices(option: str, text: str, allowed: Iterable[str]) -> Any:
    """Several of the names."""
    return listed(text, lambda name: choice(option, name, allowed))


def dtype(name: str | None) -> Any:
    """The torch.dtype of that name."""
    import torch

    return None if name is None else getattr(torch, choice("--dtype", name, DTYPES))
