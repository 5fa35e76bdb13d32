"""One token of a layer with the delta rule on CUDA: allocates, and launches the kernel.

Shapes: B rows, C channels, K taps, H query heads, G key/value heads, d_k and d_v their sizes.
"""

import triton
from torch import Tensor

from zoo.kernels.delta_step.triton.kernels import delta_step_kernel
from zoo.kernels.normalize import EPS
from zoo.kernels.tiling import block_size
from zoo.kernels.triton.early import early_options

_BLOCK_V = 32
_WARP = 2048  # numbers of the state that a warp holds


def launch_step(
    x: Tensor,
    weight: Tensor,
    taps: Tensor,
    start: Tensor,
    state: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    g: Tensor | None,
    strength: float,
    *,
    normalize: bool,
) -> Tensor:
    """o [B, H, d_v] of `delta_step`, in one launch; its arguments."""
    (batch, groups, key_dim, value_dim), size = state.shape, weight.shape[0]
    repeat = (x.shape[1] - groups * value_dim) // (groups * key_dim) - 1
    if logits is not None and logits.stride(1) != 1:
        logits = logits.contiguous()
    o = x.new_empty(batch, groups * repeat, value_dim)
    block_k, block_v = block_size(key_dim), min(_BLOCK_V, block_size(value_dim))
    delta_step_kernel[(batch * groups * triton.cdiv(value_dim, block_v),)](
        x,
        weight.contiguous(),
        taps,
        start.contiguous(),
        state,
        logits,
        None if bias is None else bias.contiguous(),
        None if g is None else g.contiguous(),
        o,
        x.stride(0),
        0 if logits is None else logits.stride(0),
        strength,
        key_dim**-0.5,
        GROUPS=groups,
        REPEAT=repeat,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        TAPS=size,
        NORMALIZE=normalize,
        EPS=EPS,
        num_warps=max(1, min(8, block_k * block_v // _WARP)),
        **early_options(x.device),
    )
    return o
