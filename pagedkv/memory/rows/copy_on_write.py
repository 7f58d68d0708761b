"""Copy-on-write: which blocks are written to, where some have no block yet and others share theirs.

Nor does anybody write to a block that a prefix cache can find. Even its only owner writes to a copy, since other blocks
are found behind it; where no block is free for that, it makes the block and those behind it unfindable.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...commit import Write
from ..block_ids import NO_BLOCKS, joined
from ..pool import BlockPool
from .handles import Int64Array

UNUSED = -1
NO_COPIES = np.empty((0, 2), np.int64)


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
    shared = pool._refs[blocks] > 1
    copied = dropped = forgotten = NO_BLOCKS
    if np.count_nonzero(shared):
        owners = np.flatnonzero(shared & ~replaced)
        copied = owners[pool._gives_up(blocks[owners])]
        dropped = blocks[copied]
        replaced[copied] = True
    if pool._prefix_cache is not None and np.count_nonzero(pool._prefix_cache.is_findable(blocks)):
        owned = np.flatnonzero(pool._prefix_cache.is_findable(blocks) & ~replaced)
        if np.count_nonzero(replaced) + len(owned) <= pool.num_free:
            copied, dropped = joined(copied, owned), joined(dropped, blocks[owned])
            replaced[owned] = True
        else:
            forgotten = blocks[owned]
    new_blocks, writes = pool._plan(int(np.count_nonzero(replaced)), dropped=dropped, forgotten=forgotten)
    blocks[replaced] = new_blocks
    writes.append((table, entries[replaced], new_blocks.astype(np.int32)))
    return blocks, pairs(dropped, blocks[copied]), writes


def pairs(sources: Int64Array, destinations: Int64Array) -> Int64Array:
    """Copies, (n, 2) int64."""
    if not len(sources):
        return NO_COPIES
    return np.concatenate([sources, destinations]).reshape(2, -1).T.copy()
