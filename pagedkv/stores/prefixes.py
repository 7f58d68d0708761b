"""StoredPrefixes: a prefix cache that finds in a store what its pool has evicted, or another process has computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain, compress, groupby, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import to_host
from ..cache import PagedKVCache
from ..memory.handles import NO_HANDLE
from ..memory.prefix.digests import root_digest
from ..memory.prefix.prompt import Added, ids_of
from .blocks import CacheBlocks
from .patient import PatientStore
from .state_records import StateRecords
from .store import BlockStore, Buffer, require_room
from .window_blocks import Came, WindowBlocks
from .wire import BLOCK_TOKENS, Name

_AT_ONCE = 2**24  # bytes that are asked for at a time, so that the next ones come while these are written


class StoredPrefixes:
    """Copies blocks of a cache's prefixes to a store, and back.

    Call `load` before `add`, and `store` once a prompt's blocks are committed. Other caches of the same model share
    them, in this process or another, whatever their block size, layout and number of ranks.

    With states of sequences, `store` copies snapshots, each behind its blocks, and what lies behind the last of them
    stays out of the store. `load` takes the longest that the store has with all its blocks.

    A store that raises, gives no answer in time, or returns something wrong, has nothing: the prompt is computed. Calls
    go to the store from two threads of this object. One thread at a time may call the object itself, as its cache.

    Parameters
    ----------
    cache : PagedKVCache
        With a prefix cache, and layers without a window; with states, without any. Of layers with windows, a store gets
        the blocks that the cache still finds, and gives back what the next query sees.
    store : BlockStore
        With room for a wire block of each KV head, in each window and shape, and for a state: a `HostStore` or
        `FileStore` needs `block_bytes` of one wire block, the largest, and a capacity of so many.
    model : str
        What K and V depend on besides tokens and salts: the name and the revision of the weights, and all that changes
        them, such as another scaling of positions.
    first_head : int
        The number in the model of the cache's first KV head, where ranks share them.
    block_tokens : int
        Tokens of a wire block; the same in all caches that share.
    timeout : float
        Seconds that `load` and `store` wait for the store at most.
    max_pending_bytes : int
        Bytes that wait at most for the store to take them, at least those of all KV heads of one wire block, and of a
        state; what comes when there are more is not stored.

    Attributes
    ----------
    num_loaded, num_stored, num_dropped : int
        Tokens that came from the store, that were given to it, and that did not fit into `max_pending_bytes`, in layers
        without a window.

    Raises
    ------
    TypeError, ValueError
        An argument is not as described here.

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv import PagedKVCache
    >>> from pagedkv.stores import HostStore, StoredPrefixes
    >>> def make_cache():
    ...     return PagedKVCache(num_layers=1, num_blocks=16, block_size=16, num_kv_heads=2, head_dim=8)
    >>> store = HostStore(capacity=2**20, block_bytes=2**15)
    >>> first, second = make_cache(), make_cache()
    >>> prompt = list(range(200))
    >>> seq, _ = first.add(prompt)
    >>> k = v = np.ones((200, 2, 8), np.float32)
    >>> first.write(0, k, v, first.slots(seq, 0, 200))
    >>> first.commit([seq])
    >>> with StoredPrefixes(first, store, "a model") as prefixes:
    ...     prefixes.store(prompt)
    192
    >>> with StoredPrefixes(second, store, "a model") as prefixes:
    ...     prefixes.load(prompt)
    192
    >>> second.add(prompt).num_cached
    192
    """

    def __init__(
        self,
        cache: PagedKVCache,
        store: BlockStore,
        model: str,
        *,
        first_head: int = 0,
        block_tokens: int = BLOCK_TOKENS,
        timeout: float = 2.0,
        max_pending_bytes: int = 2**28,
    ) -> None:
        if not cache.prefix_cache:
            raise ValueError("cache must have a prefix cache, got one with prefix_cache=False, which finds nothing")
        self.cache = cache
        options = {"first_head": first_head, "block_tokens": block_tokens}
        self.blocks, *self.windows = CacheBlocks.of_each_kind(cache, model, **options)
        # Tokens appended at a time, so that windows give blocks back in between.
        self.chunk = self.blocks.wire.block_tokens if self.windows else None
        self.patient = PatientStore(store, timeout, max_pending_bytes)
        kinds = self.blocks, *self.windows
        sizes = [blocks.wire.block_bytes for blocks in kinds]
        self.states = StateRecords(cache, model, sizes[0], first_head) if cache.states else None
        if self.states is not None and self.windows:
            raise ValueError(
                f"cache must have no windows beside states, got {cache.groups}: make it without windows, and pass "
                "window= to attend"
            )
        num_parts = 0 if self.states is None else self.states.num_parts
        require_room(store, max(sizes), sum(blocks.num_heads for blocks in kinds) + num_parts)
        needed = sum(blocks.bytes_of_all_heads for blocks in kinds) + num_parts * sizes[0]
        if max_pending_bytes < needed:
            raise ValueError(
                f"max_pending_bytes must be at least {needed}, what {block_tokens} tokens take in this cache, got "
                f"{max_pending_bytes}, which lets no block wait for the store"
            )
        self._unit = block_tokens if self.states is None else cache.block_size  # of what can be loaded
        self.num_loaded = self.num_stored = self.num_dropped = 0
        self._waiting: dict[bytes, Future[bool]] = {}  # by its chained digest, what waits for the store to take it

    def __enter__(self) -> StoredPrefixes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def load(self, tokens: Any, salt: str | bytes | None = None) -> int:
        """Copy from the store what the cache does not find of a prompt, so that `add` finds it.

        The cache needs room for these tokens, as `add` does; else nothing is loaded. In `stats` it counts them as a
        preempted request's.

        Parameters
        ----------
        tokens, salt
            As in `PagedKVCache.add`.

        Returns
        -------
        int
            How many of the tokens the cache finds now.

        Raises
        ------
        TypeError, ValueError
            As in `add`.
        """
        ids, num_here, size = ids_of(tokens), self.cache.find(tokens, salt), self.cache.block_size
        most = len(ids) if self.states is None else max(0, len(ids) - 1)  # no snapshot is of use at the end
        full = ids[: most - most % self._unit]
        if len(full) // size * size > num_here and self.cache.can_add(full, salt, chunk=self.chunk):
            last = [NO_HANDLE]
            try:
                self.bring(full, salt, last)
                self.end(last)
            except BaseException:
                self.end(last)
                raise
            return self.cache.find(tokens, salt)
        return num_here

    def end(self, last: list[int]) -> None:
        """Free the sequence that `bring` has started last, unless it has."""
        if last[0] != NO_HANDLE:
            with suppress(KeyError):
                self.cache.free(last[0])

    def bring(
        self, ids: npt.NDArray[np.int32], salt: str | bytes | None, last: list[int], starts: Sequence[int] = ()
    ) -> Added | None:
        """Start a sequence with all that the cache and the store have of a text, if the store has anything to add.

        Parameters
        ----------
        ids : (num_tokens,) int32
        salt : str, bytes or None
        last : list of one int
            As in `PagedKVCache.add_found`: after an exception its sequence may be alive, for the caller to `end`.
        starts : sequence of int
            As in `WindowBlocks`.

        Returns
        -------
        Added or None
            The sequence, and its length; None if the store has nothing.
        """
        if self.states is not None:
            return self._bring_with_state(self.states, ids, salt, last)
        root, deadline, size = root_digest(salt), self.patient.deadline(), self.blocks.wire.block_tokens
        digests, windows = self.blocks.wire.digests(ids, root), WindowBlocks(self.windows, ids, root, starts)
        came: Came = {}
        while True:
            num_here = self.cache.find(ids, salt)
            coming = self._come(digests[: -(-len(ids) // size)], num_here // size, deadline)
            if (begin := next(coming, None)) is None:
                return None
            added = self.cache.add_found(ids, salt, chunk=self.chunk, preempted=True, last=last)
            for first, opened in chain([begin], coming):
                added = self._extend(added, ids, first, opened)
            num_tokens = windows.longest(added.num_cached, num_here, partial(self._fetch, came, deadline))
            if num_tokens == added.num_cached:
                self.cache.append(added.seq, 0)  # windows pass what does not come
                windows.write(added.seq, num_tokens, num_here, came)
                self.cache.commit(added.seq)
                self.num_loaded += num_tokens - num_here
                return added
            self.cache.free(added.seq)
            if num_tokens <= num_here:
                return None
            ids = ids[:num_tokens]

    def _bring_with_state(
        self, states: StateRecords, ids: npt.NDArray[np.int32], salt: str | bytes | None, last: list[int]
    ) -> Added | None:
        """As `bring`, of a cache whose sequences go on only where they have a state."""
        wire, root, deadline = self.blocks.wire, root_digest(salt), self.patient.deadline()
        size, digests, num_here = wire.block_tokens, wire.digests(ids, root), self.cache.find(ids, salt)
        lens = sorted({*range(self._unit, len(ids), self._unit), len(ids)} - {*range(num_here + 1)}, reverse=True)
        named = [(n, wire.digest_at(n, ids, root, digests)) for n in lens]
        there = self.patient.has([states.keys(digest, n)[0] for n, digest in named], deadline)
        for n, digest in compress(named, there):
            if (state := states.open(digest, n, self.patient, deadline)) is None:
                self.patient.remove_damaged(states.keys(digest, n))
                continue
            added = self.cache.add_found(ids[:n], salt, preempted=True, last=last)
            of_blocks = [*digests[: (n - 1) // size], digest]
            for first, opened in self._come(of_blocks, added.num_cached // size, deadline):
                added = self._extend(added, ids[:n], first, opened)
            if added.num_cached == n:
                self.cache.write_states([added.seq], state)
                self.cache.commit(added.seq)
                self.num_loaded += n - num_here
                return added
            self.cache.free(added.seq)
        return None

    def _extend(
        self, added: Added, ids: npt.NDArray[np.int32], first: int, opened: Sequence[npt.NDArray[np.uint8]]
    ) -> Added:
        """Append to a sequence what has come of a text, from the wire block `first` on."""
        (seq, length), size = added, self.blocks.wire.block_tokens
        stop = min(len(ids), (first + len(opened) // self.blocks.num_heads) * size)
        if stop <= length:
            return added
        at_once = self.chunk or stop - length
        parts = [ids[i : min(i + at_once, stop)] for i in range(length, stop, at_once)]
        slots = [to_host(self.cache.append([seq], len(part), tokens=part)) for part in parts]
        self.blocks.write(np.concatenate(slots, axis=-1), length - first * size, opened)
        return Added(seq, stop)

    def store(self, tokens: Any, salt: str | bytes | None = None) -> int:
        """Copy what the cache finds of a text, in full wire blocks, for the store to take in the background.

        With states it copies each snapshot and the blocks that lead to it, the last of them as full as it is there.

        Parameters
        ----------
        tokens, salt
            As in `PagedKVCache.add`: a prompt, or all tokens of a sequence, once they are committed.

        Returns
        -------
        int
            How many of the first tokens the store has or has been given.
        """
        cache, root, size = self.cache, root_digest(salt), self.blocks.wire.block_tokens
        ids = ids_of(tokens)
        all_slots, snapshots = cache._found(ids, root)
        num_blocks = (all_slots.shape[1] if self.states is None else max(snapshots, default=0)) // size
        text, ids, slots = ids, ids[: num_blocks * size], all_slots[:, : num_blocks * size]
        windows, has, deadline = WindowBlocks(self.windows, ids, root), set[bytes](), self.patient.deadline()
        of_text = self.blocks.wire.digests(ids, root)
        given = self.give(self.blocks, slots, dict(enumerate(of_text)), deadline)
        for blocks, digests in zip(self.windows, windows.digests, strict=True):
            incomplete = blocks.missing(slots).reshape(num_blocks, size).any(axis=1)
            whole = {i: digests[i] for i in np.flatnonzero(~incomplete).tolist()}
            there = self.give(blocks, slots, whole, deadline)
            has |= {digests[i] for i in there}
        num_given = min({*range(num_blocks + 1)} - given)
        if self.states is not None:
            ends = {n: self.blocks.wire.digest_at(n, text, root, of_text) for n in snapshots if n // size <= num_given}
            stored = [n for n, end in ends.items() if self._give_state(snapshots[n], all_slots[:, :n], end, deadline)]
            return max(stored, default=0)
        return windows.longest(num_given * size, 0, lambda blocks, digests: [digest in has for digest in digests])

    def give(
        self, blocks: CacheBlocks, slots: npt.NDArray[np.int64], digests: Mapping[int, bytes], deadline: float
    ) -> set[int]:
        """Copy tokens of wire blocks that the store does not have.

        Parameters
        ----------
        blocks : CacheBlocks
            `blocks`, or one of `windows`.
        slots : array
            As in `CacheBlocks.read`, of a text from its first token on.
        digests : mapping of int to bytes
            The digests of those of its wire blocks that the store is to have, by their number.
        deadline : float
            Until when the store may say what it has.

        Returns
        -------
        set of int
            Which of them it then has, or has been given.
        """
        room, size = self.patient.room // blocks.bytes_of_all_heads, blocks.wire.block_tokens
        self._waiting = {digest: taken for digest, taken in self._waiting.items() if not taken.done()}
        asked = [i for i, digest in digests.items() if digest not in self._waiting]
        there = iter(self.patient.has([name.key for i in asked for name in blocks.names(digests[i])], deadline))
        missing = [i for i in asked if not all([*islice(there, blocks.num_heads)])]
        given = missing[: max(0, room)]
        for some in _runs(given, max(1, _AT_ONCE // blocks.bytes_of_all_heads)):
            new = [digests[i] for i in some]
            names, content = blocks.read(slots[..., some.start * size : some.stop * size], new)
            self._waiting |= dict.fromkeys(new, self.patient.put([name.key for name in names], content))
        if blocks is self.blocks:
            self.num_stored += len(given) * size
            self.num_dropped += (len(missing) - len(given)) * size
        return {*digests} - {*missing[len(given) :]}

    def _give_state(self, slot: int, slots: npt.NDArray[np.int64], digest: bytes, deadline: float) -> bool:
        """Copy a state that the store does not have, behind its blocks; whether it then has it, or has been given.

        Its tokens are in `slots`. Where they end in the middle of a wire block, the store gets a block with just these.
        """
        assert self.states is not None
        num_tokens, size = slots.shape[1], self.blocks.wire.block_tokens
        if num_tokens % size and not self.give(self.blocks, slots, {num_tokens // size: digest}, deadline):
            return False
        keys = self.states.keys(digest, num_tokens)
        if keys[0] not in self._waiting and not all(self.patient.has(keys, deadline)):
            if self.patient.room < self.states.num_parts * self.blocks.wire.block_bytes:
                return False
            self._waiting[keys[0]] = self.patient.put(*self.states.read(slot, num_tokens, digest))
        return True

    def flush(self) -> bool:
        """Wait until the store has taken all blocks; whether it did before the time-out."""
        return self.patient.flush()

    def close(self) -> None:
        """Wait as `flush` does, end the threads and let go of the store, which stays open."""
        self.flush()
        self.patient.close()

    def _come(
        self, digests: Sequence[bytes], first: int, deadline: float
    ) -> Iterator[tuple[int, list[npt.NDArray[np.uint8]]]]:
        """Ask the store for wire blocks from one on; yields what has come, and which block is the first of it."""
        at_once = max(1, _AT_ONCE // self.blocks.bytes_of_all_heads)
        starts = range(first, len(digests), at_once)
        names = [[name for digest in digests[i : i + at_once] for name in self.blocks.names(digest)] for i in starts]
        asked = [self.patient.ask([name.key for name in some]) for some in names[:1]]
        for i, some in zip(starts, names, strict=True):
            found = self.patient.wait(asked.pop(), deadline)
            if found and i + at_once < len(digests):
                following = names[(i - first) // at_once + 1]
                asked.append(self.patient.ask([name.key for name in following]))
            opened = self._open(self.blocks, found, some)
            if opened:
                yield i, opened
            if len(opened) < len(some):
                return

    def _fetch(self, came: Came, deadline: float, blocks: CacheBlocks, digests: Sequence[bytes]) -> list[bool]:
        """Get wire blocks that are not in `came` yet; whether each of `digests` is then there, all KV heads of it."""
        missing = [digest for digest in digests if digest not in came]
        at_once, num_heads = max(1, _AT_ONCE // blocks.bytes_of_all_heads), blocks.num_heads
        for i in range(0, len(missing), at_once):
            some = missing[i : i + at_once]
            names = [name for digest in some for name in blocks.names(digest)]
            found = self.patient.wait(self.patient.ask([name.key for name in names]), deadline)
            for j, digest in enumerate(some):
                of_heads = slice(j * num_heads, (j + 1) * num_heads)
                came[digest] = self._open(blocks, found[of_heads], names[of_heads]) or None
        return [came[digest] is not None for digest in digests]

    def _open(
        self, blocks: CacheBlocks, found: Sequence[Buffer | None], names: Sequence[Name]
    ) -> list[npt.NDArray[np.uint8]]:
        """As `CacheBlocks.open`; the store forgets damaged blocks, for else it would take no others in their place."""
        opened = blocks.open(found, names)
        rest = [*zip(found, names, strict=False)][len(opened) :]
        damaged = [name.key for block, name in rest if block is not None and blocks.wire.opened(block, name) is None]
        if damaged:
            self.patient.remove_damaged(damaged)
        return opened


def _runs(numbers: Sequence[int], most: int) -> Iterator[range]:
    """Group ascending numbers into runs of successive ones, of at most so many."""
    for _, group in groupby(enumerate(numbers), lambda x: x[1] - x[0]):
        run = [x[1] for x in group]
        for i in range(0, len(run), most):
            yield range(run[i], run[i : i + most][-1] + 1)
