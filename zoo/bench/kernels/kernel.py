"""What is said of a kernel so that it can be measured: a table entry is a `Kernel`.

Shapes: B batch, T tokens (slots of a cache), H heads, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zoo.bench.plan import visible_pairs

__all__ = [
    "REFERENCE_LENGTH",
    "STEPS",
    "Call",
    "Draw",
    "Inputs",
    "Kernel",
    "Make",
    "Role",
    "Shape",
    "Side",
    "Step",
    "Work",
]

Step = Literal["forward", "forward_backward"]
STEPS: tuple[Step, ...] = ("forward", "forward_backward")
Role = Literal["peer", "reference", "ours"]
REFERENCE_LENGTH = 512
"""Up to so many tokens a reference that goes token by token, or holds all pairs of them, is affordable."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a call.

    Attributes:
        batch_size: B.
        length: T.
        num_heads: H.
        head_dim: D, of queries, keys and values.
        window: visible keys of a token, itself included, for what has a window.
        dtype: of the tensors.
        device: of the tensors.
    """

    batch_size: int
    length: int
    num_heads: int
    head_dim: int
    window: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_vectors(self) -> int:
        """B T H."""
        return self.batch_size * self.length * self.num_heads

    def bytes_of(self, numbers: int) -> int:
        """Of so many numbers in the dtype."""
        return numbers * self.dtype.itemsize

    @property
    def tensor_bytes(self) -> int:
        """Of [B, T, H, D]."""
        return self.bytes_of(self.num_vectors * self.head_dim)

    def visible_pairs(self, window: int | None = None) -> int:
        """Pairs of a token and a key that it sees, of all heads and rows."""
        return self.batch_size * self.num_heads * visible_pairs(self.length, window)


@dataclass(frozen=True, slots=True)
class Work:
    """The least that a call has to do.

    Attributes:
        read: bytes of the inputs, each read once.
        written: bytes of the outputs, each written once.
        flops: of the forward, a multiply-add counting 2.
        backward_flops: of the backward alone.
    """

    read: int
    written: int
    flops: int
    backward_flops: int = 0

    def of(self, step: Step) -> tuple[int, int]:
        """Bytes and FLOPs. A backward reads the inputs again and the outputs' gradients, and writes the inputs'."""
        if step == "forward":
            return self.read + self.written, self.flops
        return 3 * self.read + 2 * self.written, self.flops + self.backward_flops


@dataclass(frozen=True, slots=True)
class Draw:
    """Makes random tensors.

    Attributes:
        generator: which it draws from.
        dtype: of the tensors, if none is given.
    """

    generator: torch.Generator
    dtype: torch.dtype

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Of a standard deviation of 1."""
        return torch.randn(size, generator=self.generator, device=self.generator.device, dtype=dtype or self.dtype)

    def uniform(self, *size: int) -> Tensor:
        """In [0, 1)."""
        return torch.rand(size, generator=self.generator, device=self.generator.device, dtype=self.dtype)


Inputs = dict[str, Tensor]
Call = Callable[..., tuple[Tensor, ...]]
"""From the inputs by name to the outputs, in order; a peer may leave out the last ones."""
Make = Callable[[Shape], Call]
"""What computes a shape; it prepares what layers would share, and raises `Skipped` where it cannot serve."""


@dataclass(frozen=True, slots=True)
class Side:
    """One that computes the operation.

    Attributes:
        name: in the results.
        role: "ours", the reference, or a peer: another library's, or PyTorch's own.
        make: its calls.
        longest: T up to which it is measured; None for any.
        captured: whether a CUDA graph may hold it: it asks the device for no values, and one copy of what it keeps for
            the backward is not too much.
    """

    name: str
    role: Role
    make: Make
    longest: int | None = None
    captured: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """An operation and all that compute it.

    Attributes:
        name: of the public function, with what is asked of it.
        summary: what is measured.
        inputs: makes them.
        layouts: the dimensions of each input and output; B and H are those by which results may be checked in part.
        outputs: names of the results, in order. A backward starts from the first, which is [B, T, H, D].
        work: the least that a call has to do.
        sides: in order of measurement: peers, which ours are compared with, the reference, ours.
        reference: makes what is exact when given float64.
        exact: the same for more than `REFERENCE_LENGTH` tokens; the reference again if None.
        batch_size: B; None for as many rows as make the plan's tokens.
        by_length: whether T makes a difference; if not it is 1.
        windowed: whether it looks through a window; then only sequences that are longer are measured.
        has_backward: whether it is measured. Without one a call may update its inputs in place.
    """

    name: str
    summary: str
    inputs: Callable[[Shape, Draw], Inputs]
    layouts: dict[str, str]
    outputs: tuple[str, ...]
    work: Callable[[Shape], Work]
    sides: tuple[Side, ...]
    reference: Make
    exact: Make | None = None
    batch_size: int | None = None
    by_length: bool = True
    windowed: bool = False
    has_backward: bool = False
