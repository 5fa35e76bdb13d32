"""Which backend "auto" is: by tables that are what was measured, and without a GPU to say so."""

import json
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from zoo.kernels import triton_support
from zoo.kernels.attention import BACKENDS, backends, fastest
from zoo.kernels.attention.backends import Call, choose, mask_kind
from zoo.kernels.attention.fastest import TABLES, Table

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CALL = Call(CUDA, BF16, 64, 64, windowed=True, packed=False)
DTYPES = (BF16, FP16, FP32, FP64)
KINDS = tuple(product((False, True), (False, True)))  # windowed, packed
SIZES = ((64, 64), (8, 8), (64, 32), (96, 96), (100, 100), (128, 256), (300, 300), (300, 8))

RESULTS = Path(__file__).parents[2] / "benchmarks"
MEASURED = {"bfloat16": BF16, "float32": FP32}

HALVES: Table = {
    (False, False): {64: ("sdpa",), 128: ("flash", "sdpa")},
    (False, True): {64: ("flash", "flex", "sdpa"), 128: ("triton", "sdpa")},
    (True, False): {64: ("flash", "triton", "flex", "sdpa"), 128: ("flex", "triton", "sdpa"), 192: ("triton", "sdpa")},
    (True, True): {64: ("flex", "sdpa"), 128: ("sdpa",)},
}
SINGLES: Table = {kind: {64: ("flex", "triton", "sdpa")} for kind in KINDS}


def changed(**changes: Any) -> Call:
    return CALL._replace(**changes)


def heads(key_dim: int, value_dim: int | None = None) -> Call:
    return changed(key_dim=key_dim, value_dim=value_dim or key_dim)


def table_of(ranking: list[dict[str, Any]]) -> Table:
    """What a file's ranking says, without xformers and without what is slower than sdpa."""
    table: Table = {}
    assert len({(kind["windowed"], kind["layout"], kind["head_dim"]) for kind in ranking}) == len(ranking)
    for kind in sorted(ranking, key=lambda kind: (kind["windowed"], kind["layout"], kind["head_dim"])):
        names = [name for name in kind["slowdowns"] if name != "xformers"]
        faster = takewhile(lambda name: name != "sdpa", names)
        table.setdefault((kind["windowed"], kind["layout"] == "packed"), {})[kind["head_dim"]] = (*faster, "sdpa")
    return table


def literal(name: str, table: Table) -> str:
    rows = "".join(f"    {kind}: {row},\n" for kind, row in table.items())
    return f"{name}: Table = {{\n{rows}}}\n".replace("'", '"')


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of this file, for a GPU that has what Triton's kernels need."""
    monkeypatch.setattr(fastest, "TABLES", {BF16: HALVES, FP16: HALVES, FP32: SINGLES})
    monkeypatch.setattr(triton_support, "shared_memory", lambda _: 232_448)


def rankings(dtype: str) -> list[dict[str, Any]]:
    """Of all files with results of a dtype."""
    files = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("attention_h200_*.json"))]
    assert {file["settings"]["dtype"] for file in files} == set(MEASURED)
    return [kind for file in files if file["settings"]["dtype"] == dtype for kind in file["ranking"]]


@pytest.mark.parametrize("name", MEASURED)
def test_a_table_is_what_was_measured(name: str) -> None:
    expected = table_of(rankings(name))
    assert TABLES[MEASURED[name]] == expected, (
        f"kernels/attention/fastest.py should say:\n\n{literal(f'_{name.upper()}', expected)}"
    )


def test_half_precision_has_one_table_and_single_another() -> None:
    assert TABLES.keys() == {BF16, FP16, FP32}
    assert TABLES[FP16] is TABLES[BF16]


def test_every_row_can_serve_all_calls_and_asks_for_no_optional_package() -> None:
    for table in TABLES.values():
        assert table.keys() == set(KINDS)
        for row in table.values():
            assert row
            for names in row.values():
                assert names.index("sdpa") == len(names) - 1
                assert set(names) <= set(BACKENDS) - {"xformers"}


