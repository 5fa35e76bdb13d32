"""Attention's Triton kernels against PyTorch's attention in float64, on a CUDA device or in Triton's interpreter.

Without a device they run in a process of their own, for the interpreter is chosen when the kernels are imported:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_attention_triton.py

Shapes: B batch, T tokens, H query heads, G key/value heads, D and D_v their sizes, N documents.
"""

import math
import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from comparing import LAYOUTS, assert_equal, assert_near_or_zero
from torch import Tensor

from zoo.kernels.attention import attention
from zoo.kernels.attention.schedule import Configuration, configuration, num_places

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 and a process of its own", allow_module_level=True)

from zoo.kernels.attention.launch import attention_backward, attention_forward
from zoo.kernels.attention.triton.tiles import blocks_of_keys
from zoo.kernels.triton.documents import cut

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEAVES = ("q", "k", "v")
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3}
PIECES = (0, 1, 2, 63, 0, 64, 65, 0)
W = 8
GUARD = 4096  # numbers before and after each tensor
FAR_AWAY = 1 << 30  # where no token stands


def inputs(
    seq_len: int,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (16, 20),
    dtype: torch.dtype = torch.float32,
    pieces: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Float64 leaves on the CPU that `dtype` can hold; `pieces` are lengths of documents."""
    generator = torch.Generator().manual_seed(seq_len)
    (num_heads, groups), (key_dim, value_dim) = heads, dims
    sizes = {"q": (num_heads, key_dim), "k": (groups, key_dim), "v": (groups, value_dim)}
    x: dict[str, Any] = {
        name: torch.randn(batch, seq_len, *size, generator=generator).to(dtype).double() for name, size in sizes.items()
    }
    if pieces is not None:
        x["cu_seqlens"] = torch.tensor([0, *pieces]).cumsum(0).int()
    return x


def upstream(x: dict[str, Any], dtype: torch.dtype = torch.float32) -> Tensor:
    """A gradient of o."""
    shape = *x["q"].shape[:3], x["v"].shape[3]
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).double()


def reference(x: dict[str, Any], grad_o: Tensor, window: int | None = None, scale: float = 0.3) -> dict[str, Tensor]:
    """o and the gradients of all leaves."""
    leaves = {name: x[name].clone().requires_grad_() for name in LEAVES}
    o = attention(**leaves, cu_seqlens=x.get("cu_seqlens"), window=window, scale=scale, impl="sdpa")
    return {"o": o.detach(), **dict(zip(LEAVES, torch.autograd.grad(o, list(leaves.values()), grad_o), strict=True))}


def kernels(
    x: dict[str, Any],
    grad_o: Tensor | None,
    window: int | None = None,
    scale: float = 0.3,
    *,
    dtype: torch.dtype = torch.float32,
    view: Callable[[Tensor], Tensor] = lambda y: y,
    view_grad: Callable[[Tensor], Tensor] = lambda y: y,
) -> dict[str, Tensor]:
    """The same from the launchers; without `grad_o` nothing is saved, and there are no gradients."""
    q, k, v = (view(x[name].to(DEVICE, dtype)) for name in LEAVES)
    cu_seqlens = None if x.get("cu_seqlens") is None else x["cu_seqlens"].to(DEVICE)
    o, lse = attention_forward(q, k, v, cu_seqlens, window, scale, save=grad_o is not None)
    found: dict[str, Tensor] = {"o": o}
    if grad_o is not None:
        grad_o = view_grad(grad_o.to(DEVICE, dtype))
        found |= zip(LEAVES, attention_backward(grad_o, q, k, v, cu_seqlens, o, lse, window, scale), strict=True)
    assert {y.dtype for y in found.values()} == {dtype}
    return {name: y.double().cpu() for name, y in found.items()}


def check(
    x: dict[str, Any],
    window: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.3,
    bound: float | None = None,
    **options: Any,
) -> None:
    """o and every gradient."""
    grad_o = upstream(x, dtype)
    actual = kernels(x, grad_o, window, scale, dtype=dtype, **options)
    assert_near_or_zero(actual, reference(x, grad_o, window, scale), bound or BOUNDS[dtype])


Configure = Callable[[Callable[[Configuration], Configuration]], None]


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Changes the configurations that the launchers get."""

    def configure(change: Callable[[Configuration], Configuration]) -> None:
        monkeypatch.setattr("zoo.kernels.attention.launch.configuration", lambda *sizes: change(configuration(*sizes)))

    return configure


@pytest.mark.parametrize("seq_len", [1, 2, *range(W - 1, 2 * W + 2), 63, 64, 65, 130])
@pytest.mark.parametrize("window", [None, 1, W, 70])
def test_lengths(window: int | None, seq_len: int) -> None:
    check(inputs(seq_len, heads=(1, 1)), window)


@pytest.mark.parametrize("dims", [(16, 24), (20, 16)])
@pytest.mark.parametrize("seq_len", [1, 7, 17, 63, 64, 65, 130])
@pytest.mark.parametrize("window", [None, 1, W, 70])
def test_half_precision(window: int | None, seq_len: int, dims: tuple[int, int]) -> None:
    check(inputs(seq_len, heads=(1, 1), dims=dims, dtype=torch.float16), window, dtype=torch.float16)


@pytest.mark.parametrize("window", [None, 100, 300])
def test_several_blocks_in_half_precision(window: int | None) -> None:
    x = inputs(300, heads=(1, 1), dims=(16, 16), dtype=torch.float16)
    check(x, window, dtype=torch.float16)


@pytest.mark.parametrize(("dtype", "index"), [(torch.float32, torch.int64), (torch.float16, torch.int32)])
@pytest.mark.parametrize("window", [None, 5, 100])
def test_packed(window: int | None, dtype: torch.dtype, index: torch.dtype) -> None:
    x = inputs(sum(PIECES), heads=(1, 1), dims=(16, 24), pieces=PIECES, dtype=dtype)
    check(x | {"cu_seqlens": x["cu_seqlens"].to(index)}, window, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 5, 100])
