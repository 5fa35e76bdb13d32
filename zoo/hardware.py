"""What GPUs can do at most, by their data sheets: dense products, without sparsity."""

import torch

__all__ = ["peak_flops"]

_HOPPER = {"bfloat16": 989.4, "float16": 989.4, "tf32": 494.7, "float32": 66.9}
_AMPERE = {"bfloat16": 312.0, "float16": 312.0, "tf32": 156.0, "float32": 19.5}
_TFLOPS: dict[str, dict[str, float]] = {  # by torch.cuda.get_device_name
    "NVIDIA B200": {"bfloat16": 2250.0, "float16": 2250.0, "tf32": 1125.0, "float32": 75.0},
    "NVIDIA H200": _HOPPER,
    "NVIDIA GH200 480GB": _HOPPER,
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA H100 PCIe": {"bfloat16": 756.5, "float16": 756.5, "tf32": 378.0, "float32": 51.2},
    "NVIDIA A100-SXM4-40GB": _AMPERE,
    "NVIDIA A100-SXM4-80GB": _AMPERE,
    "NVIDIA A100-PCIE-40GB": _AMPERE,
    "NVIDIA A100 80GB PCIe": _AMPERE,
    "NVIDIA L40S": {"bfloat16": 362.05, "float16": 362.05, "tf32": 183.2, "float32": 91.6},
    "NVIDIA L4": {"bfloat16": 121.0, "float16": 121.0, "tf32": 60.0, "float32": 30.3},
    "NVIDIA GeForce RTX 4090": {"bfloat16": 165.2, "float16": 165.2, "tf32": 82.6, "float32": 82.6},
    "NVIDIA GeForce RTX 3090": {"bfloat16": 71.0, "float16": 71.0, "tf32": 35.6, "float32": 35.6},
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The most floating-point operations a second of products in a dtype; None for what is not in the table.

    That of fp16 and bf16 is with sums in fp32; that of fp32 depends on `torch.get_float32_matmul_precision`.

    Args:
        device: a CUDA device; a CPU has none here.
        dtype: of the operands.
    """
    if device.type != "cuda":
        return None
    name = str(dtype).removeprefix("torch.")
    if name == "float32" and torch.get_float32_matmul_precision() != "highest":
        name = "tf32"
    known = _TFLOPS.get(torch.cuda.get_device_name(device), {}).get(name)
    return None if known is None else known * 1e12
