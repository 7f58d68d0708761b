"""The rows of a cache: from a block and a position in it to the address of a token's row, and the scale of a KV head.

Offsets are 32-bit counts of vectors, whose size divides every stride, or 64-bit counts of bytes if 32 bits are too few:
for caches with more than 2**32 vectors or with a negative stride.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .intrinsics.thread import address, bits_float
from .language import int64, uint32
from .source import device_function


class Cache(NamedTuple):
    """The rows of one KV head in the cache of keys or of values."""

    address: Any  # the row at offset 0, or a lane's part of it
    block_stride: Any  # bytes
    token_stride: Any


def make_row_offset(wide: bool, vector_bytes: int) -> Any:
    """The device function ``row_offset(cache, block, position)``: the offset of a token's row."""
    WIDE, SHIFT = wide, vector_bytes.bit_length() - 1

    @device_function
    def row_offset(cache, block, position):
        if WIDE:
            return int64(block) * cache.block_stride + int64(position) * cache.token_stride
        # Each product is cast by itself: the sum becomes an address, and LLVM would multiply in 64 bits.
        block_vectors, token_vectors = uint32(cache.block_stride >> SHIFT), uint32(cache.token_stride >> SHIFT)
        return uint32(uint32(block * block_vectors) + uint32(position * token_vectors))

    return row_offset


def make_address_at(wide: bool, vector_bytes: int) -> Any:
    """The device function ``address_at(base, offset)``: the address of the row at an offset."""
    WIDE, VECTOR_BYTES = wide, vector_bytes

    @device_function
    def address_at(base, offset):
        return base + (offset if WIDE else int64(offset) * VECTOR_BYTES)

    return address_at


@device_function
def scale_of(scales, number, kv_head):
    """A KV head's scale: an element of `scales` if that is an array, else the float32 whose bits are `number`."""
    return scales[kv_head] if address(scales) != 0 else bits_float(uint32(number))
