"""Rows of O on their way to global memory through shared memory, where lanes exchange what they have of each row."""

from __future__ import annotations

from typing import Any

from ....device.intrinsics.thread import for_each, store_16
from ....device.intrinsics.warp import load_shared_words, store_shared_word, sync_warp
from ....device.language import int64, uint32
from ....device.source import device_function
from ...config import TensorConfig
from ..registers import make_pair_of_row
from ..tile import CHUNK, CHUNK_DIMS
from .shape import WgmmaShape

QUAD = 4  # lanes that have a row together


def make_store_vectors(config: TensorConfig, shape: WgmmaShape) -> Any:
    """The device function ``store_vectors(i, o, place, target, factor, is_inside, g, t)``: a lane stores 16 bytes.

    The warp has room for 8 rows at `place`, a multiple of 128. Of each quad's row it stores the words that lanes have,
    one of each chunk, and loads chunks. Chunks change places within 128 bytes, so that neither meets a bank twice.
    """
    CHUNKS, QUADS, ROW_BYTES = shape.chunks, shape.chunks // QUAD, shape.chunks * CHUNK
    pair_of_row = make_pair_of_row(config, shape)

    @device_function
    def at_chunk(first, n):
        """The place of chunk n of a row, from that of the first one."""
        return uint32(uint32(first ^ uint32(n % CHUNK_DIMS * CHUNK)) + uint32(n // CHUNK_DIMS * CHUNK_DIMS * CHUNK))

    @device_function
    def store_word(n, i, o, first, factor):
        store_shared_word(at_chunk(first, n), pair_of_row(n, i, o, factor))

    @device_function
    def store_chunk(n, first, target, is_inside):
        words = load_shared_words(at_chunk(first, QUAD * n))
        if is_inside:
            store_16(target + QUAD * CHUNK * n, words[0], words[1], words[2], words[3])

    @device_function
    def store_vectors(i, o, place, target, factor, is_inside, g, t):
        swizzle = uint32(uint32(uint32(g & 1) << 2) | uint32(g >> 1))
        first = uint32(uint32(place + uint32(g * ROW_BYTES)) + uint32(swizzle << 4))
        for_each(store_word, CHUNKS, (i, o, uint32(first + uint32(t << 2)), factor))
        sync_warp()
        for_each(store_chunk, QUADS, (uint32(first ^ uint32(t << 4)), target + int64(t) * CHUNK, is_inside))
        sync_warp()  # the next row takes this one's place

    return store_vectors
