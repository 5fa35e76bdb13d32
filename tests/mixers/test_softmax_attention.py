"""What is particular to full and sliding-window attention, and rotary positions.

Shapes: B batch, T sequence length, D model width, H heads, d_h head dim.
"""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from zoo import ZooConfigError, components
from zoo.kernels.ring import slot_positions, write
from zoo.mixers import context
from zoo.mixers.context import AttentionMask, Context, RotaryTable
from zoo.mixers.rotary import rotate
from zoo.mixers.softmax_attention import SoftmaxAttention


def attention(name: str = "full_attention", dim: int = 24, **options: Any) -> SoftmaxAttention:
    component = components.resolve("mixer", {"name": name} | options, dim)
    return cast(SoftmaxAttention, components.make("mixer", component, dim))


def mix(layer: SoftmaxAttention, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    return layer(x, Context.from_tokens(x[..., 0], cu_seqlens).share(layer.shared))[0]


def rotated(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    table = RotaryTable(x.shape[-1], (theta,))
    return rotate(x, Context(positions=positions[None]).share((table,)), table)


@pytest.mark.parametrize("window", [17, 18, 1000])
def test_window_of_at_least_all_tokens_equals_full_attention(window: int) -> None:
    full, sliding, x = (
        attention(num_heads=2),
        attention("sliding_window", num_heads=2, window=window),
        torch.randn(3, 17, 24),
    )
    sliding.load_state_dict(full.state_dict())
    torch.testing.assert_close(mix(sliding, x), mix(full, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [1, 4, 16])
def test_window_counts_the_token_itself(window: int) -> None:
    layer, x = attention("sliding_window", num_heads=2, window=window), torch.randn(1, 17, 24)
    changed = x.clone()
    changed[:, 0] += 1
    differs = (mix(layer, x) != mix(layer, changed)).any(-1)[0]
    assert differs.tolist() == [t < window for t in range(17)]


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_heads_equal_repeated_ones(num_kv_heads: int) -> None:
    grouped, full, x = attention(num_heads=4, num_kv_heads=num_kv_heads), attention(num_heads=4), torch.randn(3, 11, 24)
    q, k, v = grouped.in_proj.weight.split(grouped.widths)
    k, v = (y.unflatten(0, (num_kv_heads, 6)).repeat_interleave(4 // num_kv_heads, 0).flatten(0, 1) for y in (k, v))
    full.load_state_dict({"in_proj.weight": torch.cat([q, k, v]), "out_proj.weight": grouped.out_proj.weight})
    torch.testing.assert_close(mix(full, x), mix(grouped, x), rtol=1e-5, atol=1e-6)


def test_l2_norm_equals_rms_norm_without_weights() -> None:
    rms, l2, x = attention(num_heads=2, qk_norm="rms"), attention(num_heads=2, qk_norm="l2"), 5 * torch.randn(3, 11, 24)
    l2.load_state_dict(rms.state_dict(), strict=False)
    torch.testing.assert_close(mix(l2, x), mix(rms, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"backend": "reference"}, {"backend": "sdpa"}])
@pytest.mark.parametrize("name", ["full_attention", "sliding_window"])
def test_backends_agree(name: str, options: dict[str, Any]) -> None:
    auto, other, x = attention(name, num_heads=2), attention(name, num_heads=2, **options), torch.randn(3, 11, 24)
    other.load_state_dict(auto.state_dict())
    torch.testing.assert_close(mix(other, x), mix(auto, x), rtol=1e-5, atol=1e-6)


def test_rotary_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 9, 2, 16).unbind()
    scores = []
    for shift in (0, 1, 100):
        positions = torch.arange(9) + shift
        scores.append(torch.einsum("bqhd,bkhd->bhqk", rotated(q, positions), rotated(k, positions)))
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores[2], scores[0], rtol=1e-4, atol=1e-4)  # angles near 100 carry 1e-5 in fp32


def test_rotary_turns_each_pair_by_its_frequency() -> None:
    x = torch.zeros(1, 3, 1, 4)
    x[..., 0] = x[..., 1] = 1  # the halves are paired: (0, 2) and (1, 3)
    angles = torch.arange(3.0)[:, None] * torch.tensor([1.0, 100.0**-0.5])
    expected = torch.cat([angles.cos(), angles.sin()], -1)[None, :, None]
    torch.testing.assert_close(rotated(x, torch.arange(3), theta=100.0), expected)


def test_rope_makes_a_difference_and_theta_too() -> None:
    layers = [attention(num_heads=2), attention(num_heads=2, rope=False), attention(num_heads=2, rope_theta=10.0)]
    x = torch.randn(1, 9, 24)
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
        assert not torch.allclose(mix(layer, x), mix(layers[0], x), atol=1e-4)


def test_packed_positions_restart() -> None:
    context = Context.from_tokens(torch.zeros(1, 9), torch.tensor([0, 1, 1, 5, 9], dtype=torch.int32))
    assert context.positions.tolist() == [[0, 0, 1, 2, 3, 0, 1, 2, 3]]


def test_equal_tables_are_shared() -> None:
    masks = AttentionMask(3, 8), AttentionMask(3, 8), AttentionMask(4, 8), AttentionMask(None, 8)
    assert len(set(masks)) == 3
    assert attention(rope_theta=10).shared == attention(rope_theta=10.0).shared
    assert attention().shared != attention(rope_theta=10).shared


def test_slots_of_a_ring() -> None:
    assert slot_positions(torch.tensor([0, 2, 4, 6, 9]), 4).tolist() == [
        [-4, -3, -2, -1],
        [0, 1, -2, -1],
        [0, 1, 2, 3],
        [4, 5, 2, 3],
        [8, 5, 6, 7],
    ]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11])
@pytest.mark.parametrize("start", [0, 1, 6])
def test_ring_holds_the_last_tokens(start: int, length: int) -> None:
    tokens = torch.arange(1.0, start + length + 1)[None, :, None, None]
    cache = torch.zeros(1, 4, 1, 1)
    for t in range(start):
        write(cache, tokens[:, t : t + 1], torch.tensor([t]))
    write(cache, tokens[:, start:], torch.tensor([start]))
    held = slot_positions(torch.tensor([start + length]), 4)[0]
    assert cache.flatten().tolist() == [max(p + 1, 0) for p in held.tolist()]


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("full_attention", {"head_dim": 7}, "head_dim.*7.*even number, or rope: false"),
        ("full_attention", {"window": 3}, "window"),
        ("sliding_window", {"window": 0}, "window.*0.*at least 1"),
        ("full_attention", {"qk_norm": "l1"}, "qk_norm.*l1"),
        ("full_attention", {"backend": "fast"}, "backend.*fast"),
    ],
)
def test_bad_options_are_named(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ZooConfigError, match=match):
        attention(name, **options)


def test_equal_masks_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sizes of heads, or who reads them."""
    made: list[tuple[Any, ...]] = []
    make_mask = context.make_mask

    def noted(kind: Any, length: int, window: int | None, *rest: Any) -> Any:
        made.append((kind, window))
        return make_mask(kind, length, window, *rest)

    monkeypatch.setattr(context, "make_mask", noted)
    layers = [attention("sliding_window", num_heads=heads, window=window) for heads in (2, 4) for window in (3, 5)]
    wanted = tuple(layer.mask for layer in (*layers, attention(num_heads=2), attention(num_heads=4)))
    Context.from_tokens(torch.zeros(1, 9), torch.tensor([0, 4, 9])).share(wanted)
    assert made == [("pairs", 3), ("pairs", 5), ("pairs", None)]
