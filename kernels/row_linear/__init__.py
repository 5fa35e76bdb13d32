"""A matrix times one row, with what commonly stands around such a product: validation, then dispatch.

Shapes: K numbers of the row, d the size of what is normalised, N rows of the matrix.
"""

import torch
from torch import Tensor

from zoo.kernels.checks import check_shape, check_tensors
from zoo.kernels.row_linear import triton_ops
from zoo.kernels.row_linear.reference import row_linear_reference
from zoo.kernels.triton_support import missing_for_triton

__all__ = ["missing_for_row_linear", "row_linear"]

_IMPLS = ("auto", "torch", "triton")
_MOST_NUMBERS = 16384  # of the row, which every program holds whole


@torch.no_grad()
def row_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    constant: bool = False,
    impl: str = "auto",
) -> Tensor:
    """y = W (norm(x) * SiLU(gate)) + residual, for the one row of a decoding step, which reading W takes all time of.

    norm is x / sqrt(mean(x^2) + eps) * norm_weight over the last dimension of x (RMSNorm, arXiv 1910.07467). The
    product is of the numbers of x in order, whatever its shape. Triton computes in float32 and rounds once; PyTorch
    rounds as the separate operations do. For inference: no gradients.

    Args:
        x: [..., d], K numbers in all, floating point, any strides, like all the tensors here.
        weight: [N, K], in the dtype of x, like all that follow.
        norm_weight: [d]; without it, no norm.
        eps: of the norm.
        gate: K numbers; without it, no gate.
        residual: N numbers; without it, none is added.
        constant: promises that nothing that may still run on the device writes to ``weight``: Triton then reads it
            while the launch before this one ends (programmatic dependent launch, on Hopper and later).
        impl: "triton" (CUDA; bf16, fp16 or fp32; K up to 16384; with a norm over less than K, a power of two d),
            "torch" (plain PyTorch on any device), or "auto": Triton where it can. An explicit choice never falls back.

    Returns:
        y [N] in the dtype of x.

    Raises:
        ValueError: an argument is not as above; the message names it, what was expected and what came.
    """
    if impl not in _IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(map(repr, _IMPLS))}, got {impl!r}")
    _check(x, weight, norm_weight, gate, residual)
    missing = missing_for_row_linear(x, norm_weight)
    if impl == "triton" and missing is not None:
        raise ValueError(f"impl: 'triton' needs {missing}")
    if impl == "torch" or missing is not None:
        return row_linear_reference(x, weight, norm_weight, eps, gate, residual)
    return triton_ops.row_linear(x, weight, norm_weight, eps, gate, residual, constant)


def missing_for_row_linear(x: Tensor, norm_weight: Tensor | None) -> str | None:
    """What a call lacks for Triton, or None."""
    missing = missing_for_triton("x", x.device, x.dtype)
    if missing is not None:
        return missing
    if x.numel() > _MOST_NUMBERS:
        return f"K of at most {_MOST_NUMBERS}, got {x.numel()}"
    size = x.shape[-1]
    if norm_weight is not None and size != x.numel() and size & (size - 1):
        return f"a norm over all K = {x.numel()} numbers, or over a power of two, got d = {size}"
    return None


def _check(x: Tensor, weight: Tensor, norm_weight: Tensor | None, gate: Tensor | None, residual: Tensor | None) -> None:
    if x.ndim < 1 or not x.numel():
        raise ValueError(f"x: expected [..., d], no size 0, got {list(x.shape)}")
    if weight.ndim != 2 or not weight.shape[0]:
        raise ValueError(f"weight: expected [N, K], no size 0, got {list(weight.shape)}")
    check_shape("weight", "[N, K]", weight, (weight.shape[0], x.numel()))
    if norm_weight is not None:
        check_shape("norm_weight", "[d]", norm_weight, (x.shape[-1],))
    for name, given, count in (("gate", gate, x.numel()), ("residual", residual, weight.shape[0])):
        if given is not None and given.numel() != count:
            raise ValueError(f"{name}: expected {count} numbers, got {list(given.shape)}")
    tensors = {"x": x, "weight": weight, "norm_weight": norm_weight, "gate": gate, "residual": residual}
    check_tensors(tensors, {})
    for name, given in tensors.items():
        if given is not None and given.dtype != x.dtype:
            raise ValueError(f"{name}: expected the dtype of x, {x.dtype}, got {given.dtype}")
