"""BlockStore: where wire blocks are kept outside of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..memory.prefix.digests import NUM_BYTES

Buffer = bytes | bytearray | memoryview
"""The bytes of a wire block."""


class BlockStore(Protocol):
    """Keeps blocks of bytes under keys of 16 bytes, and drops the least recently used ones when it is full.

    `HostStore`, `FileStore`, `RedisStore` and `NixlStore` are such, and one of yours needs these four methods. A store
    may lose blocks at any time, and its methods may raise whatever they like: what does not come is computed. Each
    block that comes is checked before anything of it reaches a cache.

    Attributes
    ----------
    capacity : int
        The most bytes of blocks that it keeps.
    """

    capacity: int

    def get(self, keys: Sequence[bytes]) -> Sequence[Buffer | None]:
        """Look up keys.

        Parameters
        ----------
        keys : sequence of bytes
            16 bytes each.

        Returns
        -------
        sequence of Buffer or None
            The block of each key, or None where there is none. Later calls do not change these bytes.
        """

    def has(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Say for each key whether its block is there; those that are count as used now, as if `get` had read them."""

    def put(self, keys: Sequence[bytes], blocks: Sequence[Buffer]) -> None:
        """Keep a copy of each block; a key that is there already keeps its block.

        Blocks that are used less recently make room. Where the store has less room than this call needs, it keeps the
        first blocks: a sequence is found from its beginning.

        Parameters
        ----------
        keys : sequence of bytes
            16 bytes each, all different.
        blocks : sequence of Buffer
            As many.
        """

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget keys, as far as they are there."""


def require_blocks(keys: Sequence[bytes], sizes: Sequence[int], most: int) -> None:
    """Raise ValueError unless there are as many different keys of 16 bytes as blocks of at most `most` bytes."""
    if len({*keys}) != len(keys) or len(keys) != len(sizes):
        raise ValueError(f"keys must be different, one for each of {len(sizes)} blocks, got {len({*keys})}")
    for key, size in zip(keys, sizes, strict=True):
        if len(key) != NUM_BYTES:
            raise ValueError(f"keys must have {NUM_BYTES} bytes, got {len(key)}")
        if size > most:
            raise ValueError(f"blocks must have at most {most} bytes each, got {size}")


def require_room(store: BlockStore, block_bytes: int, num_blocks: int) -> None:
    """Raise ValueError if a store tells that it cannot hold so many blocks of `block_bytes` bytes.

    Those are all KV heads of the same tokens: a store with less room takes blocks, and none of them is ever found.
    """
    slot_bytes = getattr(store, "block_bytes", block_bytes)  # a store of the user's need not have slots of one size
    if slot_bytes < block_bytes:
        raise ValueError(
            f"store must take blocks of {block_bytes} bytes, those of this cache, got one with block_bytes="
            f"{slot_bytes}: make it with block_bytes={block_bytes}, or pass a smaller block_tokens"
        )
    needed, capacity = num_blocks * slot_bytes, getattr(store, "capacity", None)
    if capacity is not None and capacity < needed:
        raise ValueError(
            f"store must have a capacity of at least {needed} bytes, {num_blocks} blocks of {slot_bytes}: one for each "
            f"KV head, in each window and shape; got {capacity}: give it more, or pass a smaller block_tokens"
        )


def sizes_of(blocks: Sequence[Buffer]) -> list[int]:
    """The bytes of each block."""
    return [memoryview(block).nbytes for block in blocks]
