"""Generation: equal to recomputing everything, compiled in one graph, ragged prompts, stops, streams, errors.

Shapes: B batch, T longest prompt, N new tokens, V vocabulary.
"""

import copy
import gc
import pickle
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import zoo
from zoo import registry
from zoo.decoding import Decoder
from zoo.mixers.sliding_window import SlidingWindow

TINY = zoo.list("*-tiny", kind="recipe")
V = 256
MIXED: dict[str, Any] = {
    "vocab_size": V,
    "dim": 24,
    "num_layers": 4,
    "block": {"mlp": {"name": "swiglu", "hidden_dim": 20}},
    "layers": [
        {"mixer": {"name": "delta_net", "num_heads": 2}},
        {"mixer": {"name": "sliding_window", "num_heads": 2, "window": 5}},
        {"mixer": {"name": "deltaformer", "num_heads": 2}},
        {"mixer": {"name": "full_attention", "num_heads": 2}},
    ],
}
DRAWS: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"temperature": 0.9, "top_k": 30, "top_p": 0.9}]
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def mixed(layers: slice = slice(None), **options: Any) -> zoo.LanguageModel:
    """A model of four mixers, or some of them."""
    chosen = MIXED["layers"][layers]
    return sharpened(zoo.build(MIXED | {"layers": chosen, "num_layers": len(chosen)}, seed=0, **options))


