"""The one error that a bad configuration ends in."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

__all__ = ["ZooConfigError", "one_of"]


_MOST_CHARACTERS = 300


class ZooConfigError(ValueError):
    """A configuration cannot be used. Its message is one line.

    Args:
        problem: what is wrong, with the bad value.
        key: full path of the key, or "" for the whole.
        allowed: what is allowed, in words.
        source: the file or recipe that says it.
    """

    def __init__(self, problem: str, *, key: str = "", allowed: str = "", source: str = "") -> None:
        super().__init__(problem)
        self.problem, self.key, self.allowed, self.source = problem, key, allowed, source

    def __str__(self) -> str:
        message = ": ".join(_one_line(part) for part in (self.source, self.key, self.problem) if part)
        return message + (f"; allowed: {self.allowed}" if self.allowed else "")


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def one_of(name: Any, choices: Iterable[str]) -> str:
    """The choices, in words, and the one that was probably meant."""
    choices = list(choices)
    close = get_close_matches(str(name), choices, n=1)
    return ", ".join(choices) + (f" (did you mean {close[0]!r}?)" if close else "")
