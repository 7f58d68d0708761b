"""Digests, which name a block's tokens and all tokens before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

NUM_BYTES = 16
DIGEST = np.dtype(f"V{NUM_BYTES}")  # an opaque type, which NumPy copies in one piece
Digests = npt.NDArray[np.void]
"""(n,) DIGEST"""
Hash = Callable[[bytes], bytes]
"""Bytes to a digest of NUM_BYTES."""
NO_SALT = bytes(NUM_BYTES)
_empty = blake2b(digest_size=NUM_BYTES).copy  # copying a state is faster than making one


def blake2b_128(data: bytes) -> bytes:
    """Hash bytes with BLAKE2b to 128 bits."""
    state = _empty()
    state.update(data)
    return state.digest()


def pack(digests: list[bytes]) -> Digests:
    """Pack digests into one array."""
    return np.frombuffer(b"".join(digests), DIGEST)


def root_digest(salt: str | bytes | None) -> bytes:
    """The digest of a salt, to which the first block of a sequence is chained.

    Raises
    ------
    TypeError
        `salt` is neither a str nor bytes nor None.
    """
    if salt is None:
        return NO_SALT
    if not isinstance(salt, (str, bytes)):
        raise TypeError(f"salt must be a str, bytes or None, got {type(salt).__name__}")
    return blake2b_128(salt if isinstance(salt, bytes) else salt.encode("utf-8", "surrogatepass"))


def hash_chain(hash_of: Hash, parent: bytes, contents: Iterable[bytes]) -> list[bytes]:
    """The digests of successive blocks of one sequence.

    Parameters
    ----------
    hash_of : callable
    parent : bytes
        The digest of the block before the first one, or the sequence's root digest.
    contents : iterable of bytes
        The token ids of each block.
    """
    digests = []
    if hash_of is blake2b_128:
        for content in contents:  # the same without the calls, which take a quarter of the time
            state = _empty()
            state.update(parent + content)
            parent = state.digest()
            digests.append(parent)
        return digests
    for content in contents:
        parent = hash_of(parent + content)
        digests.append(parent)
    return digests


def hash_each(hash_of: Hash, contents: Iterable[bytes]) -> list[bytes]:
    """The digest of each content."""
    if hash_of is not blake2b_128:
        return [hash_of(content) for content in contents]
    digests = []
    for content in contents:  # the same without the calls
        state = _empty()
        state.update(content)
        digests.append(state.digest())
    return digests


def checked_hash(hash_of: Hash) -> Hash:
    """Wrap a hash function to raise TypeError or ValueError unless it returns NUM_BYTES bytes."""

    def digest_of(data: bytes) -> bytes:
        digest = hash_of(data)
        if type(digest) is not bytes:
            raise TypeError(f"hash_of must return bytes, {NUM_BYTES} of them, got {type(digest).__name__}")
        if len(digest) != NUM_BYTES:
            raise ValueError(f"hash_of must return {NUM_BYTES} bytes, got {len(digest)}: cut longer digests")
        return digest

    return digest_of
