"""FlexAttention (arXiv 2412.05496), whose blocks are found by arithmetic, without a mask of every pair of tokens.

Shapes: B batch, T tokens, H query heads, G key/value heads, D and D_v their sizes, N documents, M blocks.
"""

from collections.abc import Callable
from functools import cache
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.kernels.attention.mask import document_ids

__all__ = ["Blocks", "find_blocks", "flexible_attention"]

_SIZE = 128
_KINDS = 1024  # of calls in a process: more than there are


class Blocks(NamedTuple):
    """Which blocks of keys each block of rows sees, for all layers with the same window and documents.

    Each table is how many for each of M blocks, int32 [1, 1, M], and which, before the others, int32 [1, 1, M, M].

    Attributes:
        seq_len: T.
        partly: for rows, the blocks of keys that have visible and hidden pairs.
        wholly: for rows, those all of whose pairs are visible.
        partly_seen: for keys, the blocks of rows, as in `partly`.
        wholly_seen: likewise, as in `wholly`.
        documents: [T] of each token, or None.
        window: keys that a token sees, itself included; None for all.
    """

    seq_len: int
    partly: tuple[Tensor, Tensor]
    wholly: tuple[Tensor, Tensor]
    partly_seen: tuple[Tensor, Tensor]
    wholly_seen: tuple[Tensor, Tensor]
    documents: Tensor | None
    window: int | None


def find_blocks(seq_len: int, window: int | None, cu_seqlens: Tensor | None, device: torch.device) -> Blocks:
    """The blocks of a row of T tokens; one that nobody sees may be listed as seen in part, which costs time alone.

    Args:
        seq_len: T.
        window: see `Blocks`.
        cu_seqlens: [N + 1], or None.
        device: of the tables.
    """
    first = torch.arange(0, seq_len, _SIZE, device=device)
    last = first + _SIZE - 1
    rows, keys = first[:, None], first[None]
    some, all_pairs = keys <= rows, last[None] <= rows
    if window is not None:
        some = some & (rows - last[None] < window)
        all_pairs = all_pairs & (last[:, None] - keys < window)
    documents = None if cu_seqlens is None else document_ids(cu_seqlens, seq_len)
    if documents is not None:
        begins, ends = documents[first], documents[last.clamp(max=seq_len - 1)]
        some = some & (ends[None] >= begins[:, None])
        all_pairs = all_pairs & (begins[None] == ends[:, None])
    part = some & ~all_pairs
    seen = _listed(part.mT), _listed(all_pairs.mT)
    return Blocks(seq_len, _listed(part), _listed(all_pairs), *seen, documents, window)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many are chosen in each row, and which, as a table of `Blocks`."""
    order = chosen.int().sort(dim=-1, descending=True, stable=True).indices
    which = order.to(torch.int32, memory_format=torch.contiguous_format)  # the kernels take no other strides
    return chosen.sum(-1, dtype=torch.int32)[None, None], which[None, None]


def flexible_attention(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float) -> Tensor:
    """Causal attention, compiled: else FlexAttention would hold the weights of every pair of tokens.

    In eager calls too, once for each kind: dtype, sizes of heads, window or none, packed or not, one block or more.

    Args:
        q: [B, T, H, D].
        k: [B, T, G, D].
        v: [B, T, G, D_v].
        blocks: of `find_blocks`.
        scale: of the logits.

    Returns:
        [B, T, H, D_v].
    """
    if torch.compiler.is_compiling():
        return _attend(q, k, v, blocks, scale)
    with torch._dynamo.config.patch(recompile_limit=_KINDS, accumulated_recompile_limit=_KINDS):
        return _compiled()(q, k, v, blocks, scale)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_attend, fullgraph=True)


def _attend(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float) -> Tensor:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention  # loads half of the compiler

    documents = blocks.documents
    window = None if blocks.window is None else index(blocks.window)  # a constant: the lowering takes no symbols

    def sees(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        visible = key <= row
        if window is not None:
            visible = visible & (row - key < window)
        if documents is not None:
            visible = visible & (documents[row] == documents[key])
        return visible

    # Made here, not by the caller: a function of other documents would be compiled anew.
    mask = BlockMask(
        (blocks.seq_len, blocks.seq_len),
        *blocks.partly,
        *blocks.wholly,
        *blocks.partly_seen,
        *blocks.wholly_seen,
        BLOCK_SIZE=(_SIZE, _SIZE),
        mask_mod=sees,
    )
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o: Tensor = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)  # pyright: ignore[reportAssignmentType]
    return o.transpose(1, 2).to(v.dtype)  # autocast returns its own dtype
