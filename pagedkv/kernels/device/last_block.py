"""The end of work that is split: the thread block that counts the last split merges the results of all.

Every split of a column is counted once, with or without work, so the number that a counter reaches depends on the
launch alone. It is 0 again after every launch and every replay of a CUDA graph, whatever the lengths are, and even if
they change while the kernel runs.
"""

from __future__ import annotations

from .intrinsics.warp import count_up, count_up_and_acquire, fence, load_shared_word, store_shared_word
from .language import cuda, uint32
from .source import device_function


@device_function
def publish(thread):
    """Make the stores of a thread block visible to the one that counts last; every thread calls it.

    One fence is enough: the barrier puts the stores of all threads before the fence of thread 0, which then counts.
    """
    cuda.syncthreads()
    if thread == 0:
        fence()


@device_function
def is_last(thread, counter, most_splits, num_splits, count_word):
    """Count a split, and return whether this thread block merges `num_splits` results; every thread calls it.

    `counter` is the address of the column's counter, which counts `most_splits`; `count_word` is the shared address of
    a word. Thread 0 acquires what other blocks have published, and the barrier makes it visible to all threads.
    """
    if most_splits == 1:
        return False
    last = uint32(most_splits - 1)
    if num_splits <= 1:  # nothing waits to be merged
        if thread == 0:
            count_up(counter, last)
        return False
    if thread == 0:
        store_shared_word(count_word, count_up_and_acquire(counter, last))
    cuda.syncthreads()
    return load_shared_word(count_word) == last
