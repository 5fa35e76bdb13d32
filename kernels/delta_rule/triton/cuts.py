"""Documents cut into segments, and segments into chunks: what the programs of each kernel walk over.

A document is a row of the batch, or a piece of a packed row. Chunks and segments never cross one. A dense batch is cut
by arithmetic; for packed sequences one small kernel writes tables whose sizes do not depend on where documents end, so
nothing waits for the device. Entries of the tables that no document needs stand at the end, and are empty.

Rows are tokens counted over the whole batch: row b * T + t.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.delta_rule.schedule import Layout

_BLOCK = 256


class Cuts(NamedTuple):
    """How a batch is cut.

    Attributes:
        num_segments: of all documents together; packed, at least as many.
        segment_chunks: chunks in a segment, the last of each document apart.
        chunks: [M, 2] first row, and end row of its document, of each chunk; None for a dense batch, like the others.
        segments: [num_segments, 5] document (-1 for none), first chunk, end chunk, first row, end row of the document.
        first_segments: [N + 1] the first segment of each document, and one past the last.
    """

    num_segments: int
    segment_chunks: int
    chunks: Tensor | None = None
    segments: Tensor | None = None
    first_segments: Tensor | None = None


def cut(layout: Layout, cu_seqlens: Tensor | None) -> Cuts:
    """Cut a batch.

    Args:
        layout: of the batch.
        cu_seqlens: [N + 1] int32 or int64, or None for a dense batch.

    Returns:
        The cuts.
    """
    length, chunks = layout.segment_chunks, layout.num_chunks
    if cu_seqlens is None:
        return Cuts(layout.batch * triton.cdiv(chunks // layout.batch, length), length)
    documents = layout.num_states
    segments = documents if chunks <= length else chunks // length + documents
    sizes = [-(-size // 4) * 4 for size in (chunks * 2, segments * 5, documents + 1)]  # each aligned alike
    views = torch.empty(sum(sizes), dtype=torch.int32, device=cu_seqlens.device).split(sizes)
    _cut_kernel[(documents,)](cu_seqlens, *views, documents, chunks, segments, length, layout.chunk, _BLOCK)
    return Cuts(segments, length, *views)


@triton.jit(do_not_specialize=["num_documents", "num_chunks", "num_segments", "segment_chunks"])
def _cut_kernel(
    cu_seqlens,
    chunks,
    segments,
    first_segments,
    num_documents,
    num_chunks,
    num_segments,
    segment_chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a document: it counts what those before it have, then writes its own entries."""
    document = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    first_chunk = 0
    first_segment = 0
    for block in range(0, document, BLOCK):
        before = block + lane < document
        begin = tl.load(cu_seqlens + block + lane, mask=before, other=0)
        end = tl.load(cu_seqlens + block + lane + 1, mask=before, other=0)
        count = tl.cdiv(end - begin, CHUNK).to(tl.int32)
        first_chunk += tl.sum(count)
        first_segment += tl.sum(tl.where(before, tl.maximum(tl.cdiv(count, segment_chunks), 1), 0))
    begin = tl.load(cu_seqlens + document).to(tl.int32)
    end = tl.load(cu_seqlens + document + 1).to(tl.int32)
    count = tl.cdiv(end - begin, CHUNK)
    for block in range(0, count, BLOCK):
        chunk = block + lane
        entry = chunks + (first_chunk + chunk) * 2
        tl.store(entry, begin + chunk * CHUNK, mask=chunk < count)
        tl.store(entry + 1, end, mask=chunk < count)
    in_document = tl.maximum(tl.cdiv(count, segment_chunks), 1)
    for block in range(0, in_document, BLOCK):
        segment = block + lane
        entry = segments + (first_segment + segment) * 5
        here = segment < in_document
        from_chunk = segment * segment_chunks
        tl.store(entry, document, mask=here)
        tl.store(entry + 1, first_chunk + from_chunk, mask=here)
        tl.store(entry + 2, first_chunk + tl.minimum(from_chunk + segment_chunks, count), mask=here)
        tl.store(entry + 3, begin + from_chunk * CHUNK, mask=here)
        tl.store(entry + 4, end, mask=here)
    tl.store(first_segments + document, first_segment)
    if document == num_documents - 1:
        tl.store(first_segments + num_documents, first_segment + in_document)
        for block in range(first_chunk + count, num_chunks, BLOCK):
            chunk = block + lane
            tl.store(chunks + chunk * 2, 0, mask=chunk < num_chunks)
            tl.store(chunks + chunk * 2 + 1, 0, mask=chunk < num_chunks)
        for block in range(first_segment + in_document, num_segments, BLOCK):
            segment = block + lane
            tl.store(segments + segment * 5, -1, mask=segment < num_segments)


@triton.jit
def place_of_program(chunks, seq_len, GROUPS: tl.constexpr, CHUNK: tl.constexpr):
    """Of one program a chunk and key/value head: their number chunk * GROUPS + head, the head, the chunk's first row
    (all int64), and how many rows its document has from there on (0: no such chunk)."""
    program = tl.program_id(0)
    chunk = program // GROUPS
    group = (program - chunk * GROUPS).to(tl.int64)
    if chunks is not None:
        row = tl.load(chunks + chunk * 2)
        length = tl.load(chunks + chunk * 2 + 1) - row
        row = row.to(tl.int64)
    else:
        in_row = tl.cdiv(seq_len, CHUNK)
        document = chunk // in_row
        token = ((chunk - document * in_row) * CHUNK).to(tl.int32)
        length = seq_len - token
        row = document.to(tl.int64) * seq_len + token
    return program.to(tl.int64), group, row, length


@triton.jit
def segment_span(segment, segments, seq_len, segment_chunks, CHUNK: tl.constexpr):
    """A segment's document (-1: no such segment), first chunk, number of chunks, first row (int64), its document's rows
    from there on, and whether it is the first and the last of its document."""
    if segments is not None:
        entry = segments + segment * 5
        document = tl.load(entry)
        first_chunk = tl.load(entry + 1)
        count = tl.load(entry + 2) - first_chunk
        row = tl.load(entry + 3)
        length = tl.load(entry + 4) - row
        row = row.to(tl.int64)
        first = segment == 0
        if segment > 0:
            first = tl.load(entry - 5) != document
        last = length <= count * CHUNK
    else:
        in_row = tl.cdiv(seq_len, CHUNK)
        per_row = tl.cdiv(in_row, segment_chunks)
        document = segment // per_row
        skipped = (segment - document * per_row) * segment_chunks
        first_chunk = document * in_row + skipped
        count = tl.minimum(segment_chunks, in_row - skipped)
        row = document.to(tl.int64) * seq_len + skipped * CHUNK
        length = seq_len - skipped * CHUNK
        first = skipped == 0
        last = skipped + count == in_row
    return document, first_chunk, count, row, length, first, last
