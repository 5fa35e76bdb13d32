"""What the tests of reading from caches share.

Shapes: B rows, S slots of a cache, H query heads, G key heads, G_v value heads, D and D_v their sizes.
"""

from typing import Any

import torch
from torch import Tensor

from zoo.kernels.cache_read import read_cache

KAPPAS: list[dict[str, Any]] = [
    {"kappa": "softmax"},
    {"kappa": "linear"},
    {"kappa": "relu"},
    {"kappa": "exp", "scale": 0.2},
    {"kappa": "round"},
    {"kappa": "round", "round_decimals": 2, "scale": 0.25},
]
HEADS = [(4, 4, 4), (8, 2, 2), (8, 2, 4), (8, 1, 4), (6, 3, 3), (6, 1, 1), (3, 1, 3)]
COUNTS = [(20, 20, 20), (0, 0, 0), (1, 1, 1), (0, 1, 20), (7, 19, 2), (21, 100, -1)]


def inputs(
    num_slots: int,
    *,
    heads: tuple[int, int, int] = (8, 2, 4),
    dims: tuple[int, int] = (16, 24),
    counts: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """q, k and v in float64 on the CPU, and counts.

    q and k are multiples of 1/8, so that float32 holds their products exactly, and all round alike.
    """
    counts = (num_slots, num_slots // 3, 1) if counts is None else counts
    generator = torch.Generator().manual_seed(num_slots)
    (num_heads, key_heads, value_heads), (key_dim, value_dim) = heads, dims
    batch = len(counts)
    shapes = {
        "q": (batch, num_heads, key_dim),
        "k": (batch, num_slots, key_heads, key_dim),
        "v": (batch, num_slots, value_heads, value_dim),
    }
    found = {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}
    found = {name: (8 * x).round() / 8 for name, x in found.items()}
    return found | {"counts": torch.tensor(counts)}


def spoil(x: dict[str, Any], value: float = torch.nan) -> dict[str, Any]:
    """The same with `value` in the slots that are not there."""
    absent = torch.arange(x["k"].shape[1], device=x["k"].device) >= x["counts"][:, None]
    return x | {name: x[name].masked_fill(absent[..., None, None], value) for name in ("k", "v")}


def exact(x: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor | None]:
    """The reference's results, in float64, on the CPU."""
    given = {name: y.double().cpu() if y.is_floating_point() else y.cpu() for name, y in x.items()}
    return read_cache(**given, impl="reference", **options)