def sharpened(model: zoo.LanguageModel) -> zoo.LanguageModel:
    """With weights so large that its tokens vary."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def prompts(rows: int = 3, length: int = 11) -> Tensor:
    return torch.randint(V, (rows, length))


@torch.no_grad()
def recomputed(model: zoo.LanguageModel, tokens: Tensor, count: int) -> Tensor:
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return tokens


@pytest.fixture
def quick_compiler(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs are made, but Inductor does not compile them."""
    del fresh_compiler
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.mark.parametrize("recipe", TINY)
def test_greedy_equals_recomputing_the_prefix(recipe: str) -> None:
    model, tokens = sharpened(zoo.build(recipe, seed=0)), prompts()
    ids = model.generate(tokens, 40)
    assert (ids.shape, ids.dtype, ids.requires_grad) == ((3, 51), torch.int64, False)
    assert torch.equal(ids, recomputed(model, tokens, 40))
    assert len(ids[:, 11:].unique()) > 10


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(
    ("recipe", "draw"), zip(["transformer-tiny", "deltanet-swa-tiny", "deltaformer-tiny"], DRAWS, strict=True)
)
def test_compiled_equals_eager(recipe: str, draw: dict[str, Any]) -> None:
    model, tokens, lengths = sharpened(zoo.build(recipe, seed=0)), prompts(), torch.tensor([11, 1, 6])
    expected = model.generate(tokens, 30, lengths=lengths, seed=1, **draw)
    assert torch.equal(model.generate(tokens, 30, lengths=lengths, seed=1, compile=True, **draw), expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_inductor_makes_one_graph_for_all_prompts_and_settings() -> None:
    model = mixed(slice(2))
    calls = [
        (prompts(), 20, {"temperature": 0.9, "top_k": 30}),
        (prompts(length=29), 35, {"temperature": 0.4, "top_p": 0.5, "stop_token": 7}),
        (prompts(length=1), 2, {"temperature": 1, "top_k": 3, "top_p": 0.9}),
    ]
    for index, (tokens, count, settings) in enumerate(calls):
        expected = model.generate(tokens, count, seed=3, **settings)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            assert torch.equal(model.generate(tokens, count, seed=3, compile=True, **settings), expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.usefixtures("quick_compiler")
def test_a_graph_for_each_size_of_the_state_batch_and_kind_of_drawing() -> None:
    model = mixed(slice(1))
    sizes = [(rows, count) for rows in (1, 2, 3) for count in (20, 60, 120)]  # more than the 8 of a code object
    for rows, count in sizes:
        model.generate(prompts(rows), count, compile=True, stop_token=0)
    assert counters["stats"]["unique_graphs"] == len(sizes)
    for draw in DRAWS:
        model.generate(prompts(1), 20, compile=True, **draw)
    assert counters["stats"]["unique_graphs"] == len(sizes) + 2


@pytest.mark.parametrize("draw", [{}, {"temperature": 0.9, "top_p": 0.9}])
def test_prompts_of_several_lengths_equal_each_alone(draw: dict[str, Any]) -> None:
    model, tokens, lengths = mixed(), prompts(4, 13), [5, 13, 1, 12]
    ids = model.generate(tokens, 15, lengths=torch.tensor(lengths), seed=0, **draw)
    changed = torch.where(torch.arange(13) < torch.tensor(lengths)[:, None], tokens, (tokens + 1) % V)
    assert torch.equal(model.generate(changed, 15, lengths=torch.tensor(lengths), seed=0, **draw), ids)
    for row, length in enumerate(lengths):
        assert torch.equal(ids[row, :length], tokens[row, :length])
        assert not ids[row, length + 15 :].any()
        if not draw:  # the noise depends on the row
            alone = model.generate(tokens[row : row + 1, :length], 15)
            assert torch.equal(ids[row : row + 1, : length + 15], alone)


def test_a_seed_decides_whatever_else_draws() -> None:
    model, tokens = mixed(), prompts()
    draw = partial(model.generate, tokens, 25, temperature=1.0)
    first = draw(seed=5)
    torch.rand(100)
    state = torch.get_rng_state()
    assert torch.equal(draw(seed=5, on_token=lambda _: torch.rand(3)), first)
    assert not torch.equal(draw(seed=6), first)
    torch.set_rng_state(state)
    free = draw()
    torch.set_rng_state(state)
    assert torch.equal(draw(), free)
    assert not torch.equal(draw(), free)
    assert torch.equal(model.generate(tokens, 12, temperature=1.0, seed=5), first[:, : 11 + 12])


def test_greedy_draws_nothing() -> None:
    before = torch.get_rng_state()
    mixed().generate(torch.ones(2, 3, dtype=torch.int64), 4)
    assert torch.equal(torch.get_rng_state(), before)


def test_top_k_of_one_is_greedy() -> None:
    model, tokens = mixed(), prompts()
    assert torch.equal(model.generate(tokens, 20, temperature=0.7, top_k=1), model.generate(tokens, 20))


def first_repeat(row: list[int]) -> tuple[int, int]:
    """The place of a token that stands nowhere before, past the start."""
    place = next(i for i in range(8, len(row)) if row[i] not in row[:i])
    return place, row[place]


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("compile", [False, True])
def test_a_row_stops_at_its_token_and_the_others_go_on(compile: bool) -> None:
    model, tokens = mixed(), prompts(2)
    free = model.generate(tokens, 60, temperature=1.0, seed=0)
    place, stop = first_repeat(free[0, 11:].tolist())
    ids = model.generate(tokens, 60, temperature=1.0, seed=0, stop_token=stop, compile=compile)
    for row in range(2):
        new = free[row, 11:].tolist()
        end = new.index(stop) if stop in new else 60
        assert ids[row, 11:].tolist() == new[:end] + [stop] * (60 - end)
    assert ids[0, 11 + place :].eq(stop).all()


@pytest.mark.parametrize("streams", [False, True])
def test_the_loop_ends_when_every_row_has_stopped(streams: bool) -> None:
    model, tokens, seen, calls = mixed(), prompts(1), [], []
    free = model.generate(tokens, 60, temperature=1.0, seed=0)
    place, stop = first_repeat(free[0, 11:].tolist())
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    ids = model.generate(
        tokens, 200, temperature=1.0, seed=0, stop_token=stop, on_token=seen.append if streams else None
    )
    assert ids[0].tolist() == free[0, : 11 + place].tolist() + [stop] * (200 - place)
    assert len(calls) == place + 1 if streams else len(calls) <= place + 32
    assert len(seen) == (place + 1 if streams else 0)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_streams_each_token(count: int) -> None:
    model, tokens, seen = mixed(), prompts(), []
    ids = model.generate(tokens, count, temperature=0.8, seed=0, on_token=seen.append)
    assert [x.shape for x in seen] == [(3,)] * count
    assert torch.equal(torch.stack(seen, 1), ids[:, 11:])


def test_the_model_is_left_as_it_was() -> None:
    model, modes = mixed(), []
    model.blocks[1].eval()
    before = [module.training for module in model.modules()]
    model.blocks[0].register_forward_pre_hook(lambda module, _: modes.append(module.training))

    def fail(_: Tensor) -> None:
        raise KeyboardInterrupt

    model.generate(prompts(), 3)
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompts(), 3, on_token=fail)
    assert set(modes) == {False}
    assert [module.training for module in model.modules()] == before
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.usefixtures("quick_compiler")
def test_a_model_is_copied_pickled_and_freed_after_it_compiled() -> None:
    model, tokens = mixed(slice(1)), prompts()
    expected = model.generate(tokens, 5, compile=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.generate(tokens, 5, compile=True), expected)
    alive = weakref.ref(model)
    del model, other
    gc.collect()
    assert alive() is None


def test_in_bfloat16_and_under_autocast() -> None:
    tokens = prompts()
    assert mixed(dtype=torch.bfloat16).generate(tokens, 5, temperature=1.0, top_p=0.9).shape == (3, 16)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert mixed().generate(tokens, 5).shape == (3, 16)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("compile", [False, True])
@torch.no_grad()
def test_a_decoder_gives_logits_that_later_steps_leave_alone(compile: bool) -> None:
    model, tokens = mixed(), prompts(length=30)
    _, state = model(tokens[:, :20], max_length=30)
    decoder = Decoder(model, state, compile=compile)
    steps = [decoder(tokens[:, place]) for place in range(20, 30)]
    torch.testing.assert_close(torch.stack(steps, 1), model(tokens)[:, 20:], rtol=1e-4, atol=1e-4)
    assert state["positions"].tolist() == [30] * 3


TOKENS = torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": TOKENS[0]}, r"tokens: expected \[B, T\] int64, not empty, got \[5\]"),
        ({"tokens": TOKENS[:, :0]}, r"tokens: .* got \[2, 0\]"),
        ({"tokens": TOKENS.int()}, r"tokens: .* got \[2, 5\] torch\.int32"),
        ({"tokens": TOKENS.to("meta")}, "tokens: expected the model's device, cpu, got meta"),
        ({"tokens": TOKENS + V}, "tokens: expected ids from 0 to 255"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected a whole number from 1 to 2147483642, got 0"),
        ({"lengths": torch.tensor([1, 2, 3])}, r"lengths: expected \[2\] int64 on cpu, got \[3\]"),
        ({"lengths": torch.tensor([1.0, 2.0])}, r"lengths: .* got \[2\] torch\.float32"),
        ({"lengths": torch.tensor([1, 6])}, r"lengths: expected from 1 to T = 5, got \[1, 6\]"),
        ({"lengths": torch.tensor([0, 5])}, r"lengths: .* got \[0, 5\]"),
        ({"temperature": -1.0}, "temperature: expected a finite number from 0, got -1"),
        ({"temperature": 1.0, "top_k": 0}, "top_k: expected a whole number of at least 1, got 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p: expected above 0"),
        ({"top_p": 0.9}, "top_k, top_p: expected only with a temperature above 0"),
        ({"stop_token": V}, "stop_token: expected an id from 0 to 255, got 256"),
        ({"stop_token": -1}, "stop_token: .* got -1"),
        ({"seed": -1}, r"seed: expected a whole number from 0 to 2\*\*64 - 1, got -1"),
    ],
)
def test_a_mistake_is_named_before_any_work(arguments: dict[str, Any], message: str) -> None:
    model, calls = mixed(), []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match=message):
        model.generate(**({"tokens": TOKENS, "max_new_tokens": 3} | arguments))
    assert calls == []


