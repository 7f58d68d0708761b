"""The device side of check=True: kernels record the first bad entry they meet, and the host raises it.

The report buffer is int64[5] = (state, what, sequence, column, value); state is 0 until a thread claims the buffer.
"""

from __future__ import annotations

from .intrinsics.thread import address, compare_and_swap
from .language import cuda, int64
from .source import device_function

NUM_BYTES = 40
BLOCK_ID, SEQ_LEN, SLOT, PAIR, QUERY_START, POSITION = 1, 2, 3, 4, 5, 6


@device_function
def record(report, what, sequence, column, value):
    """Store a bad entry in the report buffer, unless there is one already.

    Parameters
    ----------
    report : pointer to int64
    what : int
        BLOCK_ID, SEQ_LEN, SLOT, PAIR (a block id of pairs), QUERY_START or POSITION.
    sequence, column : int
        Where the entry is; column is 0 in a one-dimensional array, but sequence is -1 for
        the block ids of one sequence.
    value : int
        The entry.
    """
    if compare_and_swap(address(report), 0, 1) == 0:
        report[1] = int64(what)
        report[2] = int64(sequence)
        report[3] = int64(column)
        report[4] = int64(value)
        cuda.threadfence()
