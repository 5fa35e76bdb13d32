"""Choosing each row's next token from its logits.

Shapes: B batch, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Sampling", "greedy", "make_sampling", "sample"]


class Sampling(NamedTuple):
    """How tokens are drawn, in tensors on the logits' device: other values need no other graph.

    They have one dimension: in tensors of none torch.compile looks for numbers, and traces twice.

    Attributes:
        temperature: [1] fp32, what logits are divided by.
        top_k: [1] int64, how many of the most likely tokens stay. None together with ``top_p``: all stay.
        top_p: [1] fp64, the probability that those which stay must reach.
    """

    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None


def make_sampling(temperature: float, top_k: int | None, top_p: float | None, device: torch.device) -> Sampling | None:
    """Check the settings, and bring them to the device.

    Args:
        temperature: at least 0, which stands for the most likely token always.
        top_k: at least 1, or None for all tokens.
        top_p: above 0 and at most 1, or None for 1.
        device: of the logits.

    Returns:
        What `sample` takes, or None where the temperature is 0: take `greedy`.

    Raises:
        ValueError: a setting is out of range, or would have no effect since the temperature is 0.
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature: expected a finite number from 0, got {temperature}")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k: expected a whole number of at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected above 0 and at most 1, got {top_p}")
    filters = top_k is not None or top_p is not None
    if temperature == 0:
        if filters:
            raise ValueError("top_k, top_p: expected only with a temperature above 0, which draws; got temperature 0")
        return None
    smallest = torch.finfo(torch.float32).tiny  # below it a quotient could be 0 / 0
    scale = torch.tensor([max(temperature, smallest)], dtype=torch.float32, device=device)
    if not filters:
        return Sampling(scale)
    most = torch.iinfo(torch.int64).max
    count = most if top_k is None else min(top_k, most)
    share = 1.0 if top_p is None else top_p
    return Sampling(
        scale,
        torch.tensor([count], dtype=torch.int64, device=device),
        torch.tensor([share], dtype=torch.float64, device=device),
    )


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row, the first of equals: [B, V] -> [B] int64."""
    return logits.argmax(-1)


def sample(logits: Tensor, uniforms: Tensor, how: Sampling) -> Tensor:
    """Draw a token for each row: the first whose cumulative probability exceeds the uniform.

    Probabilities are softmax(logits / temperature) in fp32. The ``top_k`` most likely tokens stay, of equals the first;
    of these, the fewest most likely whose share of their probability reaches ``top_p``, at least one.

    Args:
        logits: [B, V], of any floating-point dtype.
        uniforms: [B] fp32 in [0, 1).
        how: from `make_sampling`.

    Returns:
        [B] int64, never a token of probability 0.
    """
    logits = logits.float()
    logits = logits - logits.amax(-1, keepdim=True)  # first: a small temperature would make infinities
    if how.top_k is None or how.top_p is None:
        return _invert((logits / how.temperature).softmax(-1), uniforms)
    ranked, ids = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    probabilities = torch.where(ranks < how.top_k, (ranked / how.temperature).softmax(-1), 0)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    stays = cumulative - probabilities < how.top_p * cumulative[:, -1:]
    rank = _invert(torch.where(stays, probabilities, 0), uniforms)
    return ids.gather(-1, rank[:, None])[:, 0]


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The first place whose cumulative share exceeds the uniform: [B, V] and [B] -> [B].

    In fp64, whose rounding is far below the steps of the uniforms: no order of the additions gives another token.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    exceeds = cumulative > uniforms.double()[:, None] * cumulative[:, -1:]
    return (exceeds & (probabilities > 0)).int().argmax(-1)
