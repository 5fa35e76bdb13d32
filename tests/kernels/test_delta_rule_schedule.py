"""The rules by which the delta rule's Triton kernels are laid out: no Triton and no device needed.

Shapes: B batch, T tokens, H query heads, G key/value heads, N documents (N = B unless packed), C chunk, M chunks.
"""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from zoo.kernels.delta_rule import schedule
from zoo.kernels.delta_rule.schedule import Configuration, Layout, configuration
from zoo.kernels.triton_support import MAX_HEAD_DIM

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MULTIPROCESSORS = 132


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "num_multiprocessors", lambda _: MULTIPROCESSORS)


def make_layout(seq_len: int, **options: Any) -> Layout:
    defaults = {
        "batch": 1,
        "num_documents": None,
        "heads": 16,
        "groups": options.get("heads", 16),
        "key_dim": 128,
        "value_dim": 128,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "segment_length": None,
        "normalize": True,
        "gated": False,
    }
    return Layout(seq_len=seq_len, **defaults | options)


def segments(layout: Layout, lengths: list[int]) -> list[int]:
    """Of each document."""
    return [max(1, math.ceil(math.ceil(length / layout.chunk) / layout.segment_chunks)) for length in lengths]


def slices(layout: Layout) -> int:
    return math.ceil(layout.value_dim / configuration(layout.key_dim, layout.value_dim, layout.dtype).scan.block_v)


@pytest.mark.parametrize("seq_len", [1, 64, 2048, 32768])
def test_enough_heads_need_no_segments(seq_len: int) -> None:
    layout = make_layout(seq_len, batch=8)
    assert layout.later_segments == 0
    assert segments(layout, [seq_len] * 8) == [1] * 8


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 24])
@pytest.mark.parametrize("seq_len", [16_384, 32_768, 100_000, 1_000_000])
def test_segments_fill_the_device(seq_len: int, heads: int) -> None:
    layout = make_layout(seq_len, heads=heads)
    (count,) = segments(layout, [seq_len])
    programs = count * heads * slices(layout)
    assert programs <= MULTIPROCESSORS
    longest = layout.num_chunks <= 8 * layout.later_segments  # then each has as few chunks as pay
    assert longest or programs > 0.7 * MULTIPROCESSORS


@pytest.mark.parametrize("seq_len", [1, 64, 65, 512])
@pytest.mark.parametrize("batch", [1, 3])
def test_short_sequences_are_one_segment(seq_len: int, batch: int) -> None:
    layout = make_layout(seq_len, heads=1, batch=batch)
    assert layout.later_segments > 0
    assert segments(layout, [seq_len] * batch) == [1] * batch


@pytest.mark.parametrize("heads", [1, 2, 8, 16, 33, 132, 500])
@pytest.mark.parametrize("batch", [1, 2, 5, 40])
def test_later_segments_do_not_depend_on_the_length(batch: int, heads: int) -> None:
    later_segments = {make_layout(n, batch=batch, heads=heads).later_segments for n in (1, 63, 64, 500, 5000, 10**6)}
    assert len(later_segments) == 1


