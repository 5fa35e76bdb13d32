"""A prompt and its continuation as text."""

import codecs
import re
import sys
from io import TextIOWrapper
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from zoo.model import LanguageModel

__all__ = ["Prompt", "read", "stream"]

_BYTES = 256


class Prompt:
    """A prompt as token ids, and tokens as text: UTF-8 where the vocabulary is the 256 bytes, otherwise ids.

    Args:
        text: the prompt; ids stand between spaces or commas.
        vocab_size: V.

    Attributes:
        ids: the prompt's tokens.
        text: the prompt as it is shown, in front of what `show` gives; without an incomplete character at its end.

    Raises:
        ValueError: there is no token in it, or one that is not in the vocabulary.
    """

    def __init__(self, text: str, vocab_size: int) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace") if vocab_size == _BYTES else None
        self.ids = list(_encode(text)) if self.decoder else [_id(part, vocab_size) for part in _parts(text)]
        self.text = self.decoder.decode(bytes(self.ids)) if self.decoder else " ".join(map(str, self.ids))
        if not self.ids:
            raise ValueError("--prompt: it is empty, allowed: at least one token")

    def show(self, token: int) -> str:
        """What one more token adds to the text; nothing while a character is incomplete."""
        return self.decoder.decode(bytes([token])) if self.decoder else f" {token}"

    def finish(self) -> str:
        """What an incomplete character at the end adds."""
        return self.decoder.decode(b"", final=True) if self.decoder else ""


def read(prompt: str | None, file: Path | None) -> str:
    """The prompt, or what its file holds.

    Raises:
        ValueError: neither or both are given, or the file cannot be read.
    """
    if prompt is not None and file is None:
        return prompt
    if prompt is not None or file is None:
        raise ValueError(f"--prompt, --prompt-file: got {'neither' if file is None else 'both'}, allowed: one of them")
    try:
        return file.read_bytes().decode(errors="surrogateescape")
    except OSError as error:
        raise ValueError(f"--prompt-file: cannot read {file}: {error.strerror or error}") from None


def stream(model: LanguageModel, text: str, max_new_tokens: int, *, stop_token: int | None, **settings: Any) -> None:
    """Print a prompt and what the model adds, each token when it is there; then, on stderr, the speed.

    Args:
        model: whose text it is.
        text: the prompt, see `Prompt`.
        max_new_tokens: the most tokens to add.
        stop_token: ends it, and is not printed.
        settings: further arguments of `LanguageModel.generate`.

    Raises:
        ValueError: the prompt or a setting cannot be used; then nothing is printed.
    """
    prompt, count = Prompt(text, model.vocab_size), 0
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every character

    def show(tokens: torch.Tensor) -> None:
        nonlocal count
        token = int(tokens)
        start = "" if count else prompt.text
        print(start + ("" if token == stop_token else prompt.show(token)), end="", flush=True)
        count += 1

    begin = perf_counter()
    tokens = torch.tensor([prompt.ids], device=model.embedding.weight.device)
    model.generate(tokens, max_new_tokens, stop_token=stop_token, on_token=show, **settings)
    seconds = perf_counter() - begin
    print(prompt.finish(), flush=True)
    print(f"{count} tokens in {seconds:.2f} s: {count / seconds:,.1f} tokens/s", file=sys.stderr)


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")  # bytes that are no UTF-8, of a command line or a file


def _parts(text: str) -> list[str]:
    return [part for part in re.split(r"[\s,]+", text) if part]


def _id(part: str, vocab_size: int) -> int:
    if not part.isdecimal() or int(part) >= vocab_size:
        raise ValueError(f"--prompt: got {part!r}, allowed: token ids from 0 to {vocab_size - 1}, such as 1,2,3")
    return int(part)
