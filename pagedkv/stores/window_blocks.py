"""WindowBlocks: the wire blocks of a text in all layers but those whose blocks come first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ..arrays import to_host
from .blocks import CacheBlocks

Came = dict[bytes, list[npt.NDArray[np.uint8]] | None]
"""By its digest, a wire block that a store has, all KV heads of it, or None if it does not have all."""


class WindowBlocks:
    """Which wire blocks of a text the next query sees in layers of other windows or shapes, and where they go.

    A beginning of the text is of use only if these layers have its last tokens, too: those of the cache's blocks that
    no window has passed. The tokens before them need not come.

    Parameters
    ----------
    windows : sequence of CacheBlocks
        Of the layers of each other window and shape.
    ids : (num_tokens,) int32
    root : bytes
        The root digest of its salt.
    starts : sequence of int
        For each window, the first token that was saved of a sequence; nothing for a prompt.

    Attributes
    ----------
    digests : list of list of bytes
        For each window, those of the text's wire blocks.
    """

    def __init__(
        self, windows: Sequence[CacheBlocks], ids: npt.NDArray[np.int32], root: bytes, starts: Sequence[int] = ()
    ) -> None:
        self._windows, self._starts = windows, starts or [0] * len(windows)
        self.digests = [window.wire.digests(ids, root) for window in windows]

    def longest(
        self, num_tokens: int, num_here: int, are_there: Callable[[CacheBlocks, Sequence[bytes]], list[bool]]
    ) -> int:
        """The longest beginning, of at most num_tokens tokens, of which windows have all that they need.

        Parameters
        ----------
        num_tokens : int
            How many tokens the layers without a window have.
        num_here : int
            How many the cache has, in all layers.
        are_there : callable
            Says which wire blocks a store has, by their digests.
        """
        while num_tokens > num_here:
            lost = num_tokens
            for window, start, digests in self._needed(num_tokens, num_here):
                there, size = are_there(window, digests), window.wire.block_tokens
                if not all(there):
                    lost = min(lost, (start // size + there.index(False)) * size)
            if lost == num_tokens:
                return num_tokens
            num_tokens = lost  # all beginnings in between need that block, too
        return num_here

    def write(self, seq: int, num_tokens: int, num_here: int, came: Came) -> None:
        """Copy what `longest` needs to a sequence of that length."""
        for window, start, digests in self._needed(num_tokens, num_here):
            opened = [head for digest in digests for head in came[digest] or []]
            slots = to_host(window.cache.slots(seq, start, num_tokens))
            window.write(slots, start % window.wire.block_tokens, opened)

    def _needed(self, num_tokens: int, num_here: int) -> Iterator[tuple[CacheBlocks, int, list[bytes]]]:
        """For each window the first token that has to come, and the digests of the wire blocks from there on.

        It is the first of a block of the cache, not of the window: once it is committed, others find that block whole.
        """
        for window, digests, saved in zip(self._windows, self.digests, self._starts, strict=True):
            cache, size = window.cache, window.wire.block_tokens
            passed = cache.layer_groups.first_columns(num_tokens, cache.keep)[window.groups[0]] * cache.block_size
            start = max(num_here, int(passed))
            needed = digests[start // size : -(-num_tokens // size)]
            if start < num_tokens:
                if start >= saved and start // size == saved // size:
                    needed[0] = window.wire.without_first(needed[0], saved % size)
                yield window, start, needed
