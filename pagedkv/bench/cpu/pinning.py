"""The same cores and as many threads for all contestants."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ...cpu.threads import get_num_threads, set_num_threads


@contextmanager
def pinned(num_threads: int) -> Iterator[None]:
    """Let this thread, and those that it starts, run on that many cores, and pagedkv use as many threads.

    What a contestant starts of its own inherits the cores; see peers.py for the number of its threads.
    """
    before, cores = get_num_threads(), None
    if hasattr(os, "sched_setaffinity"):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(cores)[:num_threads])
    set_num_threads(num_threads)
    try:
        yield
    finally:
        set_num_threads(before)
        if cores is not None:
            os.sched_setaffinity(0, cores)
