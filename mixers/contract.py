"""The contract that every token mixer keeps.

Shapes: B batch, T sequence length, D model width.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo.mixers.context import Context, Shared
from zoo.mixers.options import NoOptions, Options

__all__ = ["Mixer", "State"]

State = dict[str, Tensor]


class Mixer(nn.Module, ABC):
    """Mixes information across tokens: [B, T, D] -> [B, T, D], causally.

    A subclass is built as ``cls(options, dim, **factories)``: one factory for each option that is itself a component.
    Linear layers that write to the residual stream are named ``out_proj``; the model scales their initialisation.
    """

    Config: ClassVar[type[Options]] = NoOptions
    supports: ClassVar[tuple[str, ...]] = ()
    """Of packed, decode, grouped_heads, constant_state, for a class that registry.yaml does not list."""
    shared: tuple[Shared, ...] = ()
    """What the mixer reads from the context, so that the model builds it once per call for all layers."""

    @abstractmethod
    def forward(self, x: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, State | None]:
        """Mix the tokens of x.

        Args:
            x: [B, T, D]; packed sequences have B = 1 and ``context.cu_seqlens``.
            context: what the model built once for this call.
            state: of the tokens before x, from `init_state` or an earlier call. It is consumed: its tensors may be
                updated in place, and the returned state is the one to go on with. What stands in x after a row's
                ``context.lengths`` must not reach it. With ``context.fresh`` there are no tokens before x.

        Returns:
            y [B, T, D] in the dtype of x, and the state after the last token (None if none was given).
        """

    def earliest(self, seen: int) -> int:
        """The earliest position to which a state that has seen so many tokens can be cropped.

        ``seen`` itself where a state keeps no more than a sum of the past, as here.
        """
        return seen

    @abstractmethod
    def init_state(self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype) -> State:
        """The state before the first token: named tensors, each [B, ...], that keep shape and dtype from then on.

        Args:
            batch_size: B.
            max_length: the most tokens that the state will ever hold.
            device: of the tensors.
            dtype: of the model's activations; what needs more precision than that keeps it.
        """
