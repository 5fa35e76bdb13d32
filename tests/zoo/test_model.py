"""The language model in eager mode: results, packing, state, initialisation, errors.

Shapes: B batch, T sequence length, V vocabulary.
"""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from zoo import registry
from zoo.mixers.contract import Mixer, State

TINY = zoo.list("*-tiny", kind="recipe")
V = 256
SMALL: dict[str, Any] = {
    "vocab_size": 37,
    "dim": 24,
    "num_layers": 3,
    "block": {"mlp": {"name": "swiglu", "hidden_dim": 20}},
    "layers": {
        "pattern": [
            {"mixer": {"name": "delta_net", "num_heads": 2}},
            {"mixer": {"name": "sliding_window", "num_heads": 2, "window": 5}},
            {"mixer": {"name": "full_attention", "num_heads": 2}},
        ]
    },
}


def small(**changes: Any) -> zoo.LanguageModel:
    return zoo.build(SMALL | changes, seed=0)


def batch(length: int = 40, rows: int = 3, vocab: int = 37) -> tuple[Tensor, Tensor]:
    tokens, labels = torch.randint(vocab, (2, rows, length))
    labels[:, ::5] = -100
    return tokens, labels


def gradients(model: zoo.LanguageModel, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.fixture(params=TINY)
def recipe(request: pytest.FixtureRequest) -> zoo.LanguageModel:
    return zoo.build(request.param, seed=0)


def test_recipes_are_found() -> None:
    assert {"transformer-tiny", "deltanet-tiny", "deltanet-swa-tiny", "deltanet-global-tiny", "swa-full-tiny"} <= {
        *TINY
    }


@pytest.mark.parametrize("length", [1, 2, 65])
def test_logits_and_loss(recipe: zoo.LanguageModel, length: int) -> None:
    tokens, labels = batch(length, vocab=V)
    labels[0, 0] = 3
    logits, loss = recipe(tokens), recipe(tokens, labels=labels)
    assert (logits.shape, logits.dtype) == ((3, length, V), torch.float32)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten()), rtol=1e-5, atol=1e-6)
    assert torch.equal(recipe.loss(tokens, labels), loss)
    assert torch.equal(recipe(tokens, labels), loss)


def test_initial_loss_is_that_of_a_guess(recipe: zoo.LanguageModel) -> None:
    assert recipe(*batch(rows=8, vocab=V)).item() == pytest.approx(math.log(V), abs=0.1)


def test_causal(recipe: zoo.LanguageModel) -> None:
    tokens, _ = batch(70, vocab=V)
    changed = tokens.clone()
    changed[:, 33] = (changed[:, 33] + 1) % V
    before, after = recipe(tokens), recipe(changed)
    assert torch.equal(before[:, :33], after[:, :33])
    assert (before[:, 33:] != after[:, 33:]).any(-1).all(0)[0]


