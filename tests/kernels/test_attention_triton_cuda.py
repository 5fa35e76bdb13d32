"""The results of attention's Triton kernels on a CUDA device: equal to float64."""

from typing import Any

import pytest
import torch
from attention_cases import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    LEAVES,
    PIECES,
    changed,
    check,
    check_hard,
    inputs,
    with_gradients,
)
from comparing import LAYOUTS, assert_equal
from configurations import distinct

from zoo.kernels.attention import attention
from zoo.kernels.attention.schedule import configuration

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

W = 64


@pytest.fixture
def on_any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go to the kernels that know nothing of a GPU's own instructions."""
    monkeypatch.setattr("zoo.kernels.attention.launch._on_hopper", lambda _: False)


@pytest.mark.parametrize("seq_len", [1, 2, 63, 64, 65, 127, 513, 1000, 1537])
@pytest.mark.parametrize("window", [None, 1, W, 100, 1024])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_lengths(dtype: torch.dtype, window: int | None, seq_len: int) -> None:
    test = check if seq_len > 2 else check_hard  # where two tokens cancel each other, o's rounding counts
    test(inputs(seq_len, batch=max(2, 64 // seq_len), dtype=dtype), window=window)


@pytest.mark.parametrize("seq_len", range(W - 1, 2 * W + 2))
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_lengths_around_a_window(dtype: torch.dtype, seq_len: int) -> None:
    check(inputs(seq_len, dtype=dtype), window=W)


@pytest.mark.parametrize("window", [None, 1, W, 100, 1024])
@pytest.mark.parametrize("heads", [(8, 1), (8, 2), (8, 8)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_grouped_heads(dtype: torch.dtype, heads: tuple[int, int], window: int | None) -> None:
    check(inputs(300, heads=heads, dtype=dtype), window=window)


@pytest.mark.parametrize("dims", [*((dim, dim) for dim in (64, 80, 96, 128, 256)), (100, 48), (48, 128)])
@pytest.mark.parametrize("window", [None, 1, W, 100, 1024])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_head_dims(dtype: torch.dtype, window: int | None, dims: tuple[int, int]) -> None:
    check(inputs(700, heads=(4, 2), dims=dims, dtype=dtype), window=window)


@pytest.mark.parametrize("batch_and_heads", [(1, 1), (1, 17), (3, 5), (64, 16)])
@pytest.mark.parametrize("seq_len", [65, 700])
def test_batches_and_heads(seq_len: int, batch_and_heads: tuple[int, int]) -> None:
    batch, heads = batch_and_heads
    check(inputs(seq_len, batch=batch, heads=(heads, heads)), window=100)


@pytest.mark.parametrize("pieces", [PIECES, (0, 1500, 1)], ids=["several", "one"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (100, 256)])
@pytest.mark.parametrize("window", [None, W, 2000])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_packed(dtype: torch.dtype, window: int | None, dims: tuple[int, int], pieces: tuple[int, ...]) -> None:
    check(inputs(sum(pieces), batch=1, heads=(4, 2), dims=dims, pieces=pieces, dtype=dtype), window=window)


@pytest.mark.parametrize("window", [None, 100])
def test_a_document_does_not_reach_the_others(window: int | None) -> None:
    x = inputs(sum(PIECES), batch=1, pieces=PIECES)
    start, end = x["cu_seqlens"][2:4].tolist()
    other = changed(x, torch.clone)
    with torch.no_grad():
        for name in LEAVES:
            other[name][:, start:end] *= 4
    before, after = (with_gradients(y, window=window) for y in (x, other))
    for name, y in before.items():
        z = after[name]
        assert torch.equal(y[:, :start], z[:, :start]), name
        assert torch.equal(y[:, end:], z[:, end:]), name
        assert not torch.equal(y[:, start:end], z[:, start:end]), name


@pytest.mark.parametrize("seq_len", [300, 1000])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_large_logits(dtype: torch.dtype, window: int | None, seq_len: int) -> None:
    """One key has most of a row's weight; what gradients are left where rows cancel, o's rounding decides."""
    check_hard(inputs(seq_len, dims=(128, 128), dtype=dtype, size=8.0), window=window)


@pytest.mark.parametrize("scale", [1e-3, 0.5, 3.0])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_scale(dtype: torch.dtype, scale: float) -> None:
    check_hard(inputs(300, dtype=dtype), scale=scale)


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize(("dtype", "dims"), distinct(configuration), ids=str)
@pytest.mark.usefixtures("on_any_gpu")
def test_every_configuration(
    dtype: torch.dtype, dims: tuple[int, int], warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def configure(*sizes: Any) -> Any:
        return configuration(*sizes)._replace(warps=warps)

    monkeypatch.setattr("zoo.kernels.attention.launch.configuration", configure)
    for seq_len in (61, 700):
        check(inputs(seq_len, dims=dims, dtype=dtype), window=100)


@pytest.mark.parametrize(("dtype", "dims"), distinct(configuration), ids=str)
def test_every_configuration_without_a_window(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """Packed, and with grouped heads."""
    check(inputs(381, batch=1, heads=(4, 2), dims=dims, dtype=dtype, pieces=(1, 0, 320, 60)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("batch", "pieces"), [(1, None), (2, None), (1, (3, 147))], ids=["one", "two", "packed"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_any_strides(dtype: torch.dtype, batch: int, pieces: tuple[int, ...] | None, layout: str) -> None:
    views = changed(inputs(150, batch=batch, heads=(4, 2), pieces=pieces, dtype=dtype), LAYOUTS[layout])
    assert layout == "misaligned" or not views["k"].is_contiguous()
    check(views, window=100)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_of_upstream_gradients(layout: str) -> None:
    x = inputs(150, heads=(4, 2))
    view = LAYOUTS[layout](torch.randn(2, 150, 4, 64, device=DEVICE).to(BF16))
    contiguous = view.clone(memory_format=torch.contiguous_format)
    assert_equal(with_gradients(x, view, window=100), with_gradients(x, contiguous, window=100))


def test_upstream_gradient_of_a_sum() -> None:
    x = inputs(150, heads=(4, 2))
    grads = torch.autograd.grad(attention(**x, impl="triton").sum(), [x[name] for name in LEAVES])
    expected = with_gradients(x, torch.ones(2, 150, 4, 64, dtype=BF16, device=DEVICE))
    expected.pop("o")
    assert_equal(dict(zip(LEAVES, grads, strict=True)), expected)


@pytest.mark.usefixtures("on_any_gpu")
@pytest.mark.parametrize("pieces", [None, PIECES], ids=["dense", "packed"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 48)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_kernels_for_any_gpu(
    dtype: torch.dtype, dims: tuple[int, int], window: int | None, pieces: tuple[int, ...] | None
) -> None:
    batch = 2 if pieces is None else 1
    check(inputs(sum(PIECES), batch=batch, heads=(4, 2), dims=dims, dtype=dtype, pieces=pieces), window=window)


def test_mixed_dtypes() -> None:
    x = inputs(150)
    mixed = changed(x, torch.Tensor.float, ("q", "k"))
    actual = with_gradients(mixed, window=100)
    assert [actual[name].dtype for name in ("o", *LEAVES)] == [BF16, FP32, FP32, BF16]
    assert_equal({name: y.to(BF16) for name, y in actual.items()}, with_gradients(x, window=100))


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({"dims": (260, 64)}, "D and D_v of at most 256, got 260 and 64"),
        ({"dims": (64, 260)}, "D and D_v of at most 256, got 64 and 260"),
        ({"dtype": torch.float64}, "v in bfloat16, float16 or float32, got torch.float64"),
    ],
)
def test_inputs_that_the_kernels_do_not_take(changes: dict[str, Any], needs: str) -> None:
    with pytest.raises(ValueError, match=f"^impl: 'triton' needs {needs}$"):
        attention(**inputs(70, **changes), impl="triton")
