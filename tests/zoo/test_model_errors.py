"""What the language model refuses, and in which words.

Shapes: B batch, T sequence length.
"""

from typing import Any

import pytest
import torch

import zoo
from zoo import registry
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
            r"^lengths: expected \[2\] int64, got \[3\] torch.int64$",
        ),
        (
            {"max_length": 9, "lengths": torch.tensor([1.0, 2.0])},
            r"^lengths: expected \[2\] int64, got .* torch.float32$",
        ),
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
