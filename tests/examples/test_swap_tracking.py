"""The Deltaformer's swap-tracking construction is exact with "round" (arXiv 2505.19488), and its script runs.

Shapes: N slots, S swaps, d head dim.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from zoo.kernels.deltaformer import Kappa
from zoo.mixers.context import Context

PATH = Path(__file__).parents[2] / "examples" / "swap_tracking.py"
_SPEC = importlib.util.spec_from_file_location("swap_tracking", PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
swap_tracking = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(swap_tracking)


def figures(kappa: Kappa, seed: int) -> dict[str, float]:
    keys, swaps = swap_tracking.make_task(64, 512, 60, seed)
    return swap_tracking.figures(swap_tracking.track(kappa, keys, swaps), swap_tracking.swap_list(64, swaps))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_round_tracks_swaps_exactly(seed: int) -> None:
    assert figures("round", seed) == {"error": 0.0, "argmax_right": 1.0}


def test_linear_is_not_exact_though_its_largest_entry_is_right() -> None:
    measured = figures("linear", 0)
    assert measured["error"] > 0.05
    assert measured["argmax_right"] == 1.0


@torch.no_grad()
@pytest.mark.parametrize("pieces", [1, 7])
def test_round_is_exact_with_a_decoding_state(pieces: int) -> None:
    keys, swaps = swap_tracking.make_task(8, 128, 6, 0)
    layer, tokens = swap_tracking.make_layer("round", 128), swap_tracking.make_sequence(keys, swaps)
    length = tokens.shape[1]
    state, outputs = layer.init_state(1, length, tokens.device, tokens.dtype), []
    for start in range(0, length, pieces):
        piece = tokens[:, start : start + pieces]
        context = Context.from_state(piece[..., 0], torch.tensor([start]), length).share(layer.shared)
        output, state = layer(piece, context, state)
        outputs.append(output)
    reads = swap_tracking.split_reads(torch.cat(outputs, 1), 8)
    truth = swap_tracking.swap_list(8, swaps)
    assert reads.shape == (7, 8, 128)
    assert (truth[0] != truth[-1]).any()
    assert torch.equal(reads, torch.nn.functional.one_hot(truth, 128).float())


def test_the_list_is_swapped() -> None:
    assert swap_tracking.swap_list(3, [(0, 2), (0, 1)]).tolist() == [[0, 1, 2], [2, 1, 0], [1, 2, 0]]


def test_the_error_is_of_the_worst_slot() -> None:
    truth = torch.tensor([[0, 1], [1, 0]])
    reads = torch.nn.functional.one_hot(truth, 3).double()
    reads[1, 1, 2] = -2
    reads[1, 0, 0] = 1.5
    assert swap_tracking.errors(reads, truth).tolist() == [0, 2]
    assert swap_tracking.figures(reads, truth) == {"error": 2, "argmax_right": 0.75}


def test_the_script_draws_and_ends_with_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "new" / "picture.png"
    swap_tracking.main(["--elements", "5", "--dim", "64", "--swaps", "4", "--seed", "3", "--out", str(picture)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [result[key] for key in ("elements", "dim", "swaps", "seed", "out")] == [5, 64, 4, 3, str(picture)]
    assert 0 < result["largest_cosine"] < 1
    assert list(result["kernels"]) == ["round", "linear", "relu"]
    assert result["kernels"]["round"] == {"error": 0.0, "argmax_right": 1.0}
    assert result["kernels"]["linear"]["error"] > 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--elements", "1"], "--elements: expected from 2 to --dim = 512, got 1"),
        (["--elements", "9", "--dim", "8"], "--elements: expected from 2 to --dim = 8, got 9"),
        (["--swaps", "0"], "--swaps: expected at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        swap_tracking.main(arguments)
    assert match in capsys.readouterr().err
