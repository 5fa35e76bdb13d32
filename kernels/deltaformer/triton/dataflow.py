"""Blocks of rows that wait for each other within one launch.

A lane is a head and a slice of its values, over all documents of a row. The blocks of a document are solved one after
the other, each by a program of its own, and each needs those before it. Programs draw tickets, which go through the
blocks in order, some lanes at a time. So a program waits only for programs with lower tickets, which run already: none
waits for one that the device has no room for.

`progress` is int32, zero at the start: the tickets drawn, then for each lane and document how many blocks it has
published; a document's place among the counters is the number of its first block.
"""

import triton
import triton.language as tl

_LONGEST_WAIT = tl.constexpr(1 << 24)  # readings of a counter, each about a microsecond


@triton.jit
def draw(progress, num_blocks, num_lanes, together):
    """What a program is to solve, where `together` lanes are worked on at a time.

    Returns:
        The block's number in the order of its lane, and the lane.
    """
    ticket = tl.atomic_add(progress, 1, sem="relaxed")
    first_lane = ticket // (num_blocks * together) * together
    lanes = tl.minimum(together, num_lanes - first_lane)
    ticket -= first_lane * num_blocks
    return ticket // lanes, first_lane + ticket % lanes


@triton.jit
def wait(published, count, done):
    """Until so many blocks of a document are published: what they have stored can be read then.

    A program that waits for seconds stops the launch with an error: never a device that hangs.

    Args:
        published: their counter.
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
    """One more block: all that this program has stored before."""
    tl.debug_barrier()
    tl.atomic_add(published, 1, sem="release")
