"""BlockPool: which blocks of the cache are free, and how many references each of the others has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Array
from ..commit import Write, commit
from ..errors import OutOfBlocksError
from .arguments import MAX_INT32, as_int, as_ints
from .guard import Guard, Guarded, consistent, exclusive
from .ids import NO_BLOCKS, Int64Array, Tally, joined, must_hold
from .prefix.cache import PrefixCache, StoredBlocks
from .prefix.eviction import LRU

_ONE_REFERENCE = np.ones(1, np.int32)


class BlockPool(Guarded):
    """The physical blocks of a KV cache, by number: a stack of the free ones and a reference count for each.

    Blocks are handed out from the top of the stack, so the ones used last are used again first, and a released
    list comes back in the same order. A fresh pool hands out 0, 1, 2, ... What a prefix cache can find is handed out
    only when nothing else is left.

    Every method changes all or nothing. Mutations exclude each other: a call from a second thread in the middle of
    one raises RuntimeError. The properties may be read at any time. A pool cannot be copied or pickled: TypeError.

    Parameters
    ----------
    num_blocks : int
        N, the blocks in the pool, from 1 to 2**31 - 1.

    Raises
    ------
    TypeError, ValueError
        `num_blocks` is not an int, or out of range.

    Examples
    --------
    >>> from pagedkv import BlockPool
    >>> pool = BlockPool(num_blocks=4)
    >>> blocks = pool.allocate(3)
    >>> blocks
    array([0, 1, 2], dtype=int32)
    >>> pool.retain(blocks[:1])
    >>> pool.release(blocks)
    >>> pool.ref_counts
    array([1, 0, 0, 0], dtype=int32)
    >>> pool.num_free
    3
    >>> pool.check()
    """

    def __init__(self, num_blocks: int) -> None:
        num_blocks = as_int("num_blocks", num_blocks, minimum=1, maximum=MAX_INT32)
        self._free = np.arange(num_blocks, dtype=np.int32)[::-1].copy()
        self._num_free = np.array([num_blocks])
        self._refs = np.zeros(num_blocks, np.int32)
        self._num_cached, self._num_shared = np.array([0]), np.array([0])
        self._tally = Tally(num_blocks)
        self._num_changes = [0]
        self._prefix_cache: PrefixCache | None = None
        self._guard = Guard()

    def __repr__(self) -> str:
        return f"BlockPool(num_blocks={self.num_blocks}; {self.num_free} free, {self.num_cached} of them cached)"

    @property
    def num_blocks(self) -> int:
        """N, the blocks in the pool."""
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, the cached ones included."""
        return self._num_blank + self.num_cached

    @property
    def num_cached(self) -> int:
        """Blocks without references whose contents a prefix cache still finds; they are handed out last."""
        return int(self._num_cached[0])

    @property
    def num_shared(self) -> int:
        """Blocks with more than one reference."""
        return int(self._num_shared[0])

    @property
    def _num_blank(self) -> int:
        return int(self._num_free[0])

    @property
    def ref_counts(self) -> npt.NDArray[np.int32]:
        """References to each block, (N,) int32, as a read-only view that follows the pool.

        While another thread's call stores, some of it may be new and some of it old.
        """
        view = self._refs.view()
        view.flags.writeable = False
        return view

    @exclusive
    def allocate(self, n: int) -> npt.NDArray[np.int32]:
        """Take n free blocks, with one reference each.

        Parameters
        ----------
        n : int
            How many blocks, at least 0.

        Returns
        -------
        (n,) int32
            Their ids.

        Raises
        ------
        OutOfBlocksError
            Fewer than n blocks are free.
        TypeError, ValueError
            n is not an int, or negative.
        """
        blocks, writes = self._plan(as_int("n", n))
        ids = blocks.astype(np.int32)
        self._commit(writes)
        return ids

    @exclusive
    def retain(self, blocks: Any) -> None:
        """Add a reference to each block.

        Parameters
        ----------
        blocks : (n,) ints
            Blocks in use; one that is named twice gets two references.

        Raises
        ------
        KeyError
            A block that has no reference, or no such block.
        OverflowError
            A block would have more than 2**31 - 1 references.
        TypeError, ValueError
            `blocks` is not a one-dimensional array, list or tuple of ints.
        """
        gained = self._valid_ids(blocks)
        dead = self._refs[gained] < 1
        if dead.any():
            raise KeyError(f"block {gained[dead][0]} has no reference")
        self._commit(self._plan(gained=gained)[1])

    @exclusive
    def release(self, blocks: Any) -> None:
        """Drop a reference to each block; blocks without any left are free, or cached if they can be found.

        Parameters
        ----------
        blocks : (n,) ints
            Blocks in use; one that is named twice loses two references.

        Raises
        ------
        KeyError
            A block that is named more often than it has references, or no such block.
        TypeError, ValueError
            `blocks` is not a one-dimensional array, list or tuple of ints.
        """
        self._commit(self._plan(dropped=self._valid_ids(blocks))[1])

    @consistent
    def check(self) -> None:
        """Raise AssertionError unless every invariant holds: each block is either free once or has references."""
        must_hold(0 <= self._num_blank <= self.num_blocks, f"{self._num_blank} of {self.num_blocks} blocks are free")
        free = self._free[: self._num_blank]
        must_hold(((free >= 0) & (free < self.num_blocks)).all(), "a free block does not exist")
        must_hold(len(np.unique(free)) == len(free), "a block is free twice")
        must_hold((self._refs >= 0).all(), "a reference count is negative")
        must_hold(not self._refs[free].any(), "a free block has references")
        used = np.count_nonzero(self._refs)
        must_hold(used + self.num_free == self.num_blocks, "a block that has no references is not free")
        must_hold(np.count_nonzero(self._refs > 1) == self.num_shared, "shared blocks are counted wrongly")
        if self._prefix_cache is not None:
            cached = (self._refs == 0) & self._prefix_cache.is_findable(np.arange(self.num_blocks))
            must_hold(np.count_nonzero(cached) == self.num_cached, "cached blocks are counted wrongly")
            must_hold(not cached[free].any(), "a free block can be found")
            self._prefix_cache.check(self._refs)

    def _valid_ids(self, blocks: Any) -> Array:
        ids = as_ints("blocks", blocks)
        wrong = (ids < 0) | (ids >= self.num_blocks)
        if wrong.any():
            raise KeyError(f"no block {ids[wrong][0]} in a pool of {self.num_blocks}")
        return ids

    def _plan(
        self,
        num_new: int = 0,
        *,
        dropped: Array = NO_BLOCKS,
        gained: Array = NO_BLOCKS,
        forgotten: Array = NO_BLOCKS,
        stored: StoredBlocks | None = None,
        passed: bool = False,
        times: int = 1,
        num_seqs: int = 0,
    ) -> tuple[Int64Array, list[Write]]:
        """Plan all that one call does to the pool at once, since a second plan would not see the writes of the first.

        Parameters
        ----------
        num_new : int
            Blocks to hand out.
        dropped, gained : (n,) int64
            Blocks that lose, or get, a reference each time they are named. A findable block may get its first one.
        forgotten : (n,) int64
            Blocks that can no longer be found, each named once.
        stored : StoredBlocks or None
            Blocks that can be found from now on; those that make room for them are forgotten, too.
        passed : bool
            Whether a window has passed the blocks of `dropped`, so that they are evicted first.
        times : int
            References that a block of `gained` gets.
        num_seqs : int
            `dropped`, or `gained`, names the blocks of this many distinct sequences, and no others; 0 if unknown.

        Returns
        -------
        new_blocks : (num_new,) int64
        writes : list
        """
        num_free, num_cached, cache = self._num_blank, self.num_cached, self._prefix_cache
        if not (len(dropped) or len(gained) or len(forgotten)):
            # Most calls of a step.
            if stored is None and not num_new:
                return NO_BLOCKS, []
            if stored is None and num_new <= num_free:
                new_blocks = self._free[num_free - num_new : num_free][::-1].astype(np.int64)
                refs = self._refs, new_blocks, _ONE_REFERENCE.repeat(num_new)
                return new_blocks, [refs, (self._num_free, 0, num_free - num_new)]
            if cache is not None and stored is not None and not (num_new or len(stored.forgotten)):
                return NO_BLOCKS, cache.plan(NO_BLOCKS, stored)
        writes: list[Write] = []
        freed = leaving = NO_BLOCKS
        if len(dropped) or len(gained):
            freed, leaving, writes = self._plan_references(dropped, gained, times, num_seqs)
        self._require(num_new, num_free + num_cached - len(leaving))
        num_blank = min(num_new, num_free)
        rest = num_free - num_blank
        new_blocks = self._free[rest:num_free][::-1].astype(np.int64) if num_blank else NO_BLOCKS
        if cache is not None:
            if stored is not None:
                forgotten = joined(forgotten, stored.forgotten)
            if len(forgotten):
                forgotten = joined(forgotten, cache.descendants(forgotten))
            blank = forgotten[self._refs[forgotten] == 0] if len(forgotten) else NO_BLOCKS
            if len(blank) and len(leaving):
                blank = blank[~self._tally.among(blank, leaving)]
            if len(leaving) or len(blank) or num_blank < num_new:
                used_again = joined(leaving, blank)
                num_evicted = max(0, num_new - num_blank - len(blank))
                if type(cache.eviction) is LRU:
                    evicted, left = cache.plan_leave(used_again, num_evicted)
                    behind = cache.lost_with(evicted) if len(evicted) else NO_BLOCKS
                else:  # it may write to its argument, and its writes may change what it returns
                    chosen, left = cache.eviction.plan_leave(used_again.copy(), num_evicted)
                    evicted = np.array(chosen, np.int64)
                    self._require_evictable(evicted, num_evicted, used_again, cache)
                    behind = cache.descendants(joined(forgotten, evicted))
                if len(behind):
                    unused = behind[self._refs[behind] == 0]
                    blank, forgotten = joined(blank, unused), joined(forgotten, behind)
                    _, left = cache.plan_leave(np.concatenate([used_again, evicted, unused]), 0)
                forgotten = joined(forgotten, evicted)
                writes += left
                num_cached -= len(leaving) + len(blank) + len(evicted)
                blank = joined(evicted, blank)
                new_blocks, blank = joined(new_blocks, blank[: num_new - num_blank]), blank[num_new - num_blank :]
            if len(forgotten) or stored is not None:
                writes += cache.plan(forgotten, stored)
            if len(freed):
                kept = cache.is_findable(freed)
                if len(forgotten):
                    kept &= ~self._tally.among(freed, forgotten)
                if np.count_nonzero(kept):
                    writes += cache.plan_enter(freed[kept], passed)
                    num_cached += int(np.count_nonzero(kept))
                freed = freed[~kept]
            if len(blank):
                freed = joined(freed, blank)
            writes.append((self._num_cached, 0, num_cached))
        if num_new:
            writes.append((self._refs, new_blocks, _ONE_REFERENCE.repeat(num_new)))
        top = rest + len(freed)
        if len(freed):
            # Reversed, so that the next allocation hands them out in the order given.
            writes.append((self._free, np.arange(rest, top), freed[::-1].astype(np.int32)))
        return new_blocks, [*writes, (self._num_free, 0, top)]

    def _plan_references(
        self, dropped: Array, gained: Array, times: int, num_seqs: int
    ) -> tuple[Array, Array, list[Write]]:
        """The blocks that lose their last reference, those that get their first one, and what to store."""
        blocks = joined(dropped, gained)
        before = self._refs.take(blocks)
        changes: Any = times if len(gained) else -1
        # Distinct sequences share no block whose count is 1, unless somebody released one of theirs: then it would be
        # freed here twice, and later handed out twice. So look for repeats among the dropped ones.
        if num_seqs != 1 and (not num_seqs or before.max() > 1 or self._tally.repeated(dropped).any()):
            # Add up a block's changes at its last place: a store with repeated indices keeps the last value.
            last = self._tally.last_places(blocks)
            signs = np.full(len(blocks), float(times))
            signs[: len(dropped)] = -1
            changes = np.bincount(last, signs, len(blocks)).astype(np.int64)
        if len(gained) and np.count_nonzero(too_many := before > MAX_INT32 - changes):
            raise OverflowError(f"block {blocks[too_many][0]} would have more than 2**31 - 1 references")
        refs = (before + changes).astype(np.int32, copy=False)
        if len(dropped) and np.count_nonzero(refs < 0):
            block = blocks[refs < 0][0]
            raise KeyError(
                f"block {block} released {self._refs[block] - refs[refs < 0][0]} times, it has {self._refs[block]} "
                f"references"
            )
        num_shared = int(self._num_shared[0]) + np.count_nonzero(refs > 1) - np.count_nonzero(before > 1)
        return (
            blocks[(refs == 0) & (before > 0)] if len(dropped) else NO_BLOCKS,
            blocks[(refs > 0) & (before == 0)] if len(gained) else NO_BLOCKS,
            [(self._refs, blocks, refs), (self._num_shared, 0, int(num_shared))],
        )

    def _require(self, num_new: int, num_free: int) -> None:
        if num_new > num_free:
            message = f"{num_new} blocks asked for, {num_free} of {self.num_blocks} are free"
            raise OutOfBlocksError(message, requested=num_new, free=num_free)

    def _require_evictable(self, evicted: Int64Array, count: int, used_again: Int64Array, cache: PrefixCache) -> None:
        """Raise ValueError unless the caller's eviction chose the right number of blocks, all of them waiting."""
        if len(evicted) != count:
            raise ValueError(f"eviction must choose {count} blocks to evict, got {len(evicted)}")
        waits = (self._refs[evicted] == 0) & cache.is_findable(evicted)
        waits &= ~self._tally.repeated(joined(evicted, used_again))[:count]
        if not waits.all():
            raise ValueError(
                f"eviction must choose blocks that wait for it, each once, got {evicted[~waits][0]}, which is used "
                "again or chosen twice, or which plan_enter never got"
            )

    def _commit(self, writes: list[Write], undo: Callable[[], list[Write]] | None = None) -> None:
        """Store, and emit events; if a listener raises, undo the call, since its caller will not get the result."""
        outbox = None if self._prefix_cache is None else self._prefix_cache.outbox
        if outbox is not None:
            outbox.emit()  # events that an interrupt left over; if this raises, nothing has changed
        if writes:
            commit([*writes, (self._num_changes, 0, self._num_changes[0] + 1)])
        if outbox is not None:
            try:
                outbox.emit()
            except Exception:  # an interrupt is no Exception: it undoes nothing
                if undo is not None:
                    commit([*undo(), (self._num_changes, 0, self._num_changes[0] + 1)])
                raise

    def _must_copy(self, blocks: Array) -> npt.NDArray[np.bool]:
        """Which owners must copy their block before they write to it; owner i holds blocks[i].

        Every owner copies, except the last one if no other sequence holds the block.
        """
        last, counts = self._tally(blocks)
        nobody_else = counts[last] == self._refs[blocks]
        return np.asarray(~(nobody_else & (last == np.arange(len(blocks)))))
