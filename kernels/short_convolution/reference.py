"""The depthwise causal convolution of a few taps in plain PyTorch: the oracle, and the form where Triton cannot.

Shapes: B batch, T tokens, C channels, K taps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def short_convolution_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
    taps: Tensor | None = None,
    *,
    silu: bool = False,
) -> Tensor:
    """y_t = bias + sum_{j < K} weight_j x_{t-j}, never across a document's start; then SiLU.

    A sum of shifted products, which the compiler fuses with what stands around it.

    Args:
        x: [B, T, C].
        weight: [K, C].
        bias: [C]; none if None.
        positions: [1, T] within each document when sequences are packed, else None.
        taps: [B, K - 1, C], the tokens before x; zeros if None.
        silu: whether SiLU follows.

    Returns:
        y [B, T, C] in the dtype of x.
    """
    reach, length = weight.shape[0] - 1, x.shape[1]
    past = x.new_zeros(x.shape[0], reach, x.shape[2]) if taps is None else taps.to(x.dtype)
    padded = torch.cat([past, x], 1)
    y = x * weight[0]
    for lag in range(1, reach + 1):
        shifted = padded[:, reach - lag : reach - lag + length]
        if positions is not None:
            shifted = torch.where((positions >= lag)[..., None], shifted, 0)
        y = y + shifted * weight[lag]
    if bias is not None:
        y = y + bias
    y = y.to(x.dtype)
    return F.silu(y) if silu else y