def test_packed_equals_each_alone(window: int | None, dtype: torch.dtype) -> None:
    """Bit for bit, in a packed row of its own."""
    x = inputs(sum(PIECES), heads=(1, 1), dims=(16, 24), pieces=PIECES, dtype=dtype)
    grad_o = upstream(x, dtype)
    whole = kernels(x, grad_o, window, dtype=dtype)
    for start, end in pairwise(x["cu_seqlens"].tolist()):
        if start == end:
            continue
        alone: dict[str, Any] = {name: x[name][:, start:end] for name in LEAVES}
        alone["cu_seqlens"] = torch.tensor([0, end - start])
        expected = kernels(alone, grad_o[:, start:end], window, dtype=dtype)
        assert_equal({name: y[:, start:end] for name, y in whole.items()}, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 5])
def test_a_document_does_not_reach_the_others(window: int | None, dtype: torch.dtype) -> None:
    x = inputs(sum(PIECES), heads=(1, 1), dims=(16, 24), pieces=PIECES, dtype=dtype)
    start, end = x["cu_seqlens"][5:7].tolist()
    other = x | {name: x[name].clone() for name in LEAVES}
    for name in LEAVES:
        other[name][:, start:end] *= 4
    before, after = (kernels(y, upstream(x, dtype), window, dtype=dtype) for y in (x, other))
    for name, y in before.items():
        z = after[name]
        assert torch.equal(y[:, :start], z[:, :start]), name
        assert torch.equal(y[:, end:], z[:, end:]), name
        assert not torch.equal(y[:, start:end], z[:, start:end]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x = inputs(40, batch=2, dims=(16, 24), dtype=dtype)
    grad_o = upstream(x, dtype)
    whole = kernels(x, grad_o, W, dtype=dtype)
    alone = kernels({name: y[1:2] for name, y in x.items()}, grad_o[1:2], W, dtype=dtype)
    assert_equal({name: y[1:2] for name, y in whole.items()}, alone)


@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (4, 1), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grouped_heads(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    check(inputs(20, batch=2, heads=heads, dims=(16, 24), dtype=dtype), W, dtype=dtype)


@pytest.mark.parametrize("dims", [(16, 20), (20, 16), (24, 48), (48, 32), (100, 80), (1, 130), (130, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_dims(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    check(inputs(70, heads=(1, 1), dims=dims, dtype=dtype), 40, dtype=dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_strides(dtype: torch.dtype, batch: int, layout: str) -> None:
    x = inputs(20, batch=batch, heads=(2, 2), dims=(16, 24), dtype=dtype)
    check({name: LAYOUTS[layout](y) for name, y in x.items()}, W, dtype=dtype, view=LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_strides_of_upstream_gradients(layout: str, dtype: torch.dtype) -> None:
    x = inputs(20, batch=2, heads=(2, 2), dims=(16, 24), dtype=dtype)
    grad_o = LAYOUTS[layout](upstream(x, dtype))
    actual = kernels(x, grad_o, W, dtype=dtype, view_grad=LAYOUTS[layout])
    aligned = kernels(x, grad_o, W, dtype=dtype, view_grad=lambda y: y.clone(memory_format=torch.contiguous_format))
    assert_near_or_zero(actual, reference(x, grad_o, W), BOUNDS[dtype])
    assert_equal(actual, aligned)


def test_values_with_other_strides_than_upstream_gradients() -> None:
    """The heads of v are 32 numbers apart, those of the gradient of o 20: on Hopper too few for kernels of its own."""
    x = inputs(20, heads=(2, 2), dims=(16, 20), dtype=torch.float16)
    check(x, dtype=torch.float16, view=lambda y: F.pad(y, (0, 32 - y.shape[-1]))[..., : y.shape[-1]])


def test_upstream_gradient_of_a_sum() -> None:
    """It is one number, for all of o."""
    x = inputs(20, batch=2)
    ones = torch.ones_like(upstream(x))

    def one_number(y: Tensor) -> Tensor:
        return torch.cat([y.flatten()[:1], torch.full_like(y, torch.nan).flatten()])[0].expand_as(y)

    assert_near_or_zero(kernels(x, ones, W, view_grad=one_number), reference(x, ones, W), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_of_a_row_reaches_the_others(dtype: torch.dtype) -> None:
    x = inputs(20, batch=3, dims=(16, 24), dtype=dtype)
    grad_o = upstream(x, dtype)
    expected = {name: y[[0, 2]] for name, y in kernels(x, grad_o, W, dtype=dtype).items()}
    for y in (*(x[name] for name in LEAVES), grad_o):
        y[1] = torch.nan
    actual = {name: y[[0, 2]] for name, y in kernels(x, grad_o, W, dtype=dtype).items()}
    assert_equal(actual, expected)


@pytest.mark.parametrize("window", [None, 5, 40, 70])
@pytest.mark.parametrize("tile", [16, 32, 64])
def test_other_tiles(tile: int, window: int | None, configure: Configure) -> None:
    configure(lambda old: old._replace(tile=tile))
    check(inputs(83, heads=(1, 1), pieces=(3, 80)), window)


@pytest.mark.parametrize("window", [41, 1 << 20, 2**31 - 1, 2**63 - 1])
def test_windows_beyond_the_sequence(window: int) -> None:
    x = inputs(40, heads=(1, 1))
    grad_o = upstream(x)
    assert_near_or_zero(kernels(x, grad_o, window), kernels(x, grad_o), 1e-6)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 4.0])
@pytest.mark.parametrize("window", [None, W])
def test_scale(window: int | None, scale: float) -> None:
    check(inputs(40, heads=(1, 1)), window, scale=scale)


@pytest.mark.parametrize("window", [None, W])
def test_logits_that_leave_one_key(window: int | None) -> None:
    """Their exponentials overflow unless the largest is subtracted, and most weights are 0."""
    check(inputs(130, heads=(1, 1)), window, scale=30.0, bound=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tokens_that_see_themselves_alone(dtype: torch.dtype) -> None:
    """o is v, whose gradient is that of o; q and k have none, up to rounding."""
    x = inputs(70, heads=(1, 1), dims=(16, 24), dtype=dtype)
    grad_o = upstream(x, dtype)
    found = kernels(x, grad_o, 1, dtype=dtype)
    size = float(grad_o.norm())
    assert float((found["o"] - x["v"]).norm()) <= 1e-6 * size
    assert float((found["v"] - grad_o).norm()) <= BOUNDS[dtype] * size
    assert max(float(found[name].norm()) for name in "qk") <= 1e-5 * size


@pytest.mark.parametrize("pieces", [None, (3, 67)], ids=["dense", "packed"])
@pytest.mark.parametrize("window", [None, W])
def test_saving_changes_no_number(window: int | None, pieces: tuple[int, ...] | None) -> None:
    x = inputs(70, heads=(1, 1), pieces=pieces)
    assert torch.equal(kernels(x, None, window)["o"], kernels(x, upstream(x), window)["o"])


@pytest.mark.parametrize(("save", "size"), [(False, 0), (True, 2 * 2 * 96)])  # 70 rows are three blocks of 32
def test_what_is_not_saved_takes_no_memory(save: bool, size: int) -> None:
    q, k, v = (y.to(DEVICE, torch.float32) for y in inputs(70, batch=2).values())
    o, lse = attention_forward(q, k, v, None, None, 0.3, save=save)
    assert o.shape == (2, 70, 2, 20)
    assert (lse.numel(), lse.dtype) == (size, torch.float32)


def log_sum_exp(q: Tensor, k: Tensor, window: int) -> Tensor:
    """[B, H, T], to the base 2, of as many key heads as query heads."""
    order = torch.arange(q.shape[1], device=q.device)
    lag = order[:, None] - order
    logits = 0.3 * torch.einsum("bthd,bshd->bhts", q.double(), k.double())
    return logits.masked_fill((lag < 0) | (lag >= window), float("-inf")).logsumexp(-1) / math.log(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_log_sum_exp(dtype: torch.dtype) -> None:
    """Infinite in places of rows that do not exist, in tiles where some do."""
    x = inputs(40, batch=2, heads=(2, 2), dims=(16, 24), dtype=dtype)
    q, k, v = (y.to(DEVICE, dtype) for y in x.values())
    _, lse = attention_forward(q, k, v, None, W, 0.3, save=True)
    assert lse.shape == (2, 2, num_places(q, v, None))
    tile = configuration(16, 24, dtype).tile
    expected = lse.new_full((2, 2, -(-40 // tile) * tile), torch.inf, dtype=torch.float64)
    expected[..., :40] = log_sum_exp(q, k, W)
    torch.testing.assert_close(lse[..., : expected.shape[2]].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_log_sum_exp_of_a_packed_row(dtype: torch.dtype) -> None:
    """Each document's rows begin at a block of tiles; in tiles that no document has there are zeros."""
    x = inputs(sum(PIECES), heads=(2, 2), dims=(16, 24), pieces=PIECES, dtype=dtype)
    q, k, v = (x[name].to(DEVICE, dtype) for name in LEAVES)
    cu_seqlens = x["cu_seqlens"].to(DEVICE)
    _, lse = attention_forward(q, k, v, cu_seqlens, W, 0.3, save=True)
    sizes, place = configuration(16, 24, dtype), 0
    expected = lse.new_zeros(1, 2, num_places(q, v, cu_seqlens), dtype=torch.float64)
    for start, end in pairwise(x["cu_seqlens"].tolist()):
        tiles = -(-(end - start) // sizes.tile)
        expected[..., place : place + tiles * sizes.tile] = torch.inf
        expected[..., place : place + end - start] = log_sum_exp(q[:, start:end], k[:, start:end], W)
        place += -(-tiles // sizes.parts) * sizes.parts * sizes.tile
    assert place < expected.shape[2]
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("batch", "seq_len"), [(1, 0), (0, 5)])
def test_no_tokens(batch: int, seq_len: int, dtype: torch.dtype) -> None:
    x = inputs(seq_len, batch=batch, dims=(16, 24))
    assert all(not y.numel() for y in kernels(x, upstream(x), dtype=dtype).values())


@pytest.mark.parametrize(
    "pieces",
    [None, PIECES, (150, -20, 1 << 20), (150, 1 << 20, -20)],
    ids=["dense", "packed", "falling and too far", "too far and falling"],
)
@pytest.mark.parametrize("save", [True, False])
def test_stays_inside_its_memory(save: bool, pieces: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written beside the tensors that the launchers allocate, nor read from where nothing was written.

    Where ends are wrong, which nobody checks on a device, what is written where is not said, but no less inside.
    """
    x = inputs(sum(PIECES), heads=(1, 1), pieces=pieces)
    allocated = []

    def guarded(shape: Any, dtype: torch.dtype) -> Tensor:
        shape = torch.Size(shape)
        nothing = torch.nan if dtype.is_floating_point else FAR_AWAY
        memory = torch.full((shape.numel() + 2 * GUARD,), nothing, dtype=dtype, device=DEVICE)
        allocated.append((memory, shape.numel()))
        return memory[GUARD : GUARD + shape.numel()].view(shape)

    def new_empty(like: Tensor, *shape: Any, dtype: torch.dtype | None = None, **others: Any) -> Tensor:
        if others:  # not the launchers' but the interpreter's own
            return torch.zeros(shape, dtype=dtype or like.dtype, **others)
        return guarded(shape[0] if isinstance(shape[0], tuple | list) else shape, dtype or like.dtype)

    def new_zeros(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return guarded(shape, dtype).zero_()

    grad_o = upstream(x)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", new_empty)
        patch.setattr(torch.Tensor, "new_zeros", new_zeros)
        patch.setattr(torch, "empty_like", lambda like: guarded(like.shape, like.dtype))
        actual = kernels(x, grad_o if save else None, 40)
    for memory, size in allocated:
        around = torch.cat([memory[:GUARD], memory[GUARD + size :]])
        assert (around.isnan() | (around == FAR_AWAY)).all()
    tables = 0 if pieces is None else 1 + save  # of blocks, one for the forward and one for the backward
    assert len(allocated) == (6 if save else 2) + tables
    if pieces in (None, PIECES):
        expected = reference(x, grad_o, 40)
        assert_near_or_zero(actual, expected if save else {"o": expected["o"]}, 1e-5)


@pytest.mark.parametrize(
    ("ends", "found"),
    [
        ((0, 70, 70, 150), 10),
        ((0, 16, 32, 150), 10),
        ((0, 500), 10),
        ((0, 0), 0),
        ((0, 150, 60, 150), 12),
        ((-9, 1 << 20, 0, 1 << 20), 12),
    ],
    ids=str,
)
def test_a_table_of_blocks_ends_in_their_number(
    ends: tuple[int, ...], found: int, request: pytest.FixtureRequest
) -> None:
    """And in a 0, where a kernel counts; also of ends that nobody has checked."""
    request.addfinalizer(partial(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()))
    torch.use_deterministic_algorithms(True)  # which fills what is not initialised
    blocks, count = cut(150, torch.tensor(ends, dtype=torch.int32, device=DEVICE), 16)
    assert blocks is not None
    assert blocks.shape == (count + 1, 3)
    assert blocks[-1].tolist() == [0, found, 0]
    assert (blocks[:found, 2] > blocks[:found, 0]).all()
    assert not blocks[found:-1].any()


@triton.jit
def blocks_of_keys_kernel(found, row, window, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr):
    first, whole, whole_end, end = blocks_of_keys(row, window, ROWS, KEYS, WINDOWED)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(found, first)
    tl.store(found + 1, whole)
    tl.store(found + 2, whole_end)
    tl.store(found + 3, end)


@pytest.mark.parametrize("window", [None, 1, 2, 15, 16, 17, 31, 33, 48, 100])
@pytest.mark.parametrize(("rows", "keys"), [(16, 16), (16, 32), (32, 32)])
def test_blocks_of_keys_that_rows_see(rows: int, keys: int, window: int | None) -> None:
    """None is left out, and only of those between the bounds does every row see all."""
    kernel: Any = blocks_of_keys_kernel
    found = torch.empty(4, dtype=torch.int32, device=DEVICE)
    for row in range(0, 8 * rows, rows):
        kernel[1,](found, row, window or FAR_AWAY, rows, keys, window is not None)
        first, whole, whole_end, end = found.tolist()
        assert end == -(-(row + rows) // keys)
        for block in range(end):
            lag = torch.arange(row, row + rows)[:, None] - torch.arange(block * keys, (block + 1) * keys)
            seen = (lag >= 0) & (lag < (window or FAR_AWAY))
            assert block >= first or not seen.any(), (row, block)
            assert not whole <= block < whole_end or seen.all(), (row, block)
