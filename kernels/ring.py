"""Rings of past tokens: what decoding keeps where something looks back at single tokens.

Token p lives in slot p mod S: the newest S tokens are there, and none has to move when another comes.

Shapes: B batch, T new tokens, S slots of a ring.
"""

import torch
from torch import Tensor

__all__ = ["newest", "slot_positions", "write"]


def slot_positions(start: Tensor, num_slots: int) -> Tensor:
    """Position of the token that each slot holds, negative where it is still empty: the newest p < start that fits.

    Args:
        start: [B] int64, number of tokens seen.
        num_slots: S.

    Returns:
        [B, S] int64.
    """
    slots = torch.arange(num_slots, device=start.device)
    newest = start[:, None] - 1
    return newest - (newest - slots) % num_slots


def newest(ring: Tensor, start: Tensor, count: int) -> Tensor:
    """The last tokens, oldest first; what was never written is as the ring began.

    Args:
        ring: [B, S, C].
        start: [B] int64, number of tokens seen.
        count: of tokens, at most S.

    Returns:
        [B, count, C].
    """
    slots = (start[:, None] + torch.arange(-count, 0, device=start.device)) % ring.shape[1]
    return ring.gather(1, slots[..., None].expand(-1, -1, ring.shape[2]))


def write(ring: Tensor, new: Tensor, start: Tensor, lengths: Tensor | None = None) -> None:
    """Put T more tokens into a ring, in place; where more come than there are slots, the last ones stay.

    A single token goes to its slot. Of several, each slot looks up the newest that belongs in it: one graph for every
    T.

    Args:
        ring: [B, S, ...].
        new: [B, T, ...].
        start: [B] int64, number of tokens seen before.
        lengths: [B] int64, how many of the T are there, the first ones; None for all.
    """
    new = new.to(ring.dtype)
    alone = [1] * (ring.ndim - 2)
    if new.shape[1] == 1:
        rows, slots = torch.arange(len(ring), device=ring.device), start % ring.shape[1]
        token = new[:, 0]
        if lengths is not None:
            token = torch.where((lengths > 0).view(-1, *alone), token, ring[rows, slots])
        ring[rows, slots] = token
        return
    length = new.shape[1] if lengths is None else lengths
    source = slot_positions(start + length, ring.shape[1]) - start[:, None]
    index = source.clamp(0, new.shape[1] - 1).view(*source.shape, *alone).expand(-1, -1, *new.shape[2:])
    ring.copy_(torch.where((source >= 0).view(*source.shape, *alone), new.gather(1, index), ring))
