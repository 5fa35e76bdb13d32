"""Building a model from its configuration."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from zoo.config import Source, resolve
from zoo.model import LanguageModel

__all__ = ["build"]


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
        dtype: of the parameters, a floating-point type.
        seed: of the initialisation, leaving the global generators as they are; None draws from those.

    Raises:
        ZooConfigError: the configuration cannot be used.
        ValueError: ``dtype`` is no floating-point type.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating-point type, got {dtype}")
    config = resolve(source, overrides)
    device = torch.device(device)
    with ExitStack() as stack:
        stack.enter_context(device)
        if seed is not None and device.type != "meta":
            stack.enter_context(torch.random.fork_rng())
            torch.manual_seed(seed)
        model = LanguageModel(config)
    return model.to(dtype)
