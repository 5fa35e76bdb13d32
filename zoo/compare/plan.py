"""What a comparison will measure, decided and checked before anything runs."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from zoo import machine, recipes
from zoo.compare import peers
from zoo.config import ModelConfig, resolve
from zoo.text import batches, read_bytes

__all__ = ["COMPILES", "DECODING", "MODES", "Cell", "Compile", "Mode", "Plan", "make_plan"]

Mode = Literal["train", "forward", "prefill", "decode"]
MODES: tuple[Mode, ...] = get_args(Mode)
DECODING: tuple[Mode, ...] = ("prefill", "decode")
Compile = Literal["none", "model", "block"]
COMPILES: tuple[Compile, ...] = get_args(Compile)
_LONGEST = 1_000_000  # seconds, of a timeout: the system counts milliseconds in 32 bits


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement.

    Attributes:
        recipe: name of the architecture; of a peer with its library in front.
        peer: whose model it is, of `zoo.compare.peers`; None for the zoo's.
        mode: "train" (forward, loss, backward, AdamW), "forward" (the logits alone), "prefill" (a prompt's state, and
            the logits of its last token) or "decode" (one more token of each row).
        dtype: of parameters and activations.
        compile: "none" (eager), "model" (one graph) or "block".
        length: tokens in a sequence; those before a step of "decode", and the step's own, are as many.
        batch_size: sequences.
    """

    recipe: str
    peer: str | None
    mode: Mode
    dtype: str
    compile: Compile
    length: int
    batch_size: int

    @property
    def group(self) -> tuple[Any, ...]:
        """What cells that share their compiled graphs have in common: all but sizes; a step of decode shares none."""
        shared = self.recipe, self.mode, self.dtype, self.compile
        return (*shared, self.length, self.batch_size) if self.mode == "decode" else shared

    def __str__(self) -> str:
        how = "eager" if self.compile == "none" else f"compiled by {self.compile}"
        return f"{self.recipe}  {self.mode}  {self.dtype}  B {self.batch_size}  T {self.length}  {how}"

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> "Cell":
        """The cell that a row of results belongs to."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole comparison.

    Attributes:
        configs: by the name that the results show.
        peers: libraries whose models are measured beside those that are like them.
        modes: what a step is.
        compiles: eager, and how it is compiled.
        dtypes: of parameters and activations, by name.
        lengths: tokens in a sequence, each, by mode.
        batch_sizes: sequences of a step, each, by mode; empty where ``tokens_per_step`` says it.
        tokens_per_step: the same for every length, to train and of forward passes without batch sizes.
        warmup: untimed steps of each cell, in front of the timed ones.
        steps: timed steps of each cell.
        overrides: of the recipes, as they were given.
        text: what the models learn from; see `zoo.text.read_bytes`.
        profile: whether each cell's time is sorted by layers and kinds as well.
        timeout: seconds after which a cell is given up.
    """

    configs: dict[str, ModelConfig]
    peers: tuple[str, ...]
    modes: tuple[Mode, ...]
    compiles: tuple[Compile, ...]
    dtypes: tuple[str, ...]
    lengths: dict[Mode, tuple[int, ...]]
    batch_sizes: dict[Mode, tuple[int, ...]]
    tokens_per_step: int
    warmup: int
    steps: int
    seed: int
    device: torch.device
    overrides: tuple[str, ...]
    text: Path | None
    text_bytes: int
    profile: bool
    timeout: float

    def cells(self) -> list[Cell]:
        """Every measurement; those of one group stand together, and a peer's behind those of its architecture."""
        return [
            Cell(name, peer, mode, dtype, compile, length, batch_size)
            for recipe, config in self.configs.items()
            for peer in (None, *(peer for peer in self.peers if peers.resembles(peer, config)))
            for name in [recipe if peer is None else f"{peer}/{recipe}"]
            for mode in self.modes
            if peer is None or mode not in DECODING
            for dtype, compile in product(self.dtypes, self.compiles)
            if peer is None or compile != "block"
            for length in self.lengths[mode]
            for batch_size in self.batch_sizes[mode] or (max(1, self.tokens_per_step // length),)
        ]

    def config(self, cell: Cell) -> ModelConfig:
        """Of the cell's architecture, a peer's too."""
        return self.configs[cell.recipe.removeprefix(f"{cell.peer}/")]

    def dynamic(self, cell: Cell) -> bool | None:
        """Whether the cell's graph has symbols for sizes: where its group has several."""
        several = len(self.lengths[cell.mode]) > 1 or len(self.batch_sizes[cell.mode]) > 1
        return True if several and cell.mode != "decode" else None

    def hashes(self) -> dict[str, str]:
        """What tells two configurations of one name apart, an edited file's, say."""
        return {name: sha256(config.to_yaml().encode()).hexdigest()[:12] for name, config in self.configs.items()}

    def settings(self) -> dict[str, Any]:
        """What makes figures comparable, beside the cells and the machine; None for what is not used."""
        counted = any(mode not in DECODING and not self.batch_sizes[mode] for mode in self.modes)
        return {
            "tokens_per_step": self.tokens_per_step if counted else None,
            "warmup": self.warmup,
            "steps": self.steps,
            "seed": self.seed,
            "text_bytes": self.text_bytes,
            "overrides": list(self.overrides),
        }


def make_plan(
    sources: list[str],
    *,
    overrides: tuple[str, ...] = (),
    modes: tuple[Mode, ...] = ("train", "forward"),
    compiles: tuple[Compile, ...] = ("none", "model"),
    dtypes: tuple[str, ...] | None = None,
    lengths: tuple[int, ...] | None = None,
    batch_sizes: tuple[int, ...] | None = None,
    tokens_per_step: int | None = None,
    beside: tuple[str, ...] = (),
    warmup: int = 3,
    steps: int = 10,
    seed: int = 0,
    device: str | None = None,
    text: Path | None = None,
    profile: bool = False,
    timeout: float = 1800,
) -> Plan:
    """Fill in what was left open, and refuse what cannot run.

    Args:
        sources: recipes or paths; none stands for every recipe, tiny on a CPU and 340m on CUDA.
        overrides: each a KEY=VALUE or several with spaces between; of several overrides each makes one more variant
            of every source, "" the plain one.
        modes: of `MODES`.
        compiles: of `COMPILES`.
        dtypes: fp32 on a CPU, bf16 on CUDA, if None.
        lengths: 1024 on a CPU, 2048 on CUDA, if None; to decode, 256 and 1024, or 1024, 8192 and 32768.
        batch_sizes: to decode, 1 and 8 on a CPU, 1, 8 and 64 on CUDA, if None; to train, see ``tokens_per_step``.
        tokens_per_step: 2048 on a CPU, 32768 on CUDA, or the longest length if that is more, if None.
        beside: of `zoo.compare.peers.PEERS`.
        warmup: untimed steps of each cell.
        steps: timed steps of each cell.
        seed: of the initialisation.
        device: CUDA when there is one, if None.
        text: a text file; the Python standard library's sources if None.
        profile: see `Plan`.
        timeout: see `Plan`.

    Raises:
        ValueError: something in it is missing, out of range or unfit (`ZooConfigError` for a configuration).
    """
    where = machine.find(device)
    on_cuda = where.type == "cuda"
    by_length: dict[Mode, tuple[int, ...]] = {mode: lengths or _default_lengths(mode, on_cuda) for mode in modes}
    trained = [length for mode in modes if mode not in DECODING for length in by_length[mode]]
    if trained and batch_sizes is not None and tokens_per_step is not None:
        raise ValueError("--tokens-per-step: it stands beside --batch, allowed: one of the two, to train and forward")
    if tokens_per_step is None:
        tokens_per_step = max(32768 if on_cuda else 2048, *trained, 1)
    for name, value, least in (
        ("lengths", min(map(min, by_length.values())), 1),
        ("batch", min(batch_sizes or (1,)), 1),
        ("tokens-per-step", tokens_per_step, max(trained, default=1)),
        ("warmup", warmup, 1),
        ("steps", steps, 1),
        ("timeout", timeout, 1),
    ):
        if value < least:
            raise ValueError(f"--{name}: got {value}, allowed: at least {least}")
    if not timeout <= _LONGEST:
        raise ValueError(f"--timeout: got {timeout}, allowed: 1 to {_LONGEST}")
    size = "340m" if on_cuda else "tiny"
    configs = _configs(sources or [name for name in recipes.names() if name.endswith(f"-{size}")], overrides)
    _check_peers(beside, configs.values())
    data = read_bytes(text)
    if trained:
        batches(data, 1, max(trained))  # raises if the text is too short
    default_batches = (1, 8, 64) if on_cuda else (1, 8)
    return Plan(
        configs=configs,
        peers=beside,
        modes=modes,
        compiles=compiles,
        dtypes=dtypes or (("bfloat16",) if on_cuda else ("float32",)),
        lengths=by_length,
        batch_sizes={mode: batch_sizes or (default_batches if mode in DECODING else ()) for mode in modes},
        tokens_per_step=tokens_per_step,
        warmup=warmup,
        steps=steps,
        seed=seed,
        device=where,
        overrides=overrides,
        text=text and text.resolve(),
        text_bytes=data.shape[0],
        profile=profile,
        timeout=timeout,
    )


def _default_lengths(mode: Mode, on_cuda: bool) -> tuple[int, ...]:
    if mode in DECODING:
        return (1024, 8192, 32768) if on_cuda else (256, 1024)
    return (2048 if on_cuda else 1024,)


def _configs(sources: list[str], overrides: tuple[str, ...]) -> dict[str, ModelConfig]:
    """Every source with every variant, by name."""
    configs: dict[str, ModelConfig] = {}
    for source, text in product(sources, overrides or ("",)):
        variant = [part for part in re.split(r"\s+(?=[\w./+-]+=)", text.strip()) if part]
        config = resolve(source, variant)
        named = any(part.startswith("name=") for part in variant)
        name = config.name if named or not variant else f"{config.name} {' '.join(variant)}"
        if config.vocab_size < 256:
            raise ValueError(f"{source}: vocab_size is {config.vocab_size}, allowed: at least 256, for bytes of text")
        if name in configs:
            raise ValueError(f"{source}: another model is called {name!r} too; give it another name")
        configs[name] = config
    return configs


def _check_peers(beside: tuple[str, ...], configs: Iterable[ModelConfig]) -> None:
    if beside and not any(peers.resembles(peer, config) for config in configs for peer in beside):
        allowed = "; ".join(f"{peer} beside {peers.PEERS[peer].has}" for peer in beside)
        raise ValueError(f"--peers: {', '.join(beside)} has nothing like these models, allowed: {allowed}")