def test_a_mixer_that_cannot_decode() -> None:
    class Undecodable(SlidingWindow):
        supports = ()

    zoo.register_mixer("undecodable")(Undecodable)
    try:
        model = zoo.build(MIXED | {"layers": {"pattern": [{"mixer": {"name": "undecodable", "num_heads": 2}}]}})
        with pytest.raises(ValueError, match="mixer 'undecodable' does not support 'decode'"):
            model.generate(TOKENS, 3)
    finally:
        del registry._entries()["mixer", "undecodable"]


@on_cuda
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("recipe", ["deltanet-swa-tiny", "deltaformer-swa-tiny", "transformer-tiny"])
def test_cuda_graphs_equal_the_cpu(recipe: str, compile: bool, draw: dict[str, Any]) -> None:
    on_cpu = sharpened(zoo.build(recipe, seed=0))
    model = copy.deepcopy(on_cpu).cuda()
    tokens, lengths, seen = prompts(), torch.tensor([11, 1, 6]), []
    expected = on_cpu.generate(tokens, 30, lengths=lengths, seed=1, **draw)
    options = {"lengths": lengths.cuda(), "seed": 1, "compile": compile, "on_token": seen.append, **draw}
    ids = model.generate(tokens.cuda(), 30, **options).cpu()
    assert (ids == expected).float().mean() > 0.9  # a rounding may change a token, and what follows it
    rows = torch.arange(3)[:, None]
    assert torch.equal(torch.stack(seen, 1), ids[rows, lengths[:, None] + torch.arange(30)])


@on_cuda
def test_cuda_stops_early() -> None:
    model, tokens, calls, seen = mixed(device="cuda"), prompts(1).cuda(), [], []
    free = model.generate(tokens, 60, temperature=1.0, seed=0, compile=False)
    place, stop = first_repeat(free[0, 11:].tolist())
    replay = torch.cuda.CUDAGraph.replay
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (calls.append(1), replay(graph)))
        for on_token in (None, seen.append):
            calls.clear()
            settings = {"temperature": 1.0, "seed": 0, "stop_token": stop, "on_token": on_token, "compile": False}
            ids = model.generate(tokens, 200, **settings)
            assert ids[0].tolist() == free[0, : 11 + place].tolist() + [stop] * (200 - place)
            assert len(calls) <= place + 32
    assert len(seen) == place + 1


@on_cuda
@pytest.mark.parametrize("compile", [False, True])
@torch.no_grad()
def test_replayed_steps_of_a_decoder_survive_each_other(compile: bool) -> None:
    model, tokens = mixed(device="cuda"), prompts(length=30).cuda()
    _, state = model(tokens[:, :15], max_length=30)
    decoder = Decoder(model, state, compile=compile)
    steps = [decoder(tokens[:, place]) for place in range(15, 30)]
    torch.testing.assert_close(torch.stack(steps, 1), model(tokens)[:, 15:], rtol=1e-3, atol=1e-3)
    assert decoder.step.recorded is not None
