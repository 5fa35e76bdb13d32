"""Inputs of one token of a layer with the delta rule, and what its separate operations give in float64.

Shapes: B rows, C channels, K taps, H query heads, G key/value heads, d_k and d_v their sizes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.kernels.delta_step import delta_step
from zoo.kernels.precision import precise_dtype

__all__ = ["CASES", "Case", "exact", "inputs"]


class Case(NamedTuple):
    """One call.

    Attributes:
        heads: H and G.
        dims: d_k and d_v.
        size: K.
        learned: whether there are logits.
        bias: whether the convolution has a bias.
        decays: whether there is a decay.
        normalize: whether q and k are normalised.
        start: tokens that each row has seen.
    """

    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (16, 16)
    size: int = 4
    learned: bool = True
    bias: bool = False
    decays: bool = False
    normalize: bool = True
    start: tuple[int, ...] = (7, 2, 0)


CASES = {
    "deltanet": Case(),
    "first tokens": Case(start=(0, 1, 2, 3, 4)),
    "gated": Case(decays=True, bias=True),
    "groups": Case(heads=(6, 2), dims=(20, 48), bias=True, decays=True),
    "wide": Case(heads=(1, 1), dims=(100, 80), start=(5,)),
    "fixed": Case(learned=False, normalize=False),
    "one tap": Case(size=1),
    "many taps": Case(size=7, start=(3, 100_000)),
}


def inputs(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments of `delta_step`; x and logits are cut out of one row, as a projection gives them."""
    (heads, groups), (key_dim, value_dim) = case.heads, case.dims
    start = torch.tensor(case.start)
    batch, channels = len(start), (heads + groups) * key_dim + groups * value_dim
    projected = torch.randn(batch, channels + groups).to(dtype)
    taps = torch.randn(batch, case.size, channels).to(dtype)
    written = torch.arange(case.size) < start[:, None]
    return {
        "x": projected[:, :channels],
        "weight": torch.randn(case.size, channels).to(dtype),
        "taps": torch.where(written[..., None], taps, 0),
        "start": start,
        "state": 0.3 * torch.randn(batch, groups, key_dim, value_dim, dtype=precise_dtype(dtype)),
        "logits": projected[:, channels:] if case.learned else None,
        "bias": torch.randn(channels).to(dtype) if case.bias else None,
        "g": -torch.rand(batch, groups) if case.decays else None,
        "strength": 1.5 if case.learned else 0.7,
        "qk_l2norm": case.normalize,
    }


def exact(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """o, the taps and the state afterwards, by the separate operations in float64 on the CPU."""

    def wide(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.cpu().double() if x.is_floating_point() else x.cpu()

    given = {name: wide(x) for name, x in given.items()}
    o = delta_step(**given, impl="torch")
    return o, given["taps"], given["state"]
