"""SwapSpace: sequences whose blocks wait in a store while others need the pool."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import to_host
from ..cache import PagedKVCache
from ..errors import OutOfBlocksError
from .blocks import CacheBlocks
from .patient import PatientStore
from .store import BlockStore
from .wire import BLOCK_TOKENS, Name

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Swapped:
    """A sequence that is swapped out.

    Attributes
    ----------
    num_tokens, num_committed : int
        Its length, and how many of its first tokens are in blocks that could be found.
    tokens : (num_known,) int32
        Its first tokens, as far as their ids are known.
    names : list of Name
        Its wire blocks, all KV heads of each.
    """

    num_tokens: int
    num_committed: int
    tokens: npt.NDArray[np.int32]
    names: list[Name]


class SwapSpace:
    """Takes sequences out of a cache, and puts them back under the same handles.

    While a sequence is out, it has no blocks and the length 0; `PagedKVCache.free` ends it as any other. What several
    sequences of one call share is stored once. Blocks that the store loses or damages do not come back: the sequence is
    then shorter, and its caller computes the rest again.

    Parameters
    ----------
    cache : PagedKVCache
        Its layers have no windows.
    store : BlockStore
    block_tokens : int
        Tokens of a wire block.
    timeout : float
        Seconds that a call waits for the store at most.

    Examples
    --------
    >>> from pagedkv import PagedKVCache
    >>> from pagedkv.stores import HostStore, SwapSpace
    >>> cache = PagedKVCache(num_layers=1, num_blocks=4, block_size=16, num_kv_heads=2, head_dim=8)
    >>> space = SwapSpace(cache, HostStore(capacity=2**20, block_bytes=2**15))
    >>> seq, _ = cache.add(40)
    >>> space.swap_out(seq)
    True
    >>> cache.num_free
    4
    >>> space.swap_in(seq)
    [40]
    >>> cache.seq_lens(seq)
    array([40], dtype=int32)
    """

    def __init__(
        self, cache: PagedKVCache, store: BlockStore, *, block_tokens: int = BLOCK_TOKENS, timeout: float = 2.0
    ) -> None:
        self._cache = cache
        # No other space has this model: blocks are named by chance, and not by their tokens, which may be unknown.
        self._blocks = CacheBlocks(cache, f"swapped by {os.urandom(16).hex()}", block_tokens=block_tokens)
        self._patient = PatientStore(store, timeout, max_pending_bytes=0)
        self._out: dict[int, Swapped] = {}

    def swap_out(self, seqs: Any) -> bool:
        """Move sequences to the store.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.

        Returns
        -------
        bool
            Whether the store has taken them in time; nothing has changed if not.

        Raises
        ------
        ValueError
            A sequence is named twice, or is out already.
        KeyError
            A sequence was freed, or never existed.
        """
        cache, size = self._cache, self._blocks.wire.block_tokens
        rows, handles = self._find(seqs)
        self._forget_freed()
        for seq in handles:
            if seq in self._out:
                raise ValueError(f"seqs must be sequences that are in the cache, got {seq}, which is swapped out")
        digests: dict[bytes, bytes] = {}  # of the slots of each wire block
        swapped, stored = {}, []
        for row, seq in zip(rows.tolist(), handles, strict=True):
            num_tokens = int(cache.seq_lens(seq)[0])
            slots, names = np.asarray(to_host(cache.slots(seq, 0, num_tokens))), []
            for i in range(0, num_tokens, size):
                part = slots[i : i + size]
                if (digest := digests.get(part.tobytes())) is None:
                    digest = digests[part.tobytes()] = os.urandom(_DIGEST_BYTES)
                    stored.append((part, digest))
                names += self._blocks.names(digest)
            swapped[seq] = Swapped(num_tokens, *self._known(row, slots), names)
        if not all(self._put(part, digest) for part, digest in stored):
            self._patient.remove([name.key for _, digest in stored for name in self._blocks.names(digest)])
            return False
        self._out |= swapped
        try:
            cache.truncate(handles, 0)
        except BaseException:
            for seq in handles:
                if cache.seq_lens(seq)[0]:
                    del self._out[seq]
            raise
        return True

    def swap_in(self, seqs: Any) -> list[int]:
        """Move sequences back from the store.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.

        Returns
        -------
        list of int
            The length of each. One that is shorter than it was has lost blocks: append and compute the rest.

        Raises
        ------
        ValueError
            A sequence is named twice, is not out, or has got tokens since it is.
        KeyError
            A sequence was freed, or never existed.
        OutOfBlocksError
            Too few blocks are free. Nothing has changed.
        """
        cache = self._cache
        _, handles = self._find(seqs)
        for seq in handles:
            if seq not in self._out:
                raise ValueError(f"seqs must be sequences that are swapped out, got {seq}, which is not")
            if cache.seq_lens(seq)[0]:
                raise ValueError(
                    f"seqs must be as swap_out left them, got {seq}, which has got tokens since: truncate it to 0"
                )
        needed = sum(-(-self._out[seq].num_tokens // cache.block_size) for seq in handles)
        if needed > (free := cache.num_free):
            raise OutOfBlocksError(
                f"{needed} blocks asked for, {free} of {cache.pool.num_blocks} are free", needed, free
            )
        deadline, lens = self._patient.deadline(), []
        for seq in handles:
            names = self._out[seq].names
            found = self._patient.wait(self._patient.ask([name.key for name in names]), deadline)
            try:
                lens.append(self._put_back(seq, self._blocks.open(found, names)))
            except BaseException:
                cache.truncate(seq, 0)
                raise
            self._forget(seq)
        return lens

    def close(self) -> None:
        """End the threads that ask the store; sequences that are out cannot come back."""
        self._patient.close()

    def _find(self, seqs: Any) -> tuple[npt.NDArray[np.int64], list[int]]:
        rows = self._cache._rows.handles.find_distinct(seqs)
        return rows, self._cache._rows.handles.of(rows).tolist()

    def _known(self, row: int, slots: npt.NDArray[np.int64]) -> tuple[int, npt.NDArray[np.int32]]:
        """How many tokens of a row are in blocks that can be found, and all that are known."""
        chains = self._cache._rows.chains
        if chains is None:
            return 0, np.empty(0, np.int32)
        num_known = int(chains.num_known[row])
        return int(chains.num_found[row]) * self._cache.block_size, chains.cache.tokens[slots[:num_known]]

    def _put(self, slots: npt.NDArray[np.int64], digest: bytes) -> bool:
        names, blocks = self._blocks.read(slots, [digest])
        return self._patient.put_now([name.key for name in names], blocks)

    def _put_back(self, seq: int, opened: list[npt.NDArray[np.uint8]]) -> int:
        """Append what has come to a sequence; returns its length."""
        out, cache, start = self._out[seq], self._cache, 0
        stop = min(out.num_tokens, len(opened) // self._blocks.num_heads * self._blocks.wire.block_tokens)
        for end, commits in ((out.num_committed, True), (len(out.tokens), False), (stop, False)):
            count = min(end, stop) - start
            if count <= 0:
                continue
            ids = out.tokens[start : start + count] if end <= len(out.tokens) else None
            slots = to_host(cache.append(seq, count, tokens=ids))
            self._blocks.write(slots, start, opened)
            start += count
            if commits:
                cache.commit(seq)
        return start

    def _forget_freed(self) -> None:
        for seq in [*self._out]:
            try:
                self._cache.seq_lens(seq)
            except KeyError:
                self._forget(seq)

    def _forget(self, seq: int) -> None:
        """Remove the blocks of a sequence from the store, unless another one that is out has them, too."""
        gone = {name.key for name in self._out.pop(seq).names}
        shared = {name.key for other in self._out.values() for name in other.names}
        self._patient.remove([*(gone - shared)])
