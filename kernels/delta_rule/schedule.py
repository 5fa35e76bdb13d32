"""How the Triton kernels are laid out over a batch: rules of head sizes, dtype and device, never tuned, free of T.

Needs no Triton, so that shapes of what the kernels return are known without it.

Shapes: B batch, T tokens, H query heads, G key/value heads, N documents (N = B unless packed), C chunk.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch

from zoo.kernels.tiling import block_size
from zoo.kernels.triton_support import num_multiprocessors

__all__ = ["Blocks", "Configuration", "Layout", "configuration"]

_SHORTEST_SEGMENT = 8  # chunks: below, what joins the segments costs more than it saves
_FEWEST_SEGMENTS = 4  # in a row: with two, the extra pass takes as long as what it saves


class Blocks(NamedTuple):
    """How a kernel is compiled.

    Attributes:
        block_v: its slice of d_v.
        warps: of a program.
        stages: of its software pipeline.
        flip: of a scan, whether what it holds is transposed, and multiplied from registers.
    """

    block_v: int
    warps: int
    stages: int
    flip: bool = True


class Configuration(NamedTuple):
    """How the kernels are compiled for heads of one size.

    Attributes:
        chunk: C.
        block_k: d_k rounded up to a power of two.
        prepare_warps: of the preparing kernel, which has no slices.
        prepare_registers: a thread of it, at most; None for no limit.
        summary: the forward scan's first pass over segments.
        scan: the forward scan.
        reverse: the reverse scan.
        gradients: the parallel gradients.
    """

    chunk: int
    block_k: int
    prepare_warps: int
    prepare_registers: int | None
    summary: Blocks
    scan: Blocks
    reverse: Blocks
    gradients: Blocks


@cache
def configuration(key_dim: int, value_dim: int, dtype: torch.dtype) -> Configuration:
    """The configuration for head sizes d_k, d_v and the dtype of v."""
    block_k, block_v = block_size(key_dim), block_size(value_dim)
    if dtype == torch.float32:
        # tf32x3 products hold each operand in two parts: chunks of 64 would not fit shared memory where heads are wide.
        # Where they are narrow (d_k = 16), chunks of 64 gave illegal accesses with Triton 3.6 on an H200.
        blocks = Blocks(min(block_v, 16 if block_k > 128 else 32), 4, 1)
        return Configuration(32, block_k, 4, None, blocks, blocks, blocks, blocks)
    if block_k > 128:
        reverse = Blocks(min(block_v, 64), 8, 2, flip=False)
        scan = reverse._replace(flip=block_v >= 64)
        return Configuration(64, block_k, 4, 128, scan, scan, reverse, reverse)
    scan = Blocks(block_v, 4, 3) if block_v < 128 else Blocks(128, 8, 3)
    # At d_k = 64 and below, three stages of narrower slices are faster than two.
    gradients = Blocks(min(block_v, 64), 4, 2) if block_k == 128 else Blocks(min(block_v, 32), 4, 3)
    # Narrower slices of the first pass are finished sooner where its programs are a few more than the device holds.
    summary = Blocks(min(block_v, 64), 4, 3)
    return Configuration(64, block_k, 4, 128, summary, scan, scan, gradients)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A batch, and how it is cut into chunks and segments.

    Where B * G heads are far fewer than a device has multiprocessors, the scan over a long document is cut into
    segments that run side by side. Their number follows from B, G and the device; where documents end does not matter.

    Attributes:
        batch: B.
        seq_len: T, which may be symbolic.
        num_documents: N when packed, else None.
        heads: H.
        groups: G.
        key_dim: d_k.
        value_dim: d_v.
        dtype: of v.
        device: of the tensors.
        segment_length: tokens in a segment, rounded up to whole chunks; None for the rule.
        normalize: whether q and k are L2-normalised.
        gated: whether there is a decay.
    """

    batch: int
    seq_len: int
    num_documents: int | None
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    segment_length: int | None
    normalize: bool
    gated: bool

    @cached_property
    def chunk(self) -> int:
        """C."""
        return configuration(self.key_dim, self.value_dim, self.dtype).chunk

    @property
    def num_states(self) -> int:
        """N, and B for a dense batch."""
        return self.batch if self.num_documents is None else self.num_documents

    @cached_property
    def num_chunks(self) -> int:
        """Of all documents together; packed, an upper bound that needs no document's length."""
        rounding = (self.chunk - 1) * (1 if self.num_documents is None else self.num_documents)
        return self.batch * ((self.seq_len + rounding) // self.chunk)

    @cached_property
    def later_segments(self) -> int:
        """An upper bound on how many segments there are beyond the first of each document: free of T by the rule."""
        if self.segment_length is not None:  # two more than needed, lest a symbolic size be compared with 0 and 1
            return 2 + self.num_chunks // self._fixed_segment_chunks(self.segment_length)
        blocks = configuration(self.key_dim, self.value_dim, self.dtype).scan
        programs = self.groups * -(-self.value_dim // blocks.block_v)
        segments = num_multiprocessors(self.device) // programs
        return segments if segments // self.batch >= _FEWEST_SEGMENTS else 0

    @cached_property
    def segment_chunks(self) -> int:
        """Chunks in a segment, the last of each document apart."""
        if self.segment_length is not None:
            return min(self._fixed_segment_chunks(self.segment_length), self.num_chunks)
        if self.later_segments // self.num_states < _FEWEST_SEGMENTS:
            return self.num_chunks
        chunks = self.num_chunks // self.batch
        return max(_SHORTEST_SEGMENT, -(-chunks // (self.later_segments // self.batch)))

    @cached_property
    def scale_sizes(self) -> list[int]:
        """What multiplies rows: writing, norms of keys and queries, decays since the chunk's start, to its end."""
        keys, queries = self.num_chunks * self.chunk * self.groups, self.num_chunks * self.chunk * self.heads
        normalize, gated = int(self.normalize), int(self.gated)
        return [keys, keys * normalize, queries * normalize, keys * gated, keys * gated]

    def saved_shapes(self, *, save: bool = True) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what the forward makes beside its results, and leaves for the backward.

        The inverses [M, G, C, C] and scores [M, H, C, C] of all M chunks; the errors D [B, T, G, d_v] and the states
        that enter each chunk [M, G, d_v, d_k], of size 0 unless `save`, in the dtype of v like those; the scales,
        flat, and the matrices of segments [later_segments, G, d_k, d_k], in fp32.
        """
        chunks, groups, square = self.num_chunks, self.groups, (self.chunk, self.chunk)
        return [
            ((chunks, groups, *square), self.dtype),
            ((chunks, self.heads, *square), self.dtype),
            ((self.batch, self.seq_len, groups, self.value_dim) if save else (0,), self.dtype),
            ((chunks, groups, self.value_dim, self.key_dim) if save else (0,), self.dtype),
            ((sum(self.scale_sizes),), torch.float32),
            ((self.later_segments, groups, self.key_dim, self.key_dim), torch.float32),
        ]

    def _fixed_segment_chunks(self, segment_length: int) -> int:
        return -(-segment_length // self.chunk)