@pytest.mark.parametrize(
    ("segment_length", "chunks"), [(1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (1000, 16), (10**6, 15625)]
)
def test_a_segment_length_is_rounded_up_to_chunks(segment_length: int, chunks: int) -> None:
    for layout in (make_layout(5000, batch=8), make_layout(5000, heads=1), make_layout(70, num_documents=3)):
        assert replace(layout, segment_length=segment_length).segment_chunks == min(chunks, layout.num_chunks)


def random_cases() -> list[tuple[int | None, list[int], dict[str, Any]]]:
    """Segment length, the lengths of the documents, and the rest of a layout, dense and packed by turns."""
    draw = random.Random(0)
    cases = []
    for i in range(600):
        length = draw.choice([None, None, 1, 64, 128, 1000])
        options = {
            "heads": draw.choice([1, 2, 4, 16]),
            "key_dim": draw.choice([16, 128, 256]),
            "value_dim": draw.choice([16, 100, 128, 256]),
            "dtype": draw.choice(DTYPES),
        }
        if i % 2:
            batch, seq_len = draw.randint(1, 12), draw.choice([1, 64, draw.randint(1, 3000), draw.randint(1, 60_000)])
            cases.append((length, [seq_len] * batch, options | {"batch": batch}))
        else:
            longest = draw.choice([2, 100, 1000, 20_000])
            lengths = [draw.choice([0, 1, draw.randint(0, longest)]) for _ in range(draw.randint(1, 60))] + [longest]
            draw.shuffle(lengths)
            cases.append((length, lengths, options | {"num_documents": len(lengths)}))
    return cases


def test_later_segments_bound_the_segments_beyond_the_first_of_each_document() -> None:
    for segment_length, lengths, options in random_cases():
        seq_len = lengths[0] if "batch" in options else sum(lengths)
        layout = make_layout(seq_len, segment_length=segment_length, **options)
        counts = segments(layout, lengths)
        assert sum(counts) - len(lengths) <= layout.later_segments, (segment_length, lengths, options)
        assert sum(math.ceil(length / layout.chunk) for length in lengths) <= layout.num_chunks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_documents", [None, 5])
def test_saved_shapes(num_documents: int | None, gated: bool, normalize: bool, dtype: torch.dtype) -> None:
    layout = make_layout(
        200,
        batch=3 if num_documents is None else 1,
        num_documents=num_documents,
        heads=4,
        groups=2,
        key_dim=160,
        value_dim=80,
        dtype=dtype,
        gated=gated,
        normalize=normalize,
    )
    chunk = 32 if dtype == torch.float32 else 64
    chunks = 3 * math.ceil(200 / chunk) if num_documents is None else (200 + 5 * (chunk - 1)) // chunk
    (inverse, scores, delta, states, scales, transitions), dtypes = zip(*layout.saved_shapes(), strict=True)
    assert (layout.chunk, layout.num_chunks) == (chunk, chunks)
    assert layout.num_states == (3 if num_documents is None else 5)
    assert inverse == (chunks, 2, chunk, chunk)
    assert scores == (chunks, 4, chunk, chunk)
    assert delta == (layout.batch, 200, 2, 80)
    assert states == (chunks, 2, 80, 160)
    assert scales == (sum(layout.scale_sizes),)
    assert transitions == (layout.later_segments, 2, 160, 160)
    assert dtypes == (*[dtype] * 4, *[torch.float32] * 2)
    writing, key_norms, query_norms, *decays = layout.scale_sizes
    rows = chunks * chunk
    assert (writing, key_norms, query_norms) == (2 * rows, 2 * rows * normalize, 4 * rows * normalize)
    assert all((size > 0) == gated for size in decays)


@pytest.mark.parametrize("dtype", DTYPES)
def test_configurations(dtype: torch.dtype) -> None:
    """Blocks are powers of two of at least 16, no wider than the head needs; the warps are what is tested: 4 or 8."""
    dims = range(1, MAX_HEAD_DIM + 1)
    distinct: set[Configuration] = set()
    for key_dim in dims:
        for value_dim in (1, 16, 17, 33, 64, 80, 100, 128, 129, 256):
            chosen = configuration(key_dim, value_dim, dtype)
            distinct.add(chosen)
            assert chosen.block_k == max(16, 2 ** math.ceil(math.log2(key_dim)))
            assert chosen.prepare_warps in (4, 8)
            for blocks in (chosen.summary, chosen.scan, chosen.reverse, chosen.gradients):
                assert blocks.block_v in (16, 32, 64, 128, 256)
                assert blocks.block_v <= max(16, 2 ** math.ceil(math.log2(value_dim)))
                assert blocks.warps in (4, 8)
                assert blocks.stages >= 1
    powers = (16, 32, 64, 128, 256)  # which the tests on a device go through
    assert distinct == {configuration(key_dim, value_dim, dtype) for key_dim in powers for value_dim in powers}
    assert configuration(128, 128, torch.bfloat16) == configuration(128, 128, torch.float16)
