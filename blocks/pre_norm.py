"""The pre-norm block, as LLaMA has it: norm, mixer, residual, norm, MLP, residual.

Shapes: B batch, T sequence length, D model width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.mixers.context import Context
from zoo.mixers.contract import Mixer, State
from zoo.mixers.options import Component, Options, component

__all__ = ["PreNorm", "PreNormOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreNormOptions(Options):
    """Options of `PreNorm`: its parts.

    Attributes:
        mixer: what mixes tokens.
        norm: in front of the mixer and of the MLP.
        mlp: what each token computes alone.
    """

    mixer: Component = component("mixer")
    norm: Component = component("norm", "rms_norm")
    mlp: Component = component("mlp", "swiglu")

    def num_params(self, dim: int) -> int:
        """Mixer, MLP and two norms."""
        parts = self.mixer, self.norm, self.norm, self.mlp
        return sum(part.options.num_params(dim) for part in parts)

    def flops_per_token(self, dim: int, length: int) -> float:
        """Mixer and MLP."""
        return sum(part.options.flops_per_token(dim, length) for part in (self.mixer, self.mlp))

    def state_bytes(self, dim: int, length: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """The mixer's."""
        return self.mixer.options.state_bytes(dim, length, dtype)


class PreNorm(nn.Module):
    """y = x + mixer(norm(x)); z = y + mlp(norm(y)).

    Args:
        options: its parts.
        dim: D.
        mixer: makes the mixer.
        norm: makes a norm.
        mlp: makes the MLP.
    """

    Config = PreNormOptions

    def __init__(
        self,
        options: PreNormOptions,
        dim: int,
        mixer: Callable[[], Mixer],
        norm: Callable[[], nn.Module],
        mlp: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        del options, dim
        self.mixer_norm = norm()
        self.mixer = mixer()
        self.mlp_norm = norm()
        self.mlp = mlp()

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, State | None]:
        """x [B, T, D] -> [B, T, D], and the mixer's state; see `Mixer.forward`."""
        mixed, state = self.mixer(self.mixer_norm(x), context, state)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state
