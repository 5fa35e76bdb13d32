"""One matrix as several products.

Shapes: D model width.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["project"]


def project(linear: nn.Linear, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """W x in parts: with gradients each the product of x with its own rows of W, without one product that is cut.

    The one product would cost the backward a copy of the whole, to put the parts' gradients together; without a
    backward the others would cost launches, which a decoding step has none to spare of.

    Args:
        linear: of width sum(widths), without bias.
        x: [..., D].
        widths: of the parts.

    Returns:
        The parts, [..., width] each.
    """
    if not torch.is_grad_enabled():
        return list(F.linear(x, linear.weight).split(list(widths), -1))
    return [F.linear(x, weight) for weight in linear.weight.split(list(widths))]
