"""StateRecords: states of a cache's sequences as bytes that a store keeps, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cache import PagedKVCache
from ..memory.prefix.digests import blake2b_128
from .parts import KeyOf, Parts
from .patient import PatientStore

_MAGIC = b"pagedkv state\0\0\1"  # the last byte is the version


class StateRecords:
    """Reads the states of sequences, of all layers at once, as records for a store, and finds them there.

    A record is named by a digest of the tokens, by how many they are, by the model, and by the names, shapes and dtypes
    of the states: a cache with other states finds nothing. It says how many tokens it stands for and how many bytes
    each state takes (8 bytes each), and has these bytes as they are in the cache, and zeros up to a multiple of 4.

    Parameters
    ----------
    cache : PagedKVCache
        With states.
    model : str
        As in `Wire`.
    block_bytes : int
        Bytes of a block of the store: larger records are cut into parts.
    first_head : int
        As in `CacheBlocks`: ranks have parts of a state.

    Attributes
    ----------
    num_parts : int
        Blocks of the store that a record takes.
    """

    def __init__(self, cache: PagedKVCache, model: str, block_bytes: int, first_head: int = 0) -> None:
        self._arrays = cache._state_arrays
        layout = [(name, shape, dtype.name) for name, (shape, dtype) in self._arrays.specs.items()]
        self._layout = blake2b_128(repr((model, first_head, layout)).encode())
        self._sizes = [array[0].nbytes for array in cache.states.values()]
        self._num_words = 2 * (1 + len(layout)) + -(-sum(self._sizes) // 4)
        self._parts = Parts(_MAGIC, block_bytes)
        self.num_parts = len(self._parts.keys(self._key_of(b"", 0), self._num_words))

    def keys(self, digest: bytes, num_tokens: int) -> list[bytes]:
        """The keys of all parts of a record."""
        return self._parts.keys(self._key_of(digest, num_tokens), self._num_words)

    def read(self, slot: int, num_tokens: int, digest: bytes) -> tuple[list[bytes], list[bytes]]:
        """Copy the state in a slot, which stands for so many tokens: the keys and the parts of its record."""
        states = self._arrays.to_bytes(self._arrays.read(np.array([slot])))
        header = np.array([num_tokens, *map(len, states)], "<u8").view(np.uint8)
        content = np.zeros(4 * self._num_words, np.uint8)
        content[: len(header) + sum(self._sizes)] = np.concatenate([header, *states])
        return self._parts.cut(self._key_of(digest, num_tokens), content.view("<i4"))

    def open(self, digest: bytes, num_tokens: int, patient: PatientStore, deadline: float) -> dict[str, Any] | None:
        """A state as `PagedKVCache.write_states` takes it for one sequence, or None unless a store has it whole."""
        words = self._parts.join(self._key_of(digest, num_tokens), patient, deadline, self._num_words)
        if words is None or len(words) != self._num_words:
            return None
        content, num_numbers = words.astype("<i4", copy=False).view(np.uint8), 1 + len(self._sizes)
        stands_for, *sizes = content[: 8 * num_numbers].view("<u8").tolist()
        if stands_for != num_tokens or sizes != self._sizes:
            return None
        ends = 8 * num_numbers + np.cumsum([0, *sizes])
        return self._arrays.from_bytes(np.split(content, ends)[1:-1])

    def _key_of(self, digest: bytes, num_tokens: int) -> KeyOf:
        name = b"state" + self._layout + digest + num_tokens.to_bytes(8, "little")
        return lambda first: blake2b_128(name + first.to_bytes(8, "little"))
