"""Ring caches of past tokens: what decoding keeps where a mixer looks back at single tokens.

Shapes: B batch, T new tokens, S slots of the cache.
"""

import torch
from torch import Tensor

__all__ = ["append", "slot_positions", "write_ring"]


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


def write_ring(cache: Tensor, new: Tensor, start: Tensor) -> Tensor:
    """A ring cache after T more tokens; where more tokens come than there are slots, the last ones stay.

    Each slot looks up the newest token that belongs in it, so one graph serves every T.

    Args:
        cache: [B, S, G, d_h].
        new: [B, T, G, d_h].
        start: [B] int64, number of tokens seen before.

    Returns:
        [B, S, G, d_h].
    """
    length = new.shape[1]
    source = slot_positions(start + length, cache.shape[1]) - start[:, None]
    index = source.clamp(0, length - 1)[:, :, None, None].expand(-1, -1, *new.shape[2:])
    return torch.where((source >= 0)[:, :, None, None], new.gather(1, index).to(cache.dtype), cache)


def append(cache: Tensor, new: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Cached and new tokens side by side, for the new ones to look at, and the cache with the new ones written into it.

    Args:
        cache: [B, S, G, d_h].
        new: [B, T, G, d_h].
        start: [B] int64, number of tokens seen before.

    Returns:
        [B, S + T, G, d_h] in the dtype of the new tokens, and [B, S, G, d_h] in that of the cache.
    """
    return torch.cat([cache.to(new.dtype), new], 1), write_ring(cache, new, start)
