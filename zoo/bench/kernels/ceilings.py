"""What the device gives at most, and the least time that this leaves a call."""

from dataclasses import dataclass
from typing import Literal, Self

import torch

from zoo.timing import copy_bandwidth, matmul_rate

__all__ = ["Bound", "Ceilings"]

Bound = Literal["bytes", "FLOPs"]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured in the same run.

    Attributes:
        bytes_per_s: read and written by a large copy.
        flops_per_s: of a large matrix product.
    """

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Self:
        """Of a device; of float32 on CUDA with the matrix units, by which the kernels compute it too (TF32)."""
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return cls(copy_bandwidth(device), matmul_rate(device, dtype))
        finally:
            torch.set_float32_matmul_precision(precision)

    def floor(self, num_bytes: int, flops: int) -> tuple[float, Bound]:
        """Milliseconds that so much takes at least, and what takes them."""
        moving, computing = 1e3 * num_bytes / self.bytes_per_s, 1e3 * flops / self.flops_per_s
        return (moving, "bytes") if moving >= computing else (computing, "FLOPs")
