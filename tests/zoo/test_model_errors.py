"""What the language model refuses, and in which words.

Shapes: B batch, T sequence length.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zoo
from zoo import registry
from zoo.decoding import Decoder
from zoo.mixers.full_attention import FullAttention

TOKENS = torch.zeros(2, 5, dtype=torch.int64)
ROW = TOKENS[:1]


def model(mixer: Any = "full_attention", num_layers: int = 2) -> zoo.LanguageModel:
    layers = {"pattern": [{"mixer": mixer}]}
    return zoo.build({"vocab_size": 11, "dim": 16, "num_layers": num_layers, "layers": layers}, seed=0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"tokens": TOKENS + 11}, r"tokens: expected ids from 0 to 10, got 11 to 11"),
        ({"tokens": TOKENS - 1}, r"tokens: expected ids from 0 to 10, got -1"),
        ({"tokens": TOKENS.int()}, r"tokens: expected \[B, T\] int64.*int32"),
        ({"tokens": TOKENS.float()}, r"tokens: expected \[B, T\] int64.*float32"),
        ({"tokens": TOKENS[0]}, r"tokens: expected \[B, T\] int64.*got \[5\]"),
        ({"tokens": TOKENS[:, :0]}, r"tokens: expected .*not empty, got \[2, 0\]"),
        ({"labels": TOKENS[:, :4]}, r"labels: expected \[2, 5\] int64, got \[2, 4\]"),
        ({"labels": TOKENS.int()}, r"labels: expected \[2, 5\] int64, got \[2, 5\] torch.int32"),
        ({"labels": TOKENS + 11}, r"labels: expected ids from 0 to 10, got 11"),
        ({"labels": TOKENS - 1}, r"labels: expected ids from 0 to 10, got -1"),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens: .* expected B = 1, got B = 2"),
        ({"tokens": ROW, "cu_seqlens": torch.tensor([0, 4])}, r"cu_seqlens: expected to rise from 0 to T = 5"),
        ({"tokens": ROW, "cu_seqlens": torch.tensor([1, 5])}, r"cu_seqlens: expected to rise from 0"),
        ({"tokens": ROW, "cu_seqlens": torch.tensor([0, 3, 2, 5])}, r"cu_seqlens: expected to rise.*\[0, 3, 2, 5\]"),
        ({"tokens": ROW, "cu_seqlens": torch.tensor([0, 7, 5])}, r"cu_seqlens: expected to rise"),
        ({"tokens": ROW, "cu_seqlens": torch.tensor([0.0, 5.0])}, r"cu_seqlens: expected \[N \+ 1\] int32 or int64"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        model()(**({"tokens": TOKENS} | arguments))


@pytest.mark.parametrize("extra", [{"labels": ROW}, {"cu_seqlens": torch.tensor([0, 5])}], ids=["labels", "cu_seqlens"])
def test_state_goes_with_nothing_else(extra: dict[str, Any]) -> None:
    decoder: Any = model()
    with pytest.raises(ValueError, match="state: decoding takes neither labels nor cu_seqlens"):
        decoder(ROW, state=decoder.init_state(1, 9), **extra)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"lengths": torch.tensor([1, 5])}, "^lengths, last: expected only in decoding, with state or max_length$"),
        ({"last": True}, "^lengths, last: expected only in decoding, with state or max_length$"),
        ({"max_length": 4}, "^max_length: expected at least the T = 5 of the tokens, got 4$"),
        ({"max_length": 4, "lengths": torch.tensor([5, 1])}, "^max_length: expected at least the T = 5 .*, got 4$"),
        ({"max_length": 9, "labels": TOKENS}, "^state: decoding takes neither labels nor cu_seqlens$"),
        (
            {"max_length": 9, "lengths": torch.tensor([1, 2, 3])},
            r"^lengths: expected \[2\] int64 on cpu, got \[3\] torch.int64 on cpu$",
        ),
        (
            {"max_length": 9, "lengths": torch.tensor([1.0, 2.0])},
            r"^lengths: expected \[2\] int64 on cpu, got \[2\] torch.float32 on cpu$",
        ),
        ({"max_length": 9, "lengths": [1, 2]}, r"^lengths: expected a tensor \[2\] int64, got \[1, 2\]$"),
        ({"max_length": 9, "lengths": torch.zeros(2, device="meta").long()}, "^lengths: .* on cpu, got .* on meta$"),
        ({"max_length": 9.0}, "^max_length: expected at least the T = 5 of the tokens, got 9.0$"),
        ({"state": {"layers": 1}}, "^state: expected one from this model's init_state, got dict$"),
        ({"max_length": 9, "lengths": torch.tensor([1, 6])}, r"^lengths: expected from 0 to T = 5, got \[1, 6\]$"),
        ({"max_length": 9, "lengths": torch.tensor([-1, 2])}, r"^lengths: expected from 0 to T = 5, got \[-1, 2\]$"),
    ],
    ids=str,
)
def test_bad_arguments_of_a_prefill_are_named(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        model()(TOKENS, **arguments)


def test_a_state_has_its_own_max_length() -> None:
    decoder: Any = model()
    with pytest.raises(ValueError, match=r"^max_length: expected none with a state, which has its own$"):
        decoder(TOKENS, state=decoder.init_state(2, 9), max_length=9)


def test_room_counts_tokens_that_are_there() -> None:
    decoder = model()
    _, state = decoder(TOKENS, state=decoder.init_state(2, 7), lengths=torch.tensor([5, 2]))
    kept = state.clone()
    with pytest.raises(ValueError, match=r"room for max_length = 7 tokens, these would make 8"):
        decoder(TOKENS, state=state, lengths=torch.tensor([3, 5]))
    assert (state == kept).all()
    decoder(TOKENS, state=state, lengths=torch.tensor([2, 5]))


@pytest.mark.parametrize("rows", [1, 3])
def test_state_of_another_batch_size(rows: int) -> None:
    decoder = model()
    with pytest.raises(ValueError, match=rf"state: expected batch size 2, got \[{rows}\]"):
        decoder(TOKENS, state=decoder.init_state(rows, 9))


@pytest.mark.parametrize("mixer", ["full_attention", "delta_net", {"name": "sliding_window", "window": 3}])
def test_no_token_beyond_max_length(mixer: Any) -> None:
    decoder = model(mixer)
    _, state = decoder(TOKENS, state=decoder.init_state(2, 6))
    _, state = decoder(TOKENS[:, :1], state=state)
    with pytest.raises(ValueError, match=r"room for max_length = 6 tokens, these would make 7"):
        decoder(TOKENS[:, :1], state=state)


@pytest.mark.parametrize(
    "other",
    [("full_attention", 3), ("full_attention", 1), ("delta_net", 2), ({"name": "full_attention", "num_heads": 4}, 2)],
    ids=["more layers", "fewer layers", "another mixer", "other heads"],
)
def test_state_of_another_model(other: tuple[Any, int]) -> None:
    with pytest.raises(ValueError, match="state: expected one from this model's init_state"):
        model()(TOKENS, state=model(*other).init_state(2, 9))


@pytest.mark.parametrize(("arguments", "match"), [((0, 9), "batch_size: .*got 0"), ((2, 0), "max_length: .*got 0")])
def test_state_of_nothing(arguments: tuple[int, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        model().init_state(*arguments)


@pytest.mark.parametrize("capability", ["packed", "decode"])
def test_what_a_mixer_lacks_is_refused(capability: str) -> None:
    supports = tuple({"packed", "decode"} - {capability})
    zoo.register_mixer("limited", supports=supports)(type("Limited", (FullAttention,), {}))
    try:
        limited = model({"name": "limited"})
    finally:
        del registry._entries()["mixer", "limited"]
    call = {"packed": lambda: limited(ROW, cu_seqlens=torch.tensor([0, 5])), "decode": lambda: limited.init_state(1, 5)}
    with pytest.raises(ValueError, match=f"layer 0's mixer 'limited' does not support '{capability}'"):
        call[capability]()


def test_parameters_of_another_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype: expected one of torch.float32, .*, got torch.int8"):
        zoo.build("transformer-tiny", dtype=torch.int8)


def ring(window: int) -> zoo.LanguageModel:
    return model({"name": "sliding_window", "window": window})


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("call", ["eager", "compiled", "decoder"])
def test_a_state_of_another_form_is_refused_before_anything_changes(call: str) -> None:
    """Forms are no values: they are looked at in graphs, too."""
    wide, narrow = ring(8), ring(4)
    _, state = wide(TOKENS, max_length=9)
    kept = state.clone()
    calls: dict[str, Any] = {
        "eager": lambda: narrow(TOKENS[:, :1], state=state),
        "compiled": lambda: torch.compile(narrow, backend="eager")(TOKENS[:, :1], state=state),
        "decoder": lambda: Decoder(narrow, state, compile=False)(TOKENS[:, 0]),
    }
    with pytest.raises(ValueError, match=r"with 'keys' of layer 0 \[2, 4, 1, 16\] .*, got \[2, 8, 1, 16\] torch"):
        calls[call]()
    assert (state == kept).all()


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["delta_net", "full_attention", {"name": "deltaformer", "conv_size": 4}], ids=str)
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda state: torch.cat([state, state])[::2],
            r"with positions contiguous, got strides .*; state.contiguous\(\) is$",
        ),
        (lambda state: state[:1].expand(2), "with positions contiguous, got strides"),
        (lambda state: state.to(torch.float64), "with positions .* torch.int64 on cpu, got .* torch.float64"),
        (lambda state: state.to("meta"), "with positions .* on cpu, got .* on meta"),
    ],
    ids=["strided", "expanded", "float64", "meta"],
)
def test_states_that_cannot_be_updated_in_place(mixer: Any, change: Callable[[Any], Any], match: str) -> None:
    decoder = model(mixer)
    _, state = decoder(TOKENS, max_length=9)
    changed, kept = change(state), state.clone()
    with pytest.raises(ValueError, match=f"^state: expected one from this model's init_state, {match}"):
        decoder(TOKENS[:, :1], state=changed)
    assert (state == kept).all()


@torch.no_grad()
@pytest.mark.parametrize("rows", [slice(None, None, 2), slice(1, 3)], ids=["strided", "view"])
def test_some_rows_of_a_state_go_on(rows: slice) -> None:
    decoder = model()
    tokens = torch.randint(11, (4, 6))
    _, state = decoder(tokens[:, :5], max_length=9)
    logits, _ = decoder(tokens[rows, 5:], state=state[rows].contiguous())
    torch.testing.assert_close(logits, decoder(tokens)[rows, 5:])


def test_a_state_made_in_inference_mode_stays_there() -> None:
    decoder = model()
    with torch.inference_mode():
        _, state = decoder(TOKENS, max_length=9)
        _, state = decoder(TOKENS[:, :1], state=state)
    with pytest.raises(ValueError, match=r"^state: positions was made in inference mode, .*; state.clone\(\) is not$"):
        decoder(TOKENS[:, :1], state=state)
    decoder(TOKENS[:, :1], state=state.clone())


def test_a_decoder_takes_one_token_of_each_row_while_there_is_room() -> None:
    language_model = model()
    _, state = language_model(TOKENS, max_length=7)
    decoder = Decoder(language_model, state, compile=False)
    for wrong in (TOKENS[:, :1], TOKENS[0, :1], TOKENS[:, 0].float()):
        with pytest.raises(ValueError, match=r"^tokens: expected \[2\] int64, got"):
            decoder(wrong)
    for _ in range(2):
        decoder(TOKENS[:, 0])
    with pytest.raises(ValueError, match=r"^state: all that it has room for is there; give a larger max_length$"):
        decoder(TOKENS[:, 0])
    assert state["positions"].tolist() == [7, 7]


def test_another_models_state_is_not_cropped() -> None:
    _, state = model("delta_net")(TOKENS, max_length=9)
    with pytest.raises(ValueError, match=r"^state: expected one from this model's init_state, with"):
        model("full_attention").crop(state, 2)
