"""One token of a layer with the delta rule, of the separate operations: the form where Triton cannot.

Shapes: B rows, C channels, K taps, H query heads, G key/value heads, d_k and d_v their sizes.
"""

import torch
from torch import Tensor

from zoo.kernels.delta_rule import step_delta_rule
from zoo.kernels.precision import precise
from zoo.kernels.ring import newest, write
from zoo.kernels.short_convolution import short_convolution


def delta_step_composed(
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
    """`delta_step`, its arguments and result; ``normalize`` is its ``qk_l2norm``."""
    _, groups, key_dim, value_dim = state.shape
    token, past = x[:, None], newest(taps, start, weight.shape[0] - 1)
    widths = [x.shape[1] - groups * (key_dim + value_dim), groups * key_dim, groups * value_dim]
    q, k, v = short_convolution(token, weight, bias, activation="silu", taps=past, widths=widths)
    q, k = (part.unflatten(-1, (-1, key_dim)) for part in (q, k))
    if logits is None:
        beta = state.new_full((*state.shape[:1], 1, groups), strength)
    else:
        beta = strength * torch.sigmoid(precise(logits))[:, None]
    decay = None if g is None else g[:, None]
    o = step_delta_rule(q, k, v.unflatten(-1, (-1, value_dim)), beta, state, g=decay, qk_l2norm=normalize)
    write(taps, token, start)
    return o[:, 0]
