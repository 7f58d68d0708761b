"""BlockPool: which blocks of the cache are free, and how many references each of the others has."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Array
from ..commit import Write, commit
from ..errors import OutOfBlocksError
from .checks import MAX_INT32, as_int, as_ints, require
from .guard import Guard, Guarded, consistent, exclusive
from .tally import Tally

_ONE_REFERENCE = np.ones(1, np.int32)


class BlockPool(Guarded):
    """The physical blocks of a KV cache, by number: a stack of the free ones and a reference count for each.

    Blocks are handed out from the top of the stack, so the ones used last are used again first, and a released
    list comes back in the same order. A fresh pool hands out 0, 1, 2, ...

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
    """

    def __init__(self, num_blocks: int) -> None:
        num_blocks = as_int("num_blocks", num_blocks, minimum=1, maximum=MAX_INT32)
        self._free = np.arange(num_blocks, dtype=np.int32)[::-1].copy()
        self._num_free = np.array([num_blocks])
        self._refs = np.zeros(num_blocks, np.int32)
        self._tally = Tally(num_blocks)
        self._guard = Guard()

    @property
    def num_blocks(self) -> int:
        """N, the blocks in the pool."""
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out."""
        return int(self._num_free[0])

    @property
    def ref_counts(self) -> npt.NDArray[np.int32]:
        """References to each block, (N,) int32: a read-only view that follows the pool.

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
        blocks, writes = self._plan_allocate(as_int("n", n))
        commit(writes)
        return blocks

    @exclusive
    def retain(self, blocks: Any) -> None:
        """Add a reference to each block.

        Parameters
        ----------
        blocks : (n,) int32 or int64, or a list or tuple of ints
            Blocks in use; one that is named twice gets two references.

        Raises
        ------
        KeyError
            A block that has no reference, or no such block.
        OverflowError
            A block would have more than 2**31 - 1 references.
        TypeError, ValueError
            `blocks` is not a one-dimensional array of int32 or int64.
        """
        commit(self._plan_retain(self._known(blocks)))

    @exclusive
    def release(self, blocks: Any) -> None:
        """Drop a reference to each block; blocks without any left are free.

        Parameters
        ----------
        blocks : (n,) int32 or int64, or a list or tuple of ints
            Blocks in use; one that is named twice loses two references.

        Raises
        ------
        KeyError
            A block that is named more often than it has references, or no such block.
        TypeError, ValueError
            `blocks` is not a one-dimensional array of int32 or int64.
        """
        commit(self._plan_release(self._known(blocks)))

    @consistent
    def check(self) -> None:
        """Raise AssertionError unless every invariant holds: each block is either free once or has references."""
        require(0 <= self.num_free <= self.num_blocks, f"{self.num_free} of {self.num_blocks} blocks are free")
        free = self._free[: self.num_free]
        require(((free >= 0) & (free < self.num_blocks)).all(), "a free block does not exist")
        require(len(np.unique(free)) == len(free), "a block is free twice")
        require((self._refs >= 0).all(), "a reference count is negative")
        require(not self._refs[free].any(), "a free block has references")
        used = np.count_nonzero(self._refs)
        require(used + self.num_free == self.num_blocks, "a block that has no references is not free")

    def _known(self, blocks: Any) -> Array:
        ids = as_ints("blocks", blocks)
        wrong = (ids < 0) | (ids >= self.num_blocks)
        if wrong.any():
            raise KeyError(f"no block {ids[wrong][0]} in a pool of {self.num_blocks}")
        return ids

    def _plan_allocate(self, n: int) -> tuple[npt.NDArray[np.int32], list[Write]]:
        num_free = self.num_free
        if n > num_free:
            raise OutOfBlocksError(f"{n} blocks asked for, {num_free} of {self.num_blocks} are free")
        blocks = self._free[num_free - n : num_free][::-1].copy()
        return blocks, [
            (self._num_free, 0, num_free - n),
            (self._refs, blocks.astype(np.int64), _ONE_REFERENCE.repeat(n)),
        ]

    def _plan_retain(self, blocks: Array, times: int = 1) -> list[Write]:
        dead = self._refs[blocks] < 1
        if dead.any():
            raise KeyError(f"block {blocks[dead][0]} has no reference")
        last, counts = self._tally(blocks)
        refs = self._refs[blocks] + times * counts[last]
        too_many = refs > MAX_INT32
        if np.count_nonzero(too_many):
            raise OverflowError(
                f"block {blocks[too_many][0]} would have {refs[too_many][0]} references, at most 2**31 - 1 are counted"
            )
        return [(self._refs, blocks, refs.astype(np.int32))]

    def _plan_release(self, blocks: Array) -> list[Write]:
        last, counts = self._tally(blocks)
        left = self._refs[blocks] - counts[last]
        if (left < 0).any():
            block = blocks[left < 0][0]
            raise KeyError(
                f"block {block} released {counts[last][left < 0][0]} times, it has {self._refs[block]} references"
            )
        # Reversed, so that the next allocation hands them out in the order given.
        freed = blocks[(left == 0) & (counts > 0)][::-1]
        num_free = self.num_free
        top = num_free + len(freed)
        return [
            (self._refs, blocks, left.astype(np.int32)),
            (self._free, np.arange(num_free, top), freed.astype(np.int32)),
            (self._num_free, 0, top),
        ]

    def _plan_unshare(self, blocks: Array) -> tuple[Array, list[Write]]:
        """Which owners must copy their block before they write to it: owner i holds blocks[i].

        Every owner copies, except the last if no other sequence holds the block. The writes drop the references of the
        owners that copy.
        """
        last, counts = self._tally(blocks)
        sharers = counts[last]
        nobody_else = sharers == self._refs[blocks]
        gives_up = ~(nobody_else & (last == np.arange(len(blocks))))
        left = self._refs[blocks] - sharers + nobody_else
        return gives_up, [(self._refs, blocks, left.astype(np.int32))]
