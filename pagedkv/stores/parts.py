"""Parts: contents that may be larger than one block of a store, cut into parts and put together again."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import numpy as np
import numpy.typing as npt

from ..memory.prefix.digests import NUM_BYTES, blake2b_128
from .patient import PatientStore
from .store import Buffer

_HEADER = Struct("<16s16s16sII")  # magic, key, digest of the content, its words, the first of them in this part
KeyOf = Callable[[int], bytes]
"""The key of the part that begins with some word."""


class Parts:
    """Cuts contents of 4-byte words into parts, each with a checksum, that a store keeps as blocks.

    Parameters
    ----------
    magic : bytes
        16 bytes that say what the contents are, and the version of their form.
    block_bytes : int
        Bytes of the largest part.
    """

    def __init__(self, magic: bytes, block_bytes: int) -> None:
        self._magic, self._room = magic, (block_bytes - _HEADER.size - NUM_BYTES) // 4

    def keys(self, key_of: KeyOf, num_words: int) -> list[bytes]:
        """The keys of all parts of a content."""
        return [key_of(first) for first in range(0, num_words, self._room)]

    def cut(self, key_of: KeyOf, words: npt.NDArray[np.int32]) -> tuple[list[bytes], list[bytes]]:
        """The keys and the parts of a content."""
        whole = words.astype("<i4", copy=False)
        digest, keys = blake2b_128(whole.tobytes()), self.keys(key_of, len(words))
        parts = []
        for key, first in zip(keys, range(0, len(words), self._room), strict=True):
            some = whole[first : first + self._room].tobytes()
            content = _HEADER.pack(self._magic, key, digest, len(words), first) + some
            parts.append(content + blake2b_128(content))
        return keys, parts

    def join(
        self, key_of: KeyOf, patient: PatientStore, deadline: float, num_words: int = 1
    ) -> npt.NDArray[np.int32] | None:
        """Get a content, if all parts of it come whole by the deadline; `num_words` is how many it has, if known."""
        came: list[tuple[bytes, npt.NDArray[np.int32]]] = []
        first = 0
        while first < num_words:
            keys = self.keys(key_of, num_words)[len(came) :]
            found = patient.wait(patient.ask(keys), deadline)
            for key, part in zip(keys, found, strict=False):
                if (opened := self._opened(part, key)) is None or opened[1] != first:
                    return None
                num_words, _, digest, some = opened
                came.append((digest, some))
                first += len(some)
            if len(found) < len(keys):
                return None
        words = np.concatenate([some for _, some in came])
        digest = blake2b_128(words.tobytes())
        return words if all(of_part == digest for of_part, _ in came) and len(words) == num_words else None

    def _opened(self, part: Buffer | None, key: bytes) -> tuple[int, int, bytes, npt.NDArray[np.int32]] | None:
        """How many words a content has, the first one of a part, the digest of the content, and the part's words."""
        if not isinstance(part, (bytes, bytearray, memoryview)):
            return None
        try:
            whole = bytes(part)
        except ValueError:  # a view that the store has released
            return None
        content, checksum = whole[:-NUM_BYTES], whole[-NUM_BYTES:]
        if len(content) <= _HEADER.size or checksum != blake2b_128(content):
            return None
        magic, its_key, digest, num_words, first = _HEADER.unpack_from(content)
        if magic != self._magic or its_key != key:
            return None
        return num_words, first, digest, np.frombuffer(content, "<i4", offset=_HEADER.size).astype(np.int32)
