"""A matrix times one row on a CUDA device: launched while what wrote its inputs ends, it reads what that wrote."""

import pytest
import torch
from torch import Tensor

from zoo.kernels.row_linear import row_linear
from zoo.row_fusion import compile_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("size", [64, 1024, 8192])
@pytest.mark.parametrize("captured", [False, True])
def test_reads_what_was_written_right_before(size: int, captured: bool) -> None:
    """The matrix by torch's kernel, the row by this one."""
    weight, x = torch.zeros(size, size, device="cuda"), torch.full((size,), 1 / size, device="cuda")

    def chain() -> list[Tensor]:
        results = []
        for _ in range(20):
            weight.add_(1)
            y = row_linear(x, weight)
            results.append(row_linear(y, weight))
        return results

    if captured:
        chain()
        weight.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = chain()
        graph.replay()
    else:
        results = chain()
    for index, y in enumerate(results):
        torch.testing.assert_close(y, torch.full_like(y, float((index + 1) ** 2 * size)))


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
def test_a_matrix_that_the_graph_itself_writes() -> None:
    def write_and_read(x: Tensor, fast: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, fast)
        fast.add_(0.01 * torch.outer(y[0], x[0]))
        return torch.nn.functional.linear(y.sigmoid(), fast)

    compiled = torch.compile(write_and_read, backend=compile_rows, fullgraph=True)
    own, other = (torch.eye(2048, device="cuda") for _ in range(2))
    for _ in range(30):
        x = torch.randn(1, 2048, device="cuda") / 2048**0.5
        torch.testing.assert_close(compiled(x, own), write_and_read(x, other), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
