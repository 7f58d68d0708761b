"""Copy-on-write: which blocks are written to, where some have no block yet and others share theirs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..commit import Write
from .handles import Int64Array
from .pool import BlockPool

UNUSED = -1


def plan_writable(
    pool: BlockPool, table: npt.NDArray[np.int32], entries: Int64Array
) -> tuple[Int64Array, Int64Array, list[Write]]:
    """The blocks to write to for some entries of a table: a new one for an empty entry, a copy of a shared one.

    Parameters
    ----------
    pool : BlockPool
    table : (num_entries_in_all,) int32
        Blocks, or UNUSED.
    entries : (num_entries,) int64
        Indices of the table, all different.

    Returns
    -------
    blocks : (num_entries,) int64
        The blocks to write to.
    copies : (m, 2) int64
        Source and destination of the copies to do first.
    writes : list
        What to store.
    """
    blocks = table[entries].astype(np.int64)
    replaced = blocks == UNUSED
    shared = (pool._refs[blocks] > 1) & ~replaced
    copied = sources = np.empty(0, np.int64)
    writes: list[Write] = []
    if np.count_nonzero(shared):
        owners = np.flatnonzero(shared)
        gives_up, writes = pool._plan_unshare(blocks[owners])
        copied = owners[gives_up]
        sources = blocks[copied]
        replaced[copied] = True
    new_blocks, allocated = pool._plan_allocate(int(np.count_nonzero(replaced)))
    blocks[replaced] = new_blocks
    copies = np.empty((len(copied), 2), np.int64)
    copies[:, 0], copies[:, 1] = sources, blocks[copied]
    return blocks, copies, [*writes, *allocated, (table, entries[replaced], new_blocks)]
