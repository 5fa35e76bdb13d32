"""The torch.library op of the Triton kernel for one token; it updates the taps and the state in place.

Shapes: B rows, C channels, K taps, H query heads, G key/value heads, d_k and d_v their sizes.
"""

import torch
from torch import Tensor

# The kernel, and Triton with it, is imported at the first call: registering the op needs neither.


@torch.library.custom_op(
    "zoo::delta_step_triton", mutates_args=("taps", "state"), tags=(torch.Tag.needs_fixed_stride_order,)
)
def delta_step(
    x: Tensor,
    weight: Tensor,
    taps: Tensor,
    start: Tensor,
    state: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    g: Tensor | None,
    strength: float,
    normalize: bool,
) -> Tensor:
    """`launch_step` as an op."""
    from zoo.kernels.delta_step.triton.launch import launch_step

    with torch.cuda.device_of(x):
        return launch_step(x, weight, taps, start, state, logits, bias, g, strength, normalize=normalize)


@delta_step.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    taps: Tensor,
    start: Tensor,
    state: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    g: Tensor | None,
    strength: float,
    normalize: bool,
) -> Tensor:
    _, groups, key_dim, value_dim = state.shape
    return x.new_empty(x.shape[0], (x.shape[1] - groups * (key_dim + value_dim)) // key_dim, value_dim)
