"""Ring caches of past tokens: what decoding keeps where a mixer looks back at single tokens.

Shapes: B batch, T new tokens, S slots of the cache.
"""

import torch
from torch import Tensor

__all__ = ["slot_positions", "write"]


def slot_positions(start: Tensor, num_slots: int) -> Tensor:
    """Position of the token that each slot of a ring cache holds, negative where it is still empty.

    Token p lives in slot p mod S, so slot s holds the newest p < start with p mod S = s.

    Args:
        start: [B] int64, number of tokens seen.
        num_slots: S.

    Returns:
        [B, S] int64.
    """
    slots = torch.arange(num_slots, device=start.device)
    newest = start[:, None] - 1
    return newest - (newest - slots) % num_slots


def write(cache: Tensor, new: Tensor, start: Tensor, lengths: Tensor | None = None) -> None:
    """Put T more tokens into a ring cache, in place; where more come than there are slots, the last ones stay.

    A single token goes to its slot. Of several, each slot looks up the newest that belongs in it: one graph for every
    T.

    Args:
        cache: [B, S, G, d_h].
        new: [B, T, G, d_h].
        start: [B] int64, number of tokens seen before.
        lengths: [B] int64, how many of the T are there, the first ones; None for all.
    """
    new = new.to(cache.dtype)
    if new.shape[1] == 1:
        rows, slots = torch.arange(len(cache), device=cache.device), start % cache.shape[1]
        token = new[:, 0]
        if lengths is not None:
            token = torch.where((lengths > 0)[:, None, None], token, cache[rows, slots])
        cache[rows, slots] = token
        return
    length = new.shape[1] if lengths is None else lengths
    source = slot_positions(start + length, cache.shape[1]) - start[:, None]
    index = source.clamp(0, new.shape[1] - 1)[:, :, None, None].expand(-1, -1, *new.shape[2:])
    cache.copy_(torch.where((source >= 0)[:, :, None, None], new.gather(1, index), cache))
