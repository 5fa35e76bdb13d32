"""Turns: blocks of READERS * 64 rows, or keys, of a head, which programs take as long as there are any.

There are at most as many programs as multiprocessors. One warp of each draws turns and loads what they need, ahead of
those that read it: some groups of four warps, each with 64 of the rows. So blocks that all need come from memory
once, and the next turn's are on their way while the last one's results are written.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from zoo.kernels.attention.hopper.tiles import TILE, WARPS, free, make_barriers, wait_until_filled, wait_until_free
from zoo.kernels.triton.documents import place_of_block

__all__ = [
    "LOADER_REGISTERS",
    "NO_TURN",
    "READERS",
    "READER_REGISTERS",
    "ROWS",
    "announce",
    "count_blocks",
    "draw",
    "make_turns",
    "pass_over",
    "place_of_turn",
    "take",
]

READERS = gl.constexpr(2)
ROWS = gl.constexpr(READERS.value * TILE.value)  # of a turn
READER_REGISTERS = gl.constexpr(240)
LOADER_REGISTERS = gl.constexpr(24)
NO_TURN = gl.constexpr(-1)  # which readers are told when none is left
_AHEAD = gl.constexpr(2)  # turns that readers are told of


@gluon.jit
def make_turns():
    """Where readers are told of turns."""
    told = gl.allocate_shared_memory(gl.int32, [_AHEAD, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    return told, make_barriers(_AHEAD), make_barriers(_AHEAD, READERS)


@gluon.jit
def count_blocks(blocks, num_blocks):
    """How many blocks a row of the batch has; a table may have room for more."""
    if blocks is not None:
        num_blocks = gl.load(blocks + num_blocks * 3 + 1)
    return num_blocks


@gluon.jit
def draw(counter):
    """A turn that no other program takes; the first of each program is its own number."""
    return gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def announce(turns, n, turn):
    """Tell the readers the n-th turn of this program."""
    told, filled, emptied = turns
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    wait_until_free(emptied, n)
    told.index(n % _AHEAD).store(gl.full([1], turn, gl.int32, layout=layout))
    mbarrier.arrive(filled.index(n % _AHEAD), count=1)


@gluon.jit
def take(turns, n):
    """The n-th turn of this program, once it is told."""
    told, filled, emptied = turns
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    wait_until_filled(filled, n)
    turn = gl.max(told.index(n % _AHEAD).load(layout), 0)
    free(emptied, n)
    return turn


@gluon.jit
def place_of_turn(turn, call, LAST_FIRST: gl.constexpr):
    """Of a turn: the head, counted over the batch; the number of the block, and its place as in `place_of_block`."""
    blocks, seq_len, count, _ = call
    number = turn % count
    if LAST_FIRST:
        number = count - 1 - number
    document, length, row = place_of_block(blocks, number, seq_len, ROWS)
    return turn // count, number, document, length, row


@gluon.jit
def pass_over(filled, emptied, begin, end):
    """Let go of blocks of two rings that only other readers need, once they are there."""
    for n in range(begin, end):
        for ring in gl.static_range(2):
            wait_until_filled(filled[ring], n)
        for ring in gl.static_range(len(emptied)):
            free(emptied[ring], n)
