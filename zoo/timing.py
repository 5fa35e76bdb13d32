"""How long a call takes, as quantiles over its repetitions, and the most that a device can do."""

import math
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

__all__ = ["QUANTILES", "call_ms", "copy_bandwidth", "graph_ms", "matmul_rate", "milliseconds", "rounded", "spread"]

QUANTILES = (0.5, 0.2, 0.8)
_FEWEST = 3  # repetitions on a CPU
_SECONDS = 0.2  # of them all
_COPIED = {"cpu": 2**26, "cuda": 2**31}  # bytes of a copy: no cache holds them
_MULTIPLIED = {"cpu": 512, "cuda": 8192}  # rows and columns of a product


def milliseconds(call: Callable[[], Any], device: torch.device) -> dict[str, float | None]:
    """The median, p20 and p80 of a call: on CUDA of its replays as a graph, without the host's work.

    Args:
        call: what is measured. It must leave nothing of its autograd graph behind: a leaf's node that outlives a
            capture waits for the stream that it was made on.
        device: where its work runs.

    Raises:
        RuntimeError: on CUDA, it cannot be captured.
    """
    return spread(_graph_ms(call, rep=20) if device.type == "cuda" else _cpu_ms(call))


def _cpu_ms(call: Callable[[], Any]) -> list[float]:
    call()
    times: list[float] = []
    begin = perf_counter()
    while len(times) < _FEWEST or perf_counter() - begin < _SECONDS:
        start = perf_counter()
        call()
        times.append((perf_counter() - start) * 1e3)
    return torch.tensor(times, dtype=torch.float64).quantile(torch.tensor(QUANTILES, dtype=torch.float64)).tolist()


def call_ms(call: Callable[[], Any], rep: int = 60) -> list[float]:
    """Milliseconds of a call with what the host takes, after a flush of the L2 cache: the `QUANTILES`.

    Args:
        call: what is measured.
        rep: about as many milliseconds of it.
    """
    from triton.testing import do_bench

    marks: Any = do_bench(call, warmup=15, rep=rep, quantiles=QUANTILES)
    return marks


def graph_ms(call: Callable[[], Any], rep: int = 50) -> list[float] | None:
    """Milliseconds of a call replayed as a CUDA graph: the `QUANTILES`, or None where it cannot be captured.

    Args:
        call: what is measured.
        rep: milliseconds of it in the graph, about, which is replayed ten times.
    """
    try:
        return _graph_ms(call, rep)
    except RuntimeError as error:
        print(f"no CUDA graph: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        torch.cuda.synchronize()
        return None


def _graph_ms(call: Callable[[], Any], rep: int) -> list[float]:
    """Ten times as many milliseconds of replays."""
    from triton.testing import do_bench_cudagraph

    marks: Any = do_bench_cudagraph(call, rep=rep, quantiles=QUANTILES)
    return marks


def spread(marks: list[float]) -> dict[str, float | None]:
    """The quantiles by name."""
    return {name: rounded(mark) for name, mark in zip(("median", "p20", "p80"), marks, strict=True)}


def rounded(value: float) -> float | None:
    """To four digits; None for what JSON does not know."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written together, of a large copy, measured: what memory gives at most.

    Args:
        device: the CPU, or the current CUDA device.
    """
    source = torch.empty(_COPIED[device.type], dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    if device.type == "cuda":  # a copy that a graph replays is slower
        return 2 * source.nbytes / call_ms(lambda: target.copy_(source))[0] * 1e3
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product of random numbers, measured.

    That of float32 on CUDA depends on `torch.get_float32_matmul_precision`.

    Args:
        device: the CPU, or the current CUDA device.
        dtype: of the operands.
    """
    size = _MULTIPLIED[device.type]
    x, y = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: torch.mm(x, y), device)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    median = milliseconds(call, device)["median"]
    assert median, "a call takes time"
    return median / 1e3
