"""What GPUs can do at most, and that no measurement is said to be faster."""

import dataclasses
from typing import Any

import pytest
import torch

from zoo.compare.measure import _utilisation as utilisation
from zoo.compare.plan import Cell, Plan, make_plan
from zoo.hardware import peak_flops
from zoo.timing import matmul_rate

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
GPU = torch.device("cuda", 0)


def called(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)


@pytest.fixture
def precision() -> Any:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def plan_of(mode: str = "train", dtype: str = "bfloat16") -> tuple[Plan, Cell]:
    """On a GPU that need not be there."""
    plan = make_plan(["transformer-tiny"], modes=(mode,), dtypes=(dtype,), device="cpu", lengths=(64,))  # pyright: ignore[reportArgumentType]
    plan = dataclasses.replace(plan, device=GPU)
    return plan, plan.cells()[0]


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32", "tf32"),
    [
        ("NVIDIA H200", 989.4, 66.9, 494.7),
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9, 494.7),
        ("NVIDIA H100 PCIe", 756.5, 51.2, 378.0),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5, 156),
        ("NVIDIA L4", 121, 30.3, 60),
    ],
)
def test_peaks_by_name(
    monkeypatch: pytest.MonkeyPatch, precision: None, name: str, bfloat16: float, float32: float, tf32: float
) -> None:
    called(monkeypatch, name)
    torch.set_float32_matmul_precision("highest")
    assert peak_flops(GPU, torch.bfloat16) == peak_flops(GPU, torch.float16) == pytest.approx(bfloat16 * 1e12)
    assert peak_flops(GPU, torch.float32) == pytest.approx(float32 * 1e12)
    for name in ("high", "medium"):
        torch.set_float32_matmul_precision(name)
        assert peak_flops(GPU, torch.float32) == pytest.approx(tf32 * 1e12)
    assert peak_flops(GPU, torch.float64) is None


@pytest.mark.parametrize("name", ["NVIDIA H900", "NVIDIA H200 NVL", "AMD Instinct MI300X", ""])
def test_no_guess_of_another_gpu_or_of_a_cpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    called(monkeypatch, name)
    assert peak_flops(GPU, torch.bfloat16) is None
    assert peak_flops(torch.device("cpu"), torch.float32) is None
    plan, cell = plan_of()
    assert utilisation(plan, cell, 1e18)["mfu"] is None


def test_the_share_of_the_peak_is_that_of_the_model_s_own_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    called(monkeypatch, "NVIDIA H200")
    for mode, factor in (("train", 3), ("forward", 1)):
        plan, cell = plan_of(mode)
        flops = factor * plan.config(cell).flops_per_token(64)
        assert utilisation(plan, cell, 1e6) == {"flops_per_token": flops, "mfu": pytest.approx(flops * 1e6 / 989.4e12)}
    plan, cell = plan_of("decode")
    assert utilisation(plan, cell, 1e18) == {"flops_per_token": None, "mfu": None}


def test_more_than_the_peak_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    called(monkeypatch, "NVIDIA H200")
    plan, cell = plan_of()
    most = 989.4e12 / utilisation(plan, cell, 1.0)["flops_per_token"]
    assert utilisation(plan, cell, most * 0.999)["mfu"] == pytest.approx(0.999)
    with pytest.raises(RuntimeError, match=r"FLOPs a token would be 20\d% of the peak of this GPU: one of them is"):
        utilisation(plan, cell, most * 2.01)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_product_reaches_much_of_the_peak_and_no_more(dtype: torch.dtype) -> None:
    peak = peak_flops(GPU, dtype)
    if peak is None:
        pytest.skip(f"no peak is known of {torch.cuda.get_device_name()}")
    assert 0.4 < matmul_rate(GPU, dtype) / peak < 1.0
