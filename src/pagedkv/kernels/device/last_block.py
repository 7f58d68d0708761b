"""The end of a launch that splits its work: the last thread block of several to get there merges what all have left.

Every thread block of a column of the grid counts, once and whether it had work or not: what a counter reaches depends
on the grid alone. So it is 0 again after every launch and every replay of a CUDA graph, whatever lengths were given,
and even if they change while the kernel runs.
"""

from __future__ import annotations

from numba import cuda, int64, uint32

from .intrinsics.warp import count_up, fence, load_shared_word, store_shared_word
from .source import device_function


@device_function
def publish(thread):
    """Make what the block has stored visible to the block that counts last; every thread calls it.

    All of the block's stores are before the barrier, and those of other blocks before their fences: what thread 0 will
    see in the counter holds for the whole block after the next barrier.
    """
    cuda.syncthreads()
    if thread == 0:
        fence()


@device_function
def is_last(thread, counters, most_splits, num_splits, told):
    """Count, and say whether this block is to merge `num_splits` results; every thread calls it.

    There is a counter for each column of the grid, which is `most_splits` blocks high, from the address `counters` on;
    told is the shared address of a word.
    """
    if most_splits == 1:
        return False
    counter, last = counters + int64(cuda.blockIdx.x) * 4, uint32(most_splits - 1)
    if num_splits <= 1:  # nothing waits to be merged
        if thread == 0:
            count_up(counter, last)
        return False
    if thread == 0:
        count = count_up(counter, last)
        store_shared_word(told, count)
        if count == last:
            fence()
    cuda.syncthreads()
    return load_shared_word(told) == last
