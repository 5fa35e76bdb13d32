"""Sliding-window softmax attention (arXiv 2004.05150): each token sees the last W, itself included."""

from dataclasses import dataclass
from typing import Annotated

from zoo.mixers.options import AtLeast
from zoo.mixers.softmax_attention import AttentionOptions, SoftmaxAttention

__all__ = ["SlidingWindow", "SlidingWindowOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindowOptions(AttentionOptions):
    """Options of `SlidingWindow`.

    Attributes:
        window: visible keys, the token itself included.
    """

    window: Annotated[int, AtLeast(1)] = 1024

    def visible_keys(self, length: int) -> float:
        """The window, less what the first tokens lack."""
        window = min(self.window, length)
        return window - window * (window - 1) / (2 * length)

    def num_slots(self, length: int) -> int:
        """The window, whatever the length: a ring never shrinks."""
        del length
        return self.window


class SlidingWindow(SoftmaxAttention):
    """Softmax attention over the last ``window`` tokens.

    Args:
        options: resolved options.
        dim: D.
    """

    Config = SlidingWindowOptions

    def __init__(self, options: SlidingWindowOptions, dim: int) -> None:
        super().__init__(options, dim, options.window)
