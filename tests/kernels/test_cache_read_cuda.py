"""Reading from caches on a CUDA device, by Triton, against the reference in float64.

Shapes: B rows, S slots of a cache, H query heads, G key heads, G_v value heads, D and D_v their sizes.
"""

from typing import Any

import pytest
import torch
from cache_read_cases import HEADS, KAPPAS, exact, inputs, spoil
from comparing import assert_near

from zoo.kernels.cache_read import read_cache

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {BF16: 5e-3, FP16: 1e-3, FP32: 1e-5}  # weights are rounded to the dtype


def on_device(x: dict[str, Any], dtype: torch.dtype = BF16) -> dict[str, Any]:
    return {name: y.to(DEVICE, dtype) if y.is_floating_point() else y.to(DEVICE) for name, y in x.items()}


def check(x: dict[str, Any], dtype: torch.dtype, **options: Any) -> None:
    """Against the reference, with NaN in the slots that are not there; log_sum as well."""
    o, log_sum = read_cache(**on_device(spoil(x), dtype), impl="triton", **options)
    expected_o, expected_log_sum = exact(x, **options)
    assert o.dtype == FP32
    assert_near({"o": o.cpu()}, {"o": expected_o}, BOUNDS[dtype])
    if log_sum is not None:
        torch.testing.assert_close(log_sum.double().cpu(), expected_log_sum, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("kappa", KAPPAS, ids=str)
def test_equals_the_reference(kappa: dict[str, Any], dtype: torch.dtype) -> None:
    check(inputs(3000, counts=(3000, 0, 1, 2999, 700)), dtype, **kappa)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("value_dim", [16, 40, 64, 128, 256])
@pytest.mark.parametrize("key_dim", [16, 40, 64, 128, 256])
def test_sizes(key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    check(inputs(700, dims=(key_dim, value_dim), heads=(4, 2, 2)), dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("heads", [*HEADS, (16, 1, 1), (32, 1, 1), (70, 1, 2)])
def test_heads(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(inputs(700, heads=heads, dims=(64, 64)), dtype)


@pytest.mark.parametrize("batch", [1, 32, 300])
def test_many_slots(batch: int) -> None:
    """As many splits as there are, or one."""
    x = inputs(6000, counts=(6000,), heads=(4, 2, 2), dims=(64, 64))
    o, _ = read_cache(**{name: y.expand(batch, *y.shape[1:]) for name, y in on_device(x).items()}, impl="triton")
    assert_near({"o": o.cpu()}, {"o": exact(x)[0].expand_as(o)}, BOUNDS[BF16])


def test_auto_is_triton_and_runs_are_bit_identical() -> None:
    x = on_device(inputs(3000))
    first, second, auto = (read_cache(**x, impl=impl) for impl in ("triton", "triton", "auto"))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, auto, rtol=0, atol=0)


@pytest.mark.parametrize("kappa", ["softmax", "exp", "linear"])
def test_a_graph_reads_counts_anew(kappa: str) -> None:
    """A captured graph is replayed after counts and the caches have changed in place."""
    x = on_device(inputs(3000, counts=(5, 9)))
    options: dict[str, Any] = {"kappa": kappa, "scale": 0.1, "impl": "triton"}
    read_cache(**x, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = read_cache(**x, **options)
    for counts in ((5, 9), (3000, 0), (1, 1777)):
        x["counts"].copy_(torch.tensor(counts))
        x["v"].mul_(-1)
        graph.replay()
        assert torch.equal(o, read_cache(**x, **options)[0])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_one_graph_over_counts(mode: str | None) -> None:
    compiled = torch.compile(read_cache, fullgraph=True, mode=mode)
    x = on_device(inputs(3000))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for counts in ((0, 1, 30), (3000, 5, 1), (7, 7, 7), (1, 0, 2000)):
            x["counts"].copy_(torch.tensor(counts))
            torch.testing.assert_close(compiled(**x), read_cache(**x), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("give_memory_back")
@pytest.mark.parametrize("shape", [(1, 2**20 + 500), (2**14 + 3, 64)], ids=["slots", "rows"])
def test_offsets_beyond_32_bits(shape: tuple[int, int]) -> None:
    """The last slots of a row, and the last rows, of caches of more than 2^31 elements."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free device memory")
    (batch, num_slots), tail = shape, 40
    k, v = (torch.zeros(batch, num_slots, 8, 256, device=DEVICE, dtype=BF16) for _ in range(2))
    assert k.numel() > 2**31
    for x in (k, v):
        x[-1, -tail:].normal_()
    q = torch.randn(batch, 8, 256, device=DEVICE, dtype=BF16)
    counts = torch.full((batch,), num_slots, device=DEVICE)
    o, _ = read_cache(q, k, v, counts, kappa="linear", impl="triton")
    last = {"q": q[-1:], "k": k[-1:, -tail:], "v": v[-1:, -tail:], "counts": torch.tensor([tail])}
    expected, _ = exact(last, kappa="linear")
    assert_near({"o": o[-1:].cpu()}, {"o": expected}, BOUNDS[BF16])
