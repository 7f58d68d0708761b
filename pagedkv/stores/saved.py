"""SavedSequences: sequences in a store under names, as the slots of llama.cpp."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..memory.handles import NO_HANDLE
from ..memory.prefix.digests import blake2b_128, root_digest
from .blocks import CacheBlocks
from .parts import Parts
from .prefixes import StoredPrefixes

_MAGIC = b"pagedkv text\n\0\0\0"


class Restored(NamedTuple):
    """A sequence that came back.

    Attributes
    ----------
    seq : int
        The handle of a new sequence.
    num_cached : int
        Its length. If the store has lost blocks, it is less than the number of tokens: append and compute the others.
    tokens : (num_tokens,) int32
        All tokens of the sequence that was saved.
    """

    seq: int
    num_cached: int
    tokens: npt.NDArray[np.int32]


class SavedSequences:
    """Saves sequences under names, and restores them, in this process or another.

    The K and V are in the wire blocks that `StoredPrefixes` shares, the last tokens in one of their own; a name leads
    to the token ids alone. So what several saved sequences have in common is stored once. Of layers with windows, what
    the sequence still holds is saved; a cache of longer blocks, or of a larger `keep`, needs more than that at many
    lengths, and has to compute all tokens then. Save from a cache with ``keep=2 * P``, where P is the longest block
    size that restores, and with the `keep` of that cache besides.

    Parameters
    ----------
    prefixes : StoredPrefixes

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv import PagedKVCache
    >>> from pagedkv.stores import HostStore, SavedSequences, StoredPrefixes
    >>> cache = PagedKVCache(num_layers=1, num_blocks=16, block_size=16, num_kv_heads=2, head_dim=8)
    >>> prefixes = StoredPrefixes(cache, HostStore(capacity=2**20, block_bytes=2**15), "a model")
    >>> saved = SavedSequences(prefixes)
    >>> seq, _ = cache.add([1, 2, 3, 4, 5], salt="a user")
    >>> k = v = np.ones((5, 2, 8), np.float32)
    >>> cache.write(0, k, v, cache.slots(seq, 0, 5))
    >>> cache.commit(seq)
    >>> saved.save(seq, "a chat")
    True
    >>> cache.free(seq)
    >>> saved.restore("a chat", salt="a user").num_cached
    5
    """

    def __init__(self, prefixes: StoredPrefixes) -> None:
        self._prefixes = prefixes
        self._parts = Parts(_MAGIC, prefixes.blocks.wire.block_bytes)

    def save(self, seq: int, name: str) -> bool:
        """Save a sequence whose K and V are all written; what had this name and salt before, has it no longer.

        Parameters
        ----------
        seq : int
            The handle of a sequence with tokens whose ids are all known; it goes on.
        name : str

        Returns
        -------
        bool
            Whether the store has taken all of it in time, and still has it.

        Raises
        ------
        TypeError
            `name` is not a str.
        ValueError
            The ids of some tokens are not known, or there are no tokens; or the sequence has a state that does not
            stand for all of them.
        KeyError
            The sequence was freed, or never existed.
        """
        _require_name(name)
        prefixes, cache = self._prefixes, self._prefixes.cache
        [contents] = cache._contents([seq])
        slots, tokens, root, num_tokens = contents.slots, contents.tokens, contents.root, contents.num_tokens
        if not num_tokens or len(tokens) < num_tokens:
            raise ValueError(
                f"seq must have tokens whose ids are all known, got {seq} with {num_tokens} tokens, {len(tokens)} of "
                "them known: pass their ids to add and append"
            )
        contents.require_state()
        if contents.num_computed < num_tokens:
            raise ValueError(
                f"seq must have a state that stands for all its tokens, but that of sequence {seq} stands for "
                f"{contents.num_computed} of {num_tokens}: call write_states after the pass, and then commit"
            )
        starts = [int(np.count_nonzero(window.missing(slots))) for window in prefixes.windows]
        given: list[bytes] = []
        for blocks, start in zip((prefixes.blocks, *prefixes.windows), (0, *starts), strict=True):
            of_blocks = self._give(blocks, slots, blocks.wire.digests(tokens, root), start)
            if of_blocks is None:
                return False
            given += of_blocks
        if prefixes.states is not None:
            digest = prefixes.blocks.wire.digests(tokens, root)[-1]
            state_keys, state = prefixes.states.read(contents.state_slot, num_tokens, digest)
            if not prefixes.patient.put_now(state_keys, state):
                return False
            given += state_keys
        numbers = np.concatenate([np.array(starts, np.int32), tokens])
        keys, parts = self._parts.cut(partial(self._key, name, root), numbers)
        prefixes.patient.remove(keys)
        if not prefixes.patient.put_now(keys, parts):
            return False
        # Without room for all of it, the store has evicted some blocks for others.
        return all(prefixes.patient.has([*keys, *given], prefixes.patient.deadline()))

    def restore(self, name: str, salt: str | bytes | None = None) -> Restored:
        """Start a sequence like one that was saved.

        Parameters
        ----------
        name : str
        salt : str, bytes or None
            That of the sequence that was saved.

        Raises
        ------
        KeyError
            No sequence is saved under this name with this salt, or the store does not say so in time.
        ValueError, OutOfBlocksError, CapacityError
            As `PagedKVCache.add`: the cache has no room for so many tokens, ever or now.
        """
        _require_name(name)
        prefixes = self._prefixes
        patient = prefixes.patient
        numbers = self._parts.join(partial(self._key, name, root_digest(salt)), patient, patient.deadline())
        if numbers is None:
            raise KeyError(
                f"no sequence is saved as {name!r} with this salt: give the salt, model and dtype of the one saved; "
                "a store that is closed, or late, finds nothing"
            )
        starts, tokens = np.split(numbers, [len(prefixes.windows)])
        last = [NO_HANDLE]
        try:
            added = prefixes.bring(tokens, salt, last, starts.tolist())
            if added is None:
                added = prefixes.cache.add_found(tokens, salt, chunk=prefixes.chunk, preempted=True, last=last)
            return Restored(*added, tokens)
        except BaseException:
            prefixes.end(last)
            raise

    def delete(self, name: str, salt: str | bytes | None = None) -> None:
        """Forget a name; the blocks stay until the store needs their room."""
        _require_name(name)
        self._prefixes.patient.remove([self._key(name, root_digest(salt), 0)])

    def _give(
        self, blocks: CacheBlocks, slots: npt.NDArray[np.int64], digests: list[bytes], start: int
    ) -> list[bytes] | None:
        """Store a text from the token `start` on; the keys of its blocks, or None if the store is late."""
        prefixes, size = self._prefixes, blocks.wire.block_tokens
        wanted = dict(enumerate(digests[start // size :], start // size)) if start < slots.shape[1] else {}
        if wanted:
            wanted[start // size] = blocks.wire.without_first(digests[start // size], start % size)
        left = iter(wanted.items())
        while prefixes.flush():
            some = dict(islice(left, prefixes.patient.room // blocks.bytes_of_all_heads))
            if not some:
                return [name.key for digest in wanted.values() for name in blocks.names(digest)]
            prefixes.give(blocks, slots, some, prefixes.patient.deadline())
        return None

    def _key(self, name: str, root: bytes, first: int) -> bytes:
        blocks = self._prefixes.blocks, *self._prefixes.windows
        roots = b"".join(of_window.wire.root(root) for of_window in blocks)
        return blake2b_128(b"saved" + roots + first.to_bytes(8, "little") + name.encode())


def _require_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
