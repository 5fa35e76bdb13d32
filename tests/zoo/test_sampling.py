"""Drawing tokens: filters against plain loops, frequencies, the ends of the uniforms, equals.

Shapes: B batch, V vocabulary.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.sampling import greedy, make_sampling, sample

CPU = torch.device("cpu")
LARGEST = 1 - 2**-24  # of fp32 uniforms


def draw(logits: Tensor, uniforms: Tensor, temperature: float = 1.0, **filters: Any) -> Tensor:
    how = make_sampling(temperature, filters.get("top_k"), filters.get("top_p"), CPU)
    assert how is not None
    return sample(logits, uniforms, how)


def filtered(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> dict[int, float]:
    """The tokens that stay, most likely first, and their probabilities: by loops over Python's numbers."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:top_k]
    weights = {token: math.exp((logits[token] - max(logits)) / temperature) for token in order}
    total, before, stays = sum(weights.values()), 0.0, {}
    for token, weight in weights.items():
        if top_p is None or before < top_p * total:
            stays[token] = weight
        before += weight
    return {token: weight / sum(stays.values()) for token, weight in stays.items()}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(None, None), (1, None), (5, None), (100, None), (None, 0.35), (None, 1.0), (7, 0.6), (40, 1e-9)],
)
def test_inverts_the_cumulative_probabilities(temperature: float, top_k: int | None, top_p: float | None) -> None:
    logits = torch.randn(37).mul(2)
    logits[5] = -math.inf
    stays = filtered(logits.tolist(), temperature, top_k, top_p)
    order = list(stays) if (top_k, top_p) != (None, None) else sorted(stays)
    bounds = torch.tensor([stays[token] for token in order], dtype=torch.float64).cumsum(0)
    uniforms = torch.rand(2000)
    uniforms = uniforms[(uniforms[:, None] - bounds).abs().amin(1) > 1e-6]  # fp32 logits may move the bounds
    expected = torch.tensor(order)[(bounds <= uniforms[:, None]).sum(1).clamp(max=len(order) - 1)]
    assert torch.equal(
        draw(logits.expand(len(uniforms), -1), uniforms, temperature, top_k=top_k, top_p=top_p), expected
    )


@pytest.mark.parametrize("filters", [{}, {"top_k": 6}, {"top_p": 0.8}])
def test_frequencies_are_the_probabilities(filters: dict[str, Any]) -> None:
    logits, count = torch.randn(12), 20_000
    tokens = draw(logits.expand(count, -1), torch.rand(count), 0.7, **filters)
    stays = filtered(logits.tolist(), 0.7, filters.get("top_k"), filters.get("top_p"))
    observed = tokens.bincount(minlength=12)
    assert set(observed.nonzero()[:, 0].tolist()) == set(stays)
    square = sum((observed[token].item() - count * p) ** 2 / (count * p) for token, p in stays.items())
    assert square < 40  # chi-square, at most 11 degrees of freedom: 1 in 30,000


@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 1.0}, {"top_k": 3, "top_p": 0.99}])
@pytest.mark.parametrize("uniform", [0.0, 2**-24, 0.5, LARGEST])
def test_never_draws_what_has_no_probability(uniform: float, filters: dict[str, Any]) -> None:
    logits = torch.randn(4, 1000)
    logits[:, :100], logits[:, -100:], logits[1, 101:] = -math.inf, -math.inf, -math.inf
    tokens = draw(logits, torch.full((4,), uniform), **filters)
    assert logits.gather(1, tokens[:, None]).isfinite().all()
    assert tokens[1] == 100


def test_the_smallest_and_the_largest_uniform_draw_the_first_and_the_last() -> None:
    logits = torch.tensor([[0.0, 1, 3, 2, 0]])
    assert [draw(logits, torch.tensor([u])).item() for u in (0.0, LARGEST)] == [0, 4]
    assert [draw(logits, torch.tensor([u]), top_k=3).item() for u in (0.0, LARGEST)] == [2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-40, 1.0, 1e38])
def test_top_k_of_one_is_greedy_among_equals_too(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.randint(8, (64, 300)).to(dtype)
    assert torch.equal(draw(logits, torch.rand(64), temperature, top_k=1), greedy(logits))


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = torch.tensor([0.25, 0.5, 0.125, 0.125]).log()
    for top_p, expected in ((0.5, {1}), (0.51, {0, 1}), (0.75, {0, 1}), (0.8, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        assert {*draw(logits.expand(500, -1), torch.rand(500), top_p=top_p).tolist()} == expected


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.2, 0.2, 0.2]).log()
    uniforms = torch.rand(500)
    assert {*draw(logits.expand(500, -1), uniforms, top_p=0.65).tolist()} == {0, 1, 2}
    assert {*draw(logits.expand(500, -1), uniforms, top_k=2, top_p=0.65).tolist()} == {0}


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e30, 1e300])
def test_extreme_temperatures_are_finite(temperature: float) -> None:
    logits = torch.tensor([[0.0, 3e38, -3e38, 1]])
    tokens = [draw(logits, torch.tensor([u]), temperature).item() for u in (0.0, 0.3, 0.7, LARGEST)]
    assert set(tokens) <= {0, 1, 2, 3}
    if temperature < 1:
        assert set(tokens) == {1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((-0.1, None, None), "temperature: expected a finite number from 0, got -0.1"),
        ((math.inf, None, None), "temperature: .* got inf"),
        ((math.nan, None, None), "temperature: .* got nan"),
        ((1.0, 0, None), "top_k: expected a whole number of at least 1, got 0"),
        ((1.0, None, 0.0), r"top_p: expected above 0 and at most 1, got 0\.0"),
        ((1.0, None, 1.5), r"top_p: .* got 1\.5"),
        ((1.0, None, math.nan), "top_p: .* got nan"),
        ((0.0, 5, None), "top_k, top_p: expected only with a temperature above 0"),
        ((0.0, None, 0.9), "top_k, top_p: expected only with a temperature above 0"),
    ],
)
def test_settings_out_of_range(settings: tuple[float, int | None, float | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_sampling(*settings, CPU)
