"""Blocks of rows that wait for each other within one launch.

A lane is one triangular solve: its blocks are solved one after the other, each by a program of its own, and each needs
those before it. Programs draw tickets, which go through the blocks in order, some lanes at a time. So a program waits
only for programs with lower tickets, which run already: none waits for one that the device has no room for.

`progress` is int32, zero at the start: the tickets drawn, then for each lane how many blocks it has published.
"""

import triton
import triton.language as tl

_LONGEST_WAIT = tl.constexpr(1 << 24)  # readings of a counter, each about a microsecond


@triton.jit
def draw(progress, num_blocks, num_lanes, together):
    """What a program is to solve, where `together` lanes are worked on at a time.

    Returns:
        The block's number in its lane's order, the lane, and its counter of published blocks.
    """
    ticket = tl.atomic_add(progress, 1, sem="relaxed")
    first_lane = ticket // (num_blocks * together) * together
    lanes = tl.minimum(together, num_lanes - first_lane)
    ticket -= first_lane * num_blocks
    lane = first_lane + ticket % lanes
    return ticket // lanes, lane, progress + 1 + lane


@triton.jit
def wait(published, count, done):
    """Until a lane has published so many blocks: what they have stored can be read then.

    A program that waits for seconds stops the launch with an error: never a device that hangs.

    Args:
        published: the lane's counter.
        count: of blocks.
        done: how many are known to be published.

    Returns:
        How many are known to be published now.
    """
    readings = 0
    while done < count:
        done = tl.atomic_add(published, 0, sem="acquire")
        readings += 1
        if readings == _LONGEST_WAIT:
            tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [readings], tl.int32, is_pure=False, pack=1)
    return done


@triton.jit
def publish(published):
    """One more block of a lane: all that this program has stored before."""
    tl.debug_barrier()
    tl.atomic_add(published, 1, sem="release")