def test_from_a_ranking_to_a_table() -> None:
    kind = {"head_dim": 128, "layout": "packed", "windowed": False}
    first = kind | {"slowdowns": {"xformers": 1.0, "triton": 1.1, "flex": 1.2, "sdpa": 9.0, "flash": 9.5}}
    second = kind | {"head_dim": 64, "slowdowns": {"flash": 1.0, "xformers": 1.2}}
    third = kind | {"layout": "dense", "slowdowns": {"sdpa": 1.0, "flash": 1.3}}
    table = table_of([first, second, third])
    assert literal("TABLE", table) == (
        "TABLE: Table = {\n"
        '    (False, False): {128: ("sdpa",)},\n'
        '    (False, True): {64: ("flash", "sdpa"), 128: ("triton", "flex", "sdpa")},\n'
        "}\n"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_on_cuda_it_is_sdpa(dtype: torch.dtype) -> None:
    for device, (windowed, packed), dims in product(("cpu", "mps", "xpu", "meta"), KINDS, SIZES):
        assert choose("auto", Call(torch.device(device), dtype, *dims, windowed, packed)) == "sdpa"


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("call", "backend"),
    [
        (CALL, "flash"),
        (changed(windowed=False), "sdpa"),
        (changed(packed=True), "flex"),
        (changed(windowed=False, packed=True), "flash"),
        (changed(dtype=FP16), "flash"),
        (changed(dtype=FP32), "flex"),
        (changed(dtype=FP64), "sdpa"),
        (changed(device=torch.device("cuda", 1)), "flash"),
        (heads(8), "flash"),
        (heads(72), "flex"),
        (heads(128), "flex"),
        (heads(136), "triton"),
        (heads(64, 128), "flex"),
        (heads(128, 64), "flex"),
        (heads(192), "triton"),
        (heads(256), "triton"),  # beyond all that was measured, as the largest
        (heads(257), "sdpa"),  # for no other
        (heads(64, 32), "triton"),  # not flash: D_v is another
        (heads(60), "triton"),  # not flash: no multiple of 8
        (heads(128, 8), "triton"),  # not flex: D_v below 16
        (heads(32, 8)._replace(packed=True), "sdpa"),
    ],
    ids=str,
)
def test_the_first_that_can_serve_a_call(call: Call, backend: str) -> None:
    assert choose("auto", call) == backend


@pytest.mark.usefixtures("made_up")
def test_what_is_missing_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "shared_memory", lambda _: 101_376)
    assert [choose("auto", heads(*dims)) for dims in ((64, 64), (64, 32), (192, 192))] == ["flash", "flex", "sdpa"]
    monkeypatch.setattr(backends, "_missing", lambda name, _: None if name == "sdpa" else "something")
    assert choose("auto", CALL) == "sdpa"


@pytest.mark.usefixtures("made_up")
def test_more_numbers_than_int32_counts() -> None:
    """PyTorch's kernels would be wrong."""
    for windowed, packed in KINDS:
        assert choose("auto", changed(windowed=windowed, packed=packed, numel=2**31)) == "triton"
    assert choose("auto", changed(windowed=False, numel=2**31 - 1)) == "sdpa"
    assert choose("auto", changed(device=CPU, numel=2**31)) == "sdpa"
    with pytest.raises(
        ValueError, match=r"^impl: 'auto' needs at most 2\^31 - 1 numbers in .*, got 2147483648 with all heads$"
    ):
        choose("auto", changed(dtype=FP64, numel=2**31))


@pytest.mark.usefixtures("made_up")
def test_masks_are_those_of_the_choice() -> None:
    for device, dtype, kind, dims in product((CPU, CUDA), DTYPES, KINDS, SIZES):
        call = Call(device, dtype, *dims, *kind)
        assert mask_kind("auto", call) == mask_kind(choose("auto", call), call)
    calls = CALL, heads(128), changed(windowed=False), changed(dtype=FP64)
    assert [mask_kind("auto", call) for call in calls] == [None, "blocks", None, "pairs"]


@pytest.mark.usefixtures("fresh_compiler", "made_up")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_choice_in_one_graph(dtype: torch.dtype) -> None:
    def code(k: Tensor, v: Tensor, windowed: bool, packed: bool) -> Tensor:
        call = Call(CUDA, k.dtype, k.shape[1], v.shape[1], windowed, packed)
        return k + 10 * BACKENDS.index(choose("auto", call)) + (mask_kind("auto", call) is None)

    call = torch.compile(code, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=len(KINDS) * len(SIZES)):
        for kind, dims in product(KINDS, SIZES):
            k, v = (torch.zeros(2, dim, dtype=dtype) for dim in dims)
            assert torch.equal(call(k, v, *kind), code(k, v, *kind))
    assert not counters["graph_break"]