def test_packed_equals_separate(recipe: zoo.LanguageModel) -> None:
    pieces = (5, 1, 2, 64, 40, 1)
    tokens, labels = batch(sum(pieces), 1, vocab=V)
    bounds = torch.tensor([0, *pieces]).cumsum(0).int()
    separate = torch.cat([recipe(piece) for piece in tokens.split(pieces, 1)], 1)
    torch.testing.assert_close(recipe(tokens, cu_seqlens=bounds), separate, rtol=1e-4, atol=1e-5)
    expected = F.cross_entropy(separate.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(recipe.loss(tokens, labels, bounds), expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_prefill_and_steps_equal_the_whole(recipe: zoo.LanguageModel) -> None:
    tokens, _ = batch(75, vocab=V)
    state, logits = recipe.init_state(3, 75), []
    for piece in tokens.split((5, 1, 1, 60, 3, 1, 1, 1, 1, 1), 1):
        y, state = recipe(piece, state=state)
        logits.append(y)
    torch.testing.assert_close(torch.cat(logits, 1), recipe(tokens), rtol=1e-4, atol=1e-5)
    assert state["positions"].tolist() == [75, 75, 75]


@torch.no_grad()
@pytest.mark.parametrize("prefill", [0, 1, 2, 31, 32, 33, 63, 64, 65])
def test_steps_after_a_prefill_equal_the_whole(recipe: zoo.LanguageModel, prefill: int) -> None:
    """At every position, within 1e-5 of the largest logit; the windows are of 32."""
    tokens, _ = batch(70, vocab=V)
    state, logits = recipe.init_state(3, 70), []
    if prefill:
        y, state = recipe(tokens[:, :prefill], max_length=70)
        logits.append(y)
    for position in range(prefill, 70):
        y, state = recipe(tokens[:, position : position + 1], state=state)
        logits.append(y)
    expected = recipe(tokens)
    assert (torch.cat(logits, 1) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_twenty_steps_lower_the_loss(recipe: zoo.LanguageModel) -> None:
    tokens, labels = batch(32, 4, vocab=V)
    optimizer = torch.optim.AdamW(recipe.parameters(), lr=3e-3)
    for _ in range(20):
        loss = recipe(tokens, labels=labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert recipe(tokens, labels=labels) < 0.5 * math.log(V)


def test_every_parameter_has_a_gradient(recipe: zoo.LanguageModel) -> None:
    for name, gradient in gradients(recipe, recipe(*batch(70, vocab=V))).items():
        assert torch.isfinite(gradient).all(), name
        assert gradient.any(), name


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16(name: str, autocast: bool) -> None:
    exact, model = zoo.build(name, seed=0), zoo.build(name, seed=0, dtype=torch.float32 if autocast else torch.bfloat16)
    tokens, labels = batch(66, vocab=V)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits, loss = model(tokens), model(tokens, labels=labels)
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    assert loss.item() == pytest.approx(exact(tokens, labels=labels).item(), abs=2e-3)
    for parameter, gradient in zip(model.parameters(), gradients(model, loss).values(), strict=True):
        assert gradient.dtype == parameter.dtype
        assert torch.isfinite(gradient).all()


@torch.no_grad()
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("autocast", [True, False])
def test_decodes_in_bfloat16(name: str, autocast: bool) -> None:
    model = zoo.build(name, seed=0, dtype=torch.float32 if autocast else torch.bfloat16)
    tokens, _ = batch(40, vocab=V)
    state, logits = model.init_state(3, 40), []
    forms = {key: (value.dtype, value.shape) for key, value in state.items(True, True)}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for piece in tokens.split((30, 5, 1, 1, 1, 1, 1), 1):
            y, state = model(piece, state=state)
            logits.append(y)
        expected = model(tokens)
    assert (torch.cat(logits, 1) - expected).norm() < 0.03 * expected.norm()
    assert {key: (value.dtype, value.shape) for key, value in state.items(True, True)} == forms


@torch.no_grad()
def test_state_is_reordered_copied_and_moved_as_a_tensordict() -> None:
    model, (tokens, _) = small(), batch(12)
    _, state = model(tokens[:, :9], state=model.init_state(3, 12))
    kept = state.clone()
    reordered, one, double = state[torch.tensor([2, 0, 0])].clone(), state[1:2].clone(), torch.cat([state, state])
    expected, after = model(tokens[:, 9:], state=state)
    assert after.batch_size == (3,)
    again, _ = model(tokens[:, 9:], state=kept)
    assert torch.equal(again, expected)
    actual, _ = model(tokens[[2, 0, 0], 9:], state=reordered)
    torch.testing.assert_close(actual, expected[[2, 0, 0]])
    actual, _ = model(tokens[1:2, 9:], state=one)
    torch.testing.assert_close(actual, expected[1:2])
    actual, _ = model(torch.cat([tokens, tokens])[:, 9:], state=double)
    torch.testing.assert_close(actual, torch.cat([expected, expected]))
    assert after.to("meta")["positions"].device.type == "meta"


def test_state_has_one_entry_for_each_layer_and_its_bytes_are_counted() -> None:
    model = small()
    state = model.init_state(2, 30)
    assert [*state["layers"].keys()] == ["0", "1", "2"]
    held = sum(value.nbytes for value in state["layers"].values(True, True))
    assert held == 2 * model.config.state_bytes(30, torch.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_counts_its_parameters(tied: bool) -> None:
    model = small(tie_embeddings=tied)
    assert sum(parameter.numel() for parameter in model.parameters()) == model.config.num_params


def test_tied_embeddings_stay_tied() -> None:
    model, (tokens, labels) = small(tie_embeddings=True), batch()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.embedding.weight.mul_(2)
    assert not torch.allclose(model(tokens), copied(tokens))
    assert torch.equal(small(tie_embeddings=True)(tokens), model(tokens))
    expected = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    for a, b in zip(gradients(model, expected).values(), gradients(model, model(tokens, labels)).values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_meta_model_comes_to_life(tied: bool) -> None:
    model = zoo.build(SMALL | {"tie_embeddings": tied}, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    tokens, labels = batch(20)
    assert model(tokens.to("meta")).shape == (3, 20, 37)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    expected = small(tie_embeddings=tied)
    for living in (model, expected):
        torch.manual_seed(0)
        living.reset_parameters()
    assert model(tokens, labels=labels).item() == pytest.approx(math.log(37), abs=0.1)
    assert torch.equal(model(tokens), expected(tokens))


def test_reset_reaches_every_parameter() -> None:
    values = {"name": "delta_net", "num_heads": 2, "conv_bias": True, "output_gate": True}
    options = [values, {"name": "full_attention", "num_heads": 2, "qk_norm": "rms"}]
    norm = {"name": "layer_norm", "bias": True}
    model = small(num_layers=2, block={"norm": norm}, layers=[{"mixer": mixer} for mixer in options])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.reset_parameters()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name


def test_activation_checkpointing_changes_nothing() -> None:
    tokens, labels = batch()
    results = []
    for wanted in (False, True):
        model = small(activation_checkpointing=wanted)
        loss = model(tokens, labels=labels)
        results.append({"loss": loss} | gradients(model, loss))
    for name, expected in results[0].items():
        assert torch.equal(results[1][name], expected), name


def test_activation_checkpointing_recomputes_each_block() -> None:
    model, calls = small(activation_checkpointing=True), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    model(*batch()).backward()
    assert len(calls) == 6


def test_seed_decides_and_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, second, other = small(), small(), zoo.build(SMALL, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_seed_on_meta_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    zoo.build(SMALL, seed=3, device="meta")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_scale_of_the_initialisation() -> None:
    model = zoo.build("transformer-tiny", seed=0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            expected = 0.02 / 8**0.5 if name.endswith("out_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        else:
            assert (parameter == 1).all()


def test_inference_mode() -> None:
    model, (tokens, labels) = small(), batch()
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens, labels=labels), small()(tokens, labels=labels))
        assert model(tokens, state=model.init_state(3, 40))[0].shape == (3, 40, 37)


def test_a_mixer_may_be_made_of_mixers() -> None:
    class Twice(Mixer):
        supports = ("decode",)

        def __init__(self, options: Any, dim: int) -> None:
            super().__init__()
            self.parts: Any = torch.nn.ModuleList(small().mixers()[:2])
            self.shared = tuple(shared for part in self.parts for shared in part.shared)

        def forward(self, x: Tensor, context: Any, state: Any = None) -> Any:
            states = [state and {key[1:]: y for key, y in state.items() if key[0] == str(i)} for i in range(2)]
            results = [part(x, context, part_state) for part, part_state in zip(self.parts, states, strict=True)]
            following = [part_state for _, part_state in results]
            return sum(y for y, _ in results), state and self._named(following)

        def init_state(self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype) -> State:
            return self._named([part.init_state(batch_size, max_length, device, dtype) for part in self.parts])

        @staticmethod
        def _named(states: list[Any]) -> Any:
            return {f"{i}{key}": y for i, state in enumerate(states) for key, y in state.items()}

    zoo.register_mixer("twice")(Twice)
    try:
        model, (tokens, _) = small(layers={"pattern": [{"mixer": "twice"}]}), batch(12)
        with torch.no_grad():
            state, logits = model.init_state(3, 12), []
            for piece in tokens.split((7, 1, 4), 1):
                y, state = model(piece, state=state)
                logits.append(y)
            torch.testing.assert_close(torch.cat(logits, 1), model(tokens), rtol=1e-4, atol=1e-5)
    finally:
        del registry._entries()["mixer", "twice"]


@torch.no_grad()
def test_a_prefill_that_makes_the_state(recipe: zoo.LanguageModel) -> None:
    """Rows of different length, then steps; equal to what goes on from an empty state."""
    tokens, _ = batch(70, rows=4, vocab=V)
    lengths = torch.tensor([65, 1, 40, 64])
    logits, state = recipe(tokens[:, :65], max_length=100, lengths=lengths)
    again, other = recipe(tokens[:, :65], state=recipe.init_state(4, 100), lengths=lengths)
    last, _ = recipe(tokens[:, :65], max_length=100, lengths=lengths, last=True)
    whole = recipe(tokens)
    for row, length in enumerate(lengths.tolist()):
        for found in (logits, again):
            torch.testing.assert_close(found[row, :length], whole[row, :length], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last[row, 0], whole[row, length - 1], rtol=1e-4, atol=1e-5)
    assert state["positions"].tolist() == other["positions"].tolist() == lengths.tolist()
    for offset in range(5):
        step = tokens.gather(1, lengths[:, None] + offset)
        logits, state = recipe(step, state=state)
        torch.testing.assert_close(recipe(step, state=other)[0], logits, rtol=1e-4, atol=1e-5)
        for row, length in enumerate(lengths.tolist()):
            torch.testing.assert_close(logits[row, 0], whole[row, length + offset], rtol=1e-4, atol=1e-5)


def test_a_state_is_updated_in_place_and_takes_no_gradients() -> None:
    model, (tokens, _) = small(), batch(12)
    state = model.init_state(3, 12)
    places = {key: value.data_ptr() for key, value in state.items(True, True)}
    for piece in tokens.split((7, 1, 1, 3), 1):
        logits, state = model(piece, state=state)
        assert not logits.requires_grad
    assert {key: value.data_ptr() for key, value in state.items(True, True)} == places
    assert not any(value.requires_grad for value in state.values(True, True))


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["full_attention", "deltaformer", {"name": "sliding_window", "window": 20}], ids=str)
def test_a_state_goes_back_to_an_earlier_position(mixer: Any) -> None:
    model, (tokens, _) = small(layers={"pattern": [{"mixer": mixer}]}), batch(20)
    _, state = model(tokens[:, :14], max_length=20)
    state = model.crop(state, 9)
    assert state["positions"].tolist() == [9, 9, 9]
    for piece in tokens[:, 9:19].split((1, 1, 8), 1):
        _, state = model(piece, state=state)
    logits, _ = model(tokens[:, 19:], state=state)
    torch.testing.assert_close(logits[:, 0], model(tokens)[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mixer", "name"),
    [
        ("delta_net", "delta_net"),
        ({"name": "sliding_window", "window": 13}, "sliding_window"),
        ({"name": "deltaformer", "conv_size": 4}, "deltaformer"),
    ],
    ids=str,
)
def test_what_cannot_go_back_says_so_before_anything_changes(mixer: Any, name: str) -> None:
    model, (tokens, _) = small(layers={"pattern": [{"mixer": "full_attention"}, {"mixer": mixer}]}), batch(14)
    _, state = model(tokens, max_length=20)
    with pytest.raises(ValueError, match=f"^length: layer 1's mixer '{name}' cannot go back from 14 tokens to 9$"):
        model.crop(state, 9)
    with pytest.raises(ValueError, match=r"^length: expected at least 0, got -1$"):
        model.crop(state, -1)
    assert model.crop(state, 14)["positions"].tolist() == [14, 14, 14]
