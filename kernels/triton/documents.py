"""Documents cut into blocks of rows, none of which crosses the end of one.

A document is a row of the batch, or a piece of a packed row. A dense batch is cut by arithmetic; for packed sequences a
small kernel writes a table, whose size does not depend on where documents end: nothing waits for the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.packing import num_blocks

__all__ = ["cut", "place_of_block", "place_of_head"]

_DOCUMENTS_AT_ONCE = 256


def cut(seq_len: int, cu_seqlens: Tensor | None, size: int) -> tuple[Tensor | None, int]:
    """The table of the blocks of so many rows, None for a dense batch, and how many a row of the batch has room for.

    The table has a row more: 0, where a kernel may count; how many blocks there are; 0.

    Args:
        seq_len: T.
        cu_seqlens: [N + 1], contiguous, or None.
        size: rows of a block.
    """
    count = num_blocks(seq_len, cu_seqlens, size)
    if cu_seqlens is None:
        return None, count
    blocks = cu_seqlens.new_empty(count + 1, 3, dtype=torch.int32)
    documents = cu_seqlens.shape[0] - 1
    cut_kernel[documents,](cu_seqlens, blocks, documents, count, seq_len, size, _DOCUMENTS_AT_ONCE)
    return blocks, count


@triton.jit
def _bounds(cu_seqlens, document, exists, seq_len, BLOCK: tl.constexpr):
    """Of documents, as far as they exist and lie inside the row: first and end row, and how many blocks; int32."""
    start = tl.maximum(tl.load(cu_seqlens + document, mask=exists, other=0), 0)
    end = tl.minimum(tl.load(cu_seqlens + document + 1, mask=exists, other=0), seq_len)
    return start.to(tl.int32), end.to(tl.int32), tl.cdiv(tl.maximum(end - start, 0), BLOCK).to(tl.int32)


@triton.jit(do_not_specialize=["num_documents", "num_blocks", "seq_len"])
def cut_kernel(cu_seqlens, blocks, num_documents, num_blocks, seq_len, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """The table [num_blocks + 1, 3]: each block's first row, and the first and end row of its document; 0 for none.

    In the last row 0, the number of blocks, and 0.

    One program a document: it counts the blocks of those before it, then writes its own; the last, what is left. Of
    ends that nobody has checked none leads out of the table, or out of the row.
    """
    document = tl.program_id(0)
    lane = tl.arange(0, AT_ONCE)
    place = 0
    for first in range(0, document, AT_ONCE):
        _, _, before = _bounds(cu_seqlens, first + lane, first + lane < document, seq_len, BLOCK)
        place += tl.sum(before)
    start, end, count = _bounds(cu_seqlens, document, document < num_documents, seq_len, BLOCK)
    for first in range(0, count, AT_ONCE):
        entry = blocks + (place + first + lane) * 3
        own = (first + lane < count) & (place + first + lane < num_blocks)
        tl.store(entry, start + (first + lane) * BLOCK, mask=own)
        tl.store(entry + 1, start, mask=own)
        tl.store(entry + 2, end, mask=own)
    if document == num_documents - 1:
        found = tl.minimum(place + count, num_blocks)
        end_of_table = (num_blocks + 1) * 3
        for first in range(found * 3, end_of_table, AT_ONCE):
            at = first + lane
            tl.store(blocks + at, tl.where(at == end_of_table - 2, found, 0), mask=at < end_of_table)


@triton.jit
def place_of_block(blocks, number, seq_len, BLOCK: tl.constexpr, PARTS: tl.constexpr = 1):
    """Of a block: the first row of its document, the document's length, and the block's first row in the document.

    A block that starts where its document ends, or after it, is none. Without a table the batch is dense. If those of
    the table are larger, they have PARTS blocks each.
    """
    if blocks is not None:
        entry = blocks + number // PARTS * 3
        start = tl.load(entry + 1)
        length = tl.load(entry + 2) - start
        row = tl.load(entry) - start + number % PARTS * BLOCK
    else:
        start = 0
        length = seq_len
        row = number * BLOCK
    return start, length, row


@triton.jit
def place_of_head(at_head, document, seq_len, HEADS: tl.constexpr, REPEAT: tl.constexpr):
    """Of a head of w, counted over the batch, in a document that begins at row `document`; all int64.

    Returns:
        Its number in a row of the batch; that of its keys and values; the document's first token in the batch, and the
        place of that token where each head has its tokens together.
    """
    head = at_head % HEADS
    token = (at_head // HEADS).to(tl.int64) * seq_len + document
    return head.to(tl.int64), (head // REPEAT).to(tl.int64), token, at_head.to(tl.int64) * seq_len + document
