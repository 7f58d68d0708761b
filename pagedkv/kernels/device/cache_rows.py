"""The rows of a cache: from a block and a position in it to the address of a token's row, and to the scale of that row.

Offsets are 32-bit counts of vectors, whose size divides every stride, or 64-bit counts of bytes if 32 bits are too few:
for caches with more than 2**32 vectors or with a negative stride.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .intrinsics.thread import address, bits_float, load_4
from .language import float32, int64, types, uint32
from .sizes import SCALED_BY_ROW
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


class ScaleStrides(NamedTuple):
    """Bytes between the scales of rows, as a parameter of kernels; of other caches they are not read."""

    k_block: Any
    k_token: Any
    k_head: Any
    v_block: Any
    v_token: Any
    v_head: Any


SCALE_STRIDES = types.NamedUniTuple(int64, len(ScaleStrides._fields), ScaleStrides)


class RowScales(NamedTuple):
    """The scales of the rows of one KV head, of keys or of values."""

    address: Any  # that of position 0 of block 0
    block_stride: Any  # bytes
    token_stride: Any


@device_function
def scales_of_keys(scales, strides, kv_head):
    return RowScales(address(scales) + int64(kv_head) * strides.k_head, strides.k_block, strides.k_token)


@device_function
def scales_of_values(scales, strides, kv_head):
    return RowScales(address(scales) + int64(kv_head) * strides.v_head, strides.v_block, strides.v_token)


@device_function
def place_of_scale(scales, block, position):
    """The address of the scale of a row."""
    return scales.address + int64(block) * scales.block_stride + int64(position) * scales.token_stride


@device_function
def scale_of_row(scales, block, position):
    """The scale of a row, which no thread writes during the launch."""
    return bits_float(load_4(place_of_scale(scales, block, position)))


def make_scale_of(kind: str) -> Any:
    """The device function ``scale_of(scales, number, kv_head)``: a KV head's scale, 1 where rows have their own.

    It is an element of `scales` if that is an array, else the float32 whose bits are `number`.
    """
    BY_ROW = kind in SCALED_BY_ROW

    @device_function
    def scale_of(scales, number, kv_head):
        if BY_ROW:
            return float32(1)
        return scales[kv_head] if address(scales) != 0 else bits_float(uint32(number))

    return scale_of
