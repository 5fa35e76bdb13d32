"""The maps in front of a mixer's kernel: short convolution, 1 + ELU, L2 and L1 norm, beta, decay.

Shapes: B batch, T sequence length, C channels, H heads, d_h head dim, K taps of the convolution.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.kernels.normalize import l2_normalize
from zoo.kernels.precision import precise
from zoo.kernels.ring import newest, write
from zoo.kernels.short_convolution import Activation, short_convolution
from zoo.mixers.context import Context
from zoo.mixers.norms import RMSNorm, StaticFloat
from zoo.mixers.options import Between

__all__ = [
    "Decay",
    "HeadNorm",
    "OnePlusELU",
    "ShortConvolution",
    "Strength",
    "StrengthKind",
    "convolve",
    "head_norm",
    "l1_normalize",
    "l2_normalize",
]

StrengthKind = Literal["sigmoid", "2sigmoid"] | Annotated[float, Between(0, 2)]
"""How strongly a token writes: a learned sigmoid in (0, 1), twice that, or a fixed number."""


def l1_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / (|x|_1 + eps) over the last dimension, computed in fp32."""
    wide = precise(x)
    return (wide / (wide.abs().sum(-1, keepdim=True) + eps)).to(x.dtype)


HeadNorm = Literal["rms", "l2", "none"]
"""Of queries and keys per head: "rms" has learned weights, "l2" makes cosines of their products."""


class L2Norm(nn.Module):
    """`l2_normalize` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return l2_normalize(x)


def head_norm(kind: HeadNorm, head_dim: int) -> nn.Module:
    """The norm of that kind for heads of that size."""
    return {"rms": lambda: RMSNorm(head_dim), "l2": L2Norm, "none": nn.Identity}[kind]()


class Strength(nn.Module):
    """How strongly a token writes: learned in (0, 1), in (0, 2) for "2sigmoid", or fixed.

    Args:
        kind: "sigmoid", "2sigmoid", whose erased eigenvalue 1 - beta may be negative, or the number.
        num_heads: H.
    """

    def __init__(self, kind: StrengthKind, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.factor: StaticFloat = ({"sigmoid": 1.0, "2sigmoid": 2.0}[kind] if isinstance(kind, str) else kind,)
        self.fixed = not isinstance(kind, str)
        self.bounded = abs(self.factor[0]) <= 1

    def forward(self, logits: Tensor) -> Tensor:
        """[B, T, H], or [B, T, 0] where the strength is fixed -> [B, T, H] fp32 (fp64 for fp64)."""
        logits = precise(logits)
        if self.fixed:
            return logits.new_full((*logits.shape[:-1], self.num_heads), self.factor[0])
        return self.factor[0] * logits.sigmoid()


class Decay(nn.Module):
    """How fast a head's memory fades: g = -exp(A_log) softplus(x + dt_bias), the log of its decay (arXiv 2412.06464).

    Args:
        num_heads: H.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """exp(A_log) uniform in (1, 16), softplus(dt_bias) log-uniform in (0.001, 0.1), as in Mamba-2 (2405.21060)."""
        self.A_log.uniform_(1, 16).log_()
        dt = self.dt_bias.uniform_(math.log(0.001), math.log(0.1)).exp_()
        dt.add_(torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def forward(self, logits: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H] fp32 (fp64 for fp64), at most 0."""
        return -precise(self.A_log).exp() * F.softplus(precise(logits) + precise(self.dt_bias))


class OnePlusELU(nn.Module):
    """1 + ELU(x), never negative (arXiv 2006.16236)."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise, any shape."""
        return 1 + F.elu(x)


class ShortConvolution(nn.Module):
    """Depthwise causal convolution: see `short_convolution`.

    Args:
        channels: C.
        size: K taps, the current token included.
        bias: whether a bias is added.
    """

    def __init__(self, channels: int, size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, channels))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within K^-1/2, as torch's own depthwise convolutions start."""
        nn.init.uniform_(self.weight, -(self.weight.shape[0] ** -0.5), self.weight.shape[0] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        taps: Tensor | None = None,
        activation: Activation | None = None,
        widths: Sequence[int] | None = None,
    ) -> tuple[Tensor, ...]:
        """Convolve.

        Args:
            x: [B, T, C].
            positions: [1, T] within each document when sequences are packed, else None.
            taps: [B, K - 1, C], the tokens before x; zeros if None.
            activation: that follows; none if None.
            widths: of the parts of y; one part if None.

        Returns:
            The parts of y [B, T, width] in the dtype of x.
        """
        return short_convolution(
            x, self.weight, self.bias, activation=activation, positions=positions, taps=taps, widths=widths
        )

    def new_taps(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """A ring for the last K tokens, zeros [B, K, C]: none that a token is convolved with makes room for it."""
        return torch.zeros(batch_size, *self.weight.shape, device=device, dtype=dtype)


def convolve(
    convolution: ShortConvolution | None,
    x: Tensor,
    widths: Sequence[int],
    context: Context,
    state: dict[str, Tensor] | None,
    activation: Activation | None = None,
) -> tuple[Tensor, ...]:
    """A mixer's convolution, if it has one, and what it convolves in parts.

    Args:
        convolution: or None.
        x: [B, T, C].
        widths: of the parts.
        context: of the call.
        state: with ``taps``, a ring that is updated, if there is a convolution; or None.
        activation: that follows a convolution; none if None.

    Returns:
        The parts [B, T, width].
    """
    if convolution is None:
        return x.split(list(widths), -1)
    positions = None if context.cu_seqlens is None else context.positions
    if state is None:
        return convolution(x, positions, None, activation, widths)
    assert context.start is not None
    ring = state["taps"]
    past = None if context.fresh else newest(ring, context.start, ring.shape[1] - 1)
    parts = convolution(x, positions, past, activation, widths)
    write(ring, x, context.start, context.lengths)
    return parts
