"""Parts that the kernels share: which keys rows see, logits, and kappa of them.

Where a kernel multiplies matrices in a loop and then again outside of one, the loop is never empty. For what both take
from one place in shared memory, ptxas 12.8 (of Triton 3.6) has made the second's descriptors before the loop, and where
the loop was skipped left them undefined. The loops over far blocks may be empty; by the machine code they share no such
place with what follows, unless values are narrower than `schedule` lets them be. Sequences of one block, of all head
sizes and configurations, are in the tests for CUDA.
"""

import triton
import triton.language as tl

from zoo.kernels.triton.tiles import dot, round_half_to_even

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def visible_keys(keys, rows, DIAGONAL: tl.constexpr):
    """Which keys a row sees, those before it; None, for all, unless DIAGONAL, where keys may stand at or after rows."""
    visible = None
    if DIAGONAL:
        visible = keys < rows
    return visible


@triton.jit
def logit_factor(scale, KAPPA: tl.constexpr):
    """What a product of rows is multiplied by: kappa takes softmax's and exp's logits to the base 2."""
    factor = scale
    if KAPPA == "softmax" or KAPPA == "exp":
        factor = scale * _LOG2E
    return factor


@triton.jit
def logits_of(x, y, factor, visible, KAPPA: tl.constexpr):
    """Of rows x and rows y; of those not visible (None: all are) such that kappa makes 0 of them."""
    logits = dot(x, tl.trans(y)) * factor
    if visible is not None:
        if KAPPA == "softmax" or KAPPA == "exp":
            logits = tl.where(visible, logits, float("-inf"))
        else:
            logits = tl.where(visible, logits, 0.0)
    return logits


@triton.jit
def weigh(logits, lse, KAPPA: tl.constexpr, UNIT: tl.constexpr):
    """kappa of the logits; `lse` is what softmax subtracts, to the base 2, and UNIT what round makes whole."""
    if KAPPA == "softmax":
        weights = tl.exp2(logits - lse)
    elif KAPPA == "exp":
        weights = tl.exp2(logits)
    elif KAPPA == "relu":
        weights = tl.maximum(logits, 0.0)
    elif KAPPA == "round":
        weights = round_half_to_even(logits * UNIT) / UNIT
    else:
        weights = logits
    return weights


@triton.jit
def logit_gradient(weights, gradient, total, visible, KAPPA: tl.constexpr):
    """From the weights' gradient; `total` is the sum of weights * gradient over the keys of a row, for softmax."""
    if KAPPA == "softmax":
        return weights * (gradient - total)
    if KAPPA == "exp":
        return weights * gradient
    if KAPPA == "relu":
        return tl.where(weights > 0, gradient, 0.0)
    if visible is not None:
        return tl.where(visible, gradient, 0.0)
    return gradient
