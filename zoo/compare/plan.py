"""What a comparison will measure, decided and checked before anything runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from zoo import machine, recipes
from zoo.config import ModelConfig, resolve
from zoo.text import batches, read_bytes

__all__ = ["DECODING", "MODES", "Cell", "Mode", "Plan", "make_plan"]

Mode = Literal["train", "forward", "prefill", "decode"]
MODES: tuple[Mode, ...] = ("train", "forward", "prefill", "decode")
DECODING: tuple[Mode, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement.

    Attributes:
        recipe: name of the architecture.
        length: tokens in a sequence; those before a step of "decode", and the step's own, are as many.
        mode: "train" (forward, loss, backward, AdamW), "forward" (the logits alone), "prefill" (a prompt's state, and
            the logits of its last token) or "decode" (one more token of each row).
        compiled: by torch.compile, or eager.
        batch_size: sequences.
    """

    recipe: str
    length: int
    mode: Mode
    compiled: bool
    batch_size: int

    def __str__(self) -> str:
        how = "compiled" if self.compiled else "eager"
        return f"{self.recipe}  B {self.batch_size}  T {self.length}  {self.mode}  {how}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole comparison.

    Attributes:
        configs: by the name that the results show.
        modes: what a step is.
        lengths: tokens in a sequence, each.
        batch_sizes: sequences of a step, each, where `DECODING`.
        tokens_per_step: the same for every length, elsewhere.
        steps: timed steps of each cell, after ``warmup`` untimed ones.
        text: [N] uint8, what the models learn from.
    """

    configs: dict[str, ModelConfig]
    modes: tuple[Mode, ...]
    lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    tokens_per_step: int
    warmup: int
    steps: int
    seed: int
    device: torch.device
    dtype: torch.dtype
    text: Tensor

    def cells(self) -> list[Cell]:
        """Every measurement; those that share a model stand together."""
        return [
            Cell(recipe, length, mode, compiled, batch_size)
            for recipe in self.configs
            for mode in self.modes
            for compiled in (False, True)
            for length in self.lengths
            for batch_size in (self.batch_sizes if mode in DECODING else (max(1, self.tokens_per_step // length),))
        ]


def make_plan(
    sources: list[str],
    *,
    modes: tuple[Mode, ...] = ("train", "forward"),
    lengths: tuple[int, ...] | None = None,
    batch_sizes: tuple[int, ...] | None = None,
    tokens_per_step: int | None = None,
    warmup: int = 3,
    steps: int = 10,
    seed: int = 0,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    text: Path | None = None,
) -> Plan:
    """Fill in what was left open, and refuse what cannot run.

    Args:
        sources: recipes or paths; none stands for every recipe, tiny on a CPU and 340m on CUDA.
        modes: of `MODES`.
        lengths: 1024 on a CPU, 2048 on CUDA, if None; to decode, 256 and 1024, or 1024, 8192 and 32768.
        batch_sizes: to decode, 1 and 8 on a CPU, 1, 8 and 64 on CUDA, if None.
        tokens_per_step: 2048 on a CPU, 32768 on CUDA, or the longest length if that is more, if None.
        warmup: untimed steps of each cell.
        steps: timed steps of each cell.
        seed: of the initialisation.
        device: CUDA when there is one, if None.
        dtype: fp32 on a CPU, bf16 on CUDA, if None.
        text: a text file; the Python standard library's sources if None.

    Raises:
        ValueError: something in it is missing, out of range or unfit (`ZooConfigError` for a configuration).
    """
    where = machine.find(device)
    on_cuda = where.type == "cuda"
    decodes = set(modes) <= set(DECODING)
    if not decodes and set(modes) & set(DECODING):
        raise ValueError(f"--mode: got {','.join(modes)}, allowed: prefill and decode together, or train and forward")
    if lengths is None and decodes:
        lengths = (1024, 8192, 32768) if on_cuda else (256, 1024)
    elif lengths is None:
        lengths = (2048 if on_cuda else 1024,)
    if batch_sizes is None:
        batch_sizes = (1, 8, 64) if on_cuda else (1, 8)
    if tokens_per_step is None:
        tokens_per_step = max(32768 if on_cuda else 2048, *lengths)
    for name, value, least in (
        ("lengths", min(lengths), 1),
        ("batch", min(batch_sizes), 1),
        ("tokens-per-step", tokens_per_step, max(lengths)),
        ("warmup", warmup, 1),
        ("steps", steps, 1),
    ):
        if value < least:
            raise ValueError(f"--{name}: got {value}, allowed: at least {least}")
    size = "340m" if on_cuda else "tiny"
    configs = _configs(sources or [name for name in recipes.names() if name.endswith(f"-{size}")])
    data = read_bytes(text)
    if not decodes:
        batches(data, 1, max(lengths))  # raises if the text is too short
    return Plan(
        configs=configs,
        modes=modes,
        lengths=lengths,
        batch_sizes=batch_sizes,
        tokens_per_step=tokens_per_step,
        warmup=warmup,
        steps=steps,
        seed=seed,
        device=where,
        dtype=dtype or (torch.bfloat16 if on_cuda else torch.float32),
        text=data,
    )


def _configs(sources: list[str]) -> dict[str, ModelConfig]:
    configs: dict[str, ModelConfig] = {}
    for source in sources:
        config = resolve(source)
        if config.vocab_size < 256:
            raise ValueError(f"{source}: vocab_size is {config.vocab_size}, allowed: at least 256, for bytes of text")
        if config.name in configs:
            raise ValueError(f"{source}: another model is called {config.name!r} too; give it another name")
        configs[config.name] = config
    return configs
