"""Inputs of a matrix times one row, by what stands around the product, and the result in float64.

Shapes: K numbers of the row, d the size of what is normalised, N rows of the matrix.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["CASES", "Case", "exact", "inputs"]


class Case(NamedTuple):
    """One call.

    Attributes:
        shape: of x.
        num_rows: N.
        norm: whether x is normalised.
        gate: whether it is gated.
        residual: whether something is added.
    """

    shape: tuple[int, ...]
    num_rows: int
    norm: bool = False
    gate: bool = False
    residual: bool = False


CASES = {
    "plain": Case((1, 1, 128), 64),
    "odd": Case((100,), 37),
    "one": Case((1,), 1, norm=True),
    "norm": Case((1, 1, 96), 33, norm=True),
    "heads": Case((1, 1, 3, 32), 10, norm=True),
    "gated heads": Case((1, 3, 64), 7, norm=True, gate=True, residual=True),
    "mlp": Case((1, 1, 352), 41, gate=True, residual=True),
    "residual": Case((256,), 5, residual=True),
    "long": Case((5000,), 3, norm=True, gate=True),
}


def inputs(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments of `row_linear`; a gate is half of something, as an MLP has it."""
    count = torch.Size(case.shape).numel()
    found: dict[str, Any] = {
        "x": torch.randn(case.shape, dtype=dtype),
        "weight": (torch.randn(case.num_rows, count) * count**-0.5).to(dtype),
        "norm_weight": 1 + 0.1 * torch.randn(case.shape[-1]) if case.norm else None,
        "gate": torch.randn(1, 2 * count)[:, count:] if case.gate else None,
        "residual": torch.randn(1, 1, case.num_rows) if case.residual else None,
    }
    return {name: None if x is None else x.to(dtype) for name, x in found.items()} | {"eps": 1e-5}


def exact(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None,
    eps: float,
) -> Tensor:
    """y in float64."""
    vector = x.double().cpu()
    if norm_weight is not None:
        vector = vector / (vector.square().mean(-1, keepdim=True) + eps).sqrt() * norm_weight.double().cpu()
    vector = vector.flatten()
    if gate is not None:
        vector = vector * F.silu(gate.double().cpu().flatten())
    y = weight.double().cpu() @ vector
    return y if residual is None else y + residual.double().cpu().flatten()
