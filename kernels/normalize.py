"""Norms that a mixer applies in front of its kernel, or the kernel itself."""

from torch import Tensor

from zoo.kernels.precision import precise

__all__ = ["EPS", "l2_normalize"]

EPS = 1e-6


def l2_normalize(x: Tensor, eps: float = EPS) -> Tensor:
    """x / sqrt(|x|_2^2 + eps) over the last dimension, computed in fp32; a zero vector has a finite gradient."""
    wide = precise(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
