"""One matrix as several products.

Shapes: D model width.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["project"]


def project(linear: nn.Linear, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """W x in parts, each the product of x with its own rows of W.

    One product that is cut afterwards costs the backward a copy of the whole, to put the parts' gradients together.

    Args:
        linear: of width sum(widths), without bias.
        x: [..., D].
        widths: of the parts.

    Returns:
        The parts, [..., width] each.
    """
    return [F.linear(x, weight) for weight in linear.weight.split(list(widths))]
