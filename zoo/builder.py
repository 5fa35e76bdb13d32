"""Building a model from its configuration."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from zoo.config import ModelConfig, Source, resolve
from zoo.model import LanguageModel

__all__ = ["DTYPES", "build", "construct"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def build(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
) -> LanguageModel:
    """Make a language model.

    Args:
        source: a recipe's name, the path of a YAML file, or a mapping.
        overrides: ``key=value`` in order, the values in YAML: ``layers.3.mixer=full_attention``.
        device: where the parameters are made; "meta" makes none, for counting or for loading weights later.
        dtype: of the parameters, one of `DTYPES`.
        seed: of the initialisation, leaving the global generators as they are; None draws from those.

    Raises:
        ZooConfigError: the configuration cannot be used.
        ValueError: ``dtype`` is none of these.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(map(str, DTYPES))}, got {dtype}")
    return construct(resolve(source, overrides), torch.device(device), dtype, seed)


def construct(config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int | None) -> LanguageModel:
    """Make the model of a resolved configuration; see `build`."""
    with ExitStack() as stack:
        stack.enter_context(device)
        if seed is not None and device.type != "meta":
            stack.enter_context(_seeded(device, seed))
        return LanguageModel(config).to(dtype)


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """The generators of the CPU and of this device alone start from the seed, and go back to where they were."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
