"""What all tests share: a fixed seed, one thread for each parallel worker, and a compiler without memories."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # for the commands that tests run


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No graphs of earlier tests, so that counts of graphs and recompilations are this test's own."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def give_memory_back() -> Iterator[None]:
    """On a CUDA device, to the processes beside this one."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
