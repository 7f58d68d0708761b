"""Stages of the split kernel for many query heads: rows of the caches in shared memory, for all warps.

A stage is the tokens of one turn of the loop. A ring of stages is in flight while one is in use: the copies (cp.async)
take no registers, and each byte is loaded once.

No bank conflicts: shared memory serves 16-byte reads 8 lanes at a time, which have two neighbouring g and all t. Of K
they read 64 bytes of two neighbouring tokens, so rows begin at odd multiples of 64 bytes from each other. Of V they
read 32 bytes of tokens 0, 4, 8 and 12, so a gap after every 4 rows puts these 32 bytes apart in the banks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ...device.cache_rows import place_of_scale
from ...device.intrinsics.thread import assign, bits_float, unrolled
from ...device.intrinsics.warp import copy_4, copy_8, copy_16, load_shared_pair, load_shared_words, store_shared_words
from ...device.language import cuda, uint32
from ...device.sizes import WARP_SIZE
from ...device.source import Steps, device_function
from ..config import NUM_THREADS, VECTOR_BYTES, SplitConfig
from ..shape import K_VECTOR, TILE, TensorShape
from .fragments import key_token

BANKS_BYTES = 128  # bytes of one pass over the banks
IN_FLIGHT = 64 * 1024  # bytes of stages, for all thread blocks of a multiprocessor


@dataclass(frozen=True, slots=True)
class StageShape:
    """The layout of shared memory: the ring of stages, then Q. Sums replace both at the end."""

    config: SplitConfig

    @property
    def shape(self) -> TensorShape:
        return TensorShape(self.config)

    @property
    def tokens(self) -> int:
        return self.shape.step

    @property
    def k_stride(self) -> int:
        """Bytes from a row of K to the next one."""
        return (self.shape.k_vectors | 1) * K_VECTOR

    @property
    def v_stride(self) -> int:
        """Bytes from a row of V to the next one of the same four."""
        return self.shape.v_vectors * 8 * self.shape.v_vector

    @property
    def v_group(self) -> int:
        """Bytes from four rows of V to the next four."""
        return 4 * self.v_stride + (BANKS_BYTES // 4 - 4 * self.v_stride) % BANKS_BYTES

    @property
    def v_start(self) -> int:
        """Bytes from the beginning of a stage to its first row of V."""
        return self.tokens * self.k_stride

    @property
    def scales_start(self) -> int:
        """Bytes from the beginning of a stage to the scales of its keys and then of its values, if rows have them."""
        return self.v_start + self.tokens // 4 * self.v_group

    @property
    def stage_bytes(self) -> int:
        return self.scales_start + (8 * self.tokens if self.config.by_row else 0)

    @property
    def num_stages(self) -> int:
        """Stages of the ring: one in use, and enough in flight for all thread blocks of a multiprocessor."""
        return 1 + max(2, -(-IN_FLIGHT // (self.shape.min_blocks * self.stage_bytes)))

    @property
    def ring_bytes(self) -> int:
        return self.num_stages * self.stage_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the ring and Q."""
        return self.ring_bytes + self.config.warps_for_heads * self.shape.q_bytes

    # ---- who copies what

    @property
    def pieces(self) -> int:
        """Pieces of a row, each of which a lane copies at once: 16 bytes, or 8 if rows are no multiples of 16."""
        return self.config.row_bytes // self.config.vector_bytes

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return min(1 << (self.pieces.bit_length() - 1), WARP_SIZE)

    @property
    def rows_at_once(self) -> int:
        """Rows that all threads copy at once; a lane's next row is as many tokens later."""
        return NUM_THREADS // self.lanes

    @property
    def rows_of_lane(self) -> int:
        return -(-self.tokens // self.rows_at_once)


class FoundRows(NamedTuple):
    """The results of `find_token` for a lane's rows, stage after stage."""

    blocks: Any
    positions: Any


def make_stages(stage: StageShape, lookup: Steps) -> Steps:
    """The device functions that bring rows from global memory to a stage, and from there to registers."""
    config, shape = stage.config, stage.shape
    TOKENS, AT_ONCE, LANES, PIECES = stage.tokens, stage.rows_at_once, stage.lanes, stage.pieces
    K_STRIDE, V_STRIDE, V_GROUP, V_START = stage.k_stride, stage.v_stride, stage.v_group, stage.v_start
    K_JUMP, V_JUMP, NBYTES = AT_ONCE * K_STRIDE, AT_ONCE // 4 * V_GROUP, config.vector_bytes
    K_PER_CHUNK, K_VECTORS = shape.k_per_chunk, shape.k_vectors
    V_PER_CHUNK, V_VECTORS, V_VECTOR = shape.v_per_chunk, shape.v_vectors, shape.v_vector
    WORDS, RING_BYTES = V_VECTOR // 4, stage.ring_bytes
    BY_ROW, SCALES = config.by_row, stage.scales_start
    IS_PADDED = max(K_VECTORS * K_VECTOR, V_STRIDE) > config.row_bytes  # fragments reach past what is copied
    copy = copy_16 if NBYTES == VECTOR_BYTES else copy_8
    load_value = load_shared_words if V_VECTOR == VECTOR_BYTES else load_shared_pair

    @unrolled(stage.rows_of_lane)
    def find_rows(j, found, at, pages, token):
        """Find a lane's rows of a stage, for elements `at` and on of `found`; `token` is that of the first row."""
        found.blocks[at + j], found.positions[at + j] = lookup.find_token(pages, uint32(token + AT_ONCE * j))

    @unrolled(-(-stage.pieces // stage.lanes))
    def copy_pieces(i, k_target, v_target, k_row, v_row, piece, count):
        at = NBYTES * LANES * i
        is_inside = PIECES % LANES == 0 or piece < PIECES - LANES * i
        copy(uint32(k_target + uint32(at)), k_row + at, count, is_inside)
        copy(uint32(v_target + uint32(at)), v_row + at, count, is_inside)

    @unrolled(stage.rows_of_lane)
    def copy_rows(j, slot, found, at, token, pages, k, v, row, piece):
        """Copy a lane's rows of a stage, whose shared address is `slot`.

        The lane begins with a piece of a row, and k and v are the caches from that piece on. Tokens past the last one
        become zeros.
        """
        start = uint32(slot + piece * NBYTES)
        k_target = uint32(start + row * K_STRIDE)
        in_group, group = uint32((row & 3) * V_STRIDE), uint32(uint32(row >> 2) * V_GROUP)
        v_target = uint32(start + V_START + group + in_group)
        block, position = found.blocks[at + j], found.positions[at + j]
        k_row = lookup.address_at(k.address, lookup.row_offset(k, block, position))
        v_row = lookup.address_at(v.address, lookup.row_offset(v, block, position))
        is_there = uint32(token + AT_ONCE * j) <= pages.last
        if TOKENS % AT_ONCE == 0 or row < TOKENS:
            count = uint32(NBYTES if is_there else 0)
            k_target, v_target = uint32(k_target + K_JUMP * j), uint32(v_target + V_JUMP * j)
            copy_pieces(k_target, v_target, k_row, v_row, piece, count)
            if BY_ROW:
                target, count = (
                    uint32(slot + uint32(row << 2) + (SCALES + 4 * AT_ONCE * j)),
                    uint32(4 if is_there else 0),
                )
                copy_4(target, place_of_scale(pages.k_scales, block, position), count, piece == 0)
                copy_4(uint32(target + 4 * TOKENS), place_of_scale(pages.v_scales, block, position), count, piece == 0)

    @unrolled(shape.tiles)
    def read_scales(i, scales, where, t):
        """Load the scales of the rows of a lane's tokens."""
        x = load_shared_words(uint32(where + uint32(t << 4) + 4 * TILE * i))
        assign(scales, 4 * i, (bits_float(x[0]), bits_float(x[1]), bits_float(x[2]), bits_float(x[3])))

    @device_function
    def zero_ring(shared, thread):
        """Store zeros where fragments reach past what is copied."""
        if IS_PADDED:
            at = uint32(thread * VECTOR_BYTES)
            while at < uint32(RING_BYTES):
                store_shared_words(uint32(shared + at), uint32(0), uint32(0), uint32(0), uint32(0))
                at = uint32(at + NUM_THREADS * VECTOR_BYTES)
            cuda.syncthreads()

    @device_function
    def fragment_offsets(g, t):
        """Bytes from the beginning of a stage to a lane's vectors 0 of K and V."""
        k_place = uint32(key_token(g) * K_STRIDE + (t << 4))
        return k_place, uint32(uint32(t * V_GROUP + g * V_VECTOR) + V_START)

    @unrolled(2 * shape.tiles * shape.k_per_chunk)
    def read_keys(i, chunk, words, where):
        """Load a chunk of K of a step as `load_keys` does, from the shared address of the lane's vector 0."""
        token, c = TILE * (i // (2 * K_PER_CHUNK)) + 2 * (i % 2), i // 2 % K_PER_CHUNK
        vector = chunk * K_PER_CHUNK + c
        if vector < K_VECTORS:
            x = load_shared_words(uint32(where + K_STRIDE * token + K_VECTOR * vector))
            assign(words, 4 * i, x)

    @unrolled(4 * shape.tiles * shape.v_per_chunk)
    def read_values(i, chunk, words, where):
        """Load a chunk of V of a step as `load_values` does, from the shared address of the lane's vector 0."""
        at, c = TILE // 4 * V_GROUP * (i // (4 * V_PER_CHUNK)) + V_STRIDE * (i % 4), i // 4 % V_PER_CHUNK
        vector = chunk * V_PER_CHUNK + c
        if vector < V_VECTORS:
            x = load_value(uint32(where + at + 8 * V_VECTOR * vector))
            assign(words, WORDS * i, x)

    return Steps(find_rows, copy_rows, zero_ring, fragment_offsets, read_keys, read_values, read_scales)
