"""Steps of the split kernel for many query heads: rows of the caches in shared memory, for all warps of a thread block.

A stage is the tokens that all teams take in one turn, a step for each, and a ring of stages is being copied while one
is in use. The copies (cp.async) take no registers, and each byte is asked for once.

Lanes read 16 bytes each, 8 lanes of a warp at a time; these have two neighbouring g and all t. Of K they want 64 bytes
of two neighbouring tokens: rows are an odd number of 64 bytes apart. Of V they want 32 bytes of four tokens of which
each is 4 after the one before: every 4 rows are followed by a gap, so that they are 32 bytes and whole passes over the
banks apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import cuda, uint32

from ..device.intrinsics import assign, for_each
from ..device.source import device_function
from ..device.tensor_intrinsics import copy_8, copy_16, load_shared_pair, load_shared_words, store_shared_words
from .config import NUM_THREADS, VECTOR_BYTES, WARP_SIZE, SplitConfig
from .fragments import key_token
from .pages import make_address_at, make_find_token, make_row_offset
from .shape import K_VECTOR, TILE, TensorShape

BANKS_BYTES = 128  # of one pass over the banks
IN_FLIGHT = 64 * 1024  # bytes on a multiprocessor
MOST_AHEAD = 8  # stages: of short rows


@dataclass(frozen=True, slots=True)
class StageShape:
    """Where things lie in shared memory: the ring of stages, then Q. The sums take their place.

    Attributes
    ----------
    config : SplitConfig
    """

    config: SplitConfig

    @property
    def shape(self) -> TensorShape:
        return TensorShape(self.config)

    @property
    def tokens(self) -> int:
        return self.config.num_teams * self.shape.step

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
    def stage_bytes(self) -> int:
        return self.v_start + self.tokens // 4 * self.v_group

    @property
    def num_stages(self) -> int:
        """One in use, and those in flight: for IN_FLIGHT bytes of all thread blocks of a multiprocessor."""
        ahead = -(-IN_FLIGHT // (self.shape.min_blocks * self.stage_bytes))
        return 1 + min(max(2, ahead), MOST_AHEAD)

    @property
    def ring_bytes(self) -> int:
        return self.num_stages * self.stage_bytes

    @property
    def nbytes(self) -> int:
        """Of the ring and Q."""
        return self.ring_bytes + self.config.head_shares * self.shape.q_bytes

    @property
    def is_padded(self) -> bool:
        """Fragments have more than is copied."""
        return max(self.shape.k_vectors * K_VECTOR, self.v_stride) > self.config.row_bytes

    # ---- who copies what

    @property
    def pieces(self) -> int:
        """Pieces of a row that a lane copies at once: 16 bytes, or 8 where rows are no multiples of 16."""
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


def make_find_rows(config: SplitConfig, stage: StageShape) -> Any:
    """The device function ``find_rows(blocks, positions, goods, at, token, ...)``: where a lane's rows of a stage are.

    token is that of the lane's first row; those after it go to elements at, at + 1 and so on, as of `find_token`.
    """
    ROWS, AT_ONCE = stage.rows_of_lane, stage.rows_at_once
    find_token = make_find_token(config)

    @device_function
    def find_row(j, blocks, positions, goods, at, token, table, last, num_blocks, report, seq):
        found = find_token(table, uint32(token + uint32(AT_ONCE * j)), last, num_blocks, report, seq)
        blocks[at + j], positions[at + j], goods[at + j] = found

    @device_function
    def find_rows(blocks, positions, goods, at, token, table, last, num_blocks, report, seq):
        for_each(find_row, ROWS, (blocks, positions, goods, at, token, table, last, num_blocks, report, seq))

    return find_rows


def make_copy_rows(config: SplitConfig, stage: StageShape) -> Any:
    """The device function ``copy_rows(slot, blocks, positions, goods, at, token, ...)``: a lane's rows of a stage.

    slot is the shared address of the stage; `row` and `piece` say what is the lane's first piece, and k_lane and v_lane
    are its addresses in the rows at offset 0. Tokens past the end, and those of refused blocks, become zeros.
    """
    TOKENS, ROWS, AT_ONCE = stage.tokens, stage.rows_of_lane, stage.rows_at_once
    LANES, PIECES, NBYTES = stage.lanes, stage.pieces, config.vector_bytes
    PIECES_OF_LANE = -(-stage.pieces // stage.lanes)
    K_STRIDE, V_STRIDE, V_GROUP, V_START = stage.k_stride, stage.v_stride, stage.v_group, stage.v_start
    K_JUMP, V_JUMP = AT_ONCE * K_STRIDE, AT_ONCE // 4 * V_GROUP
    row_offset, address_at = make_row_offset(config), make_address_at(config)
    copy = copy_16 if NBYTES == VECTOR_BYTES else copy_8

    @device_function
    def copy_pieces(i, k_target, v_target, k_row, v_row, piece, count):
        at = NBYTES * LANES * i
        is_inside = PIECES % LANES == 0 or piece < PIECES - LANES * i
        copy(uint32(k_target + uint32(at)), k_row + at, count, is_inside)
        copy(uint32(v_target + uint32(at)), v_row + at, count, is_inside)

    @device_function
    def copy_row(
        j, k_target, v_target, blocks, positions, goods, at, token, last, k_lane, v_lane, k_block_stride,
        k_token_stride, v_block_stride, v_token_stride, row, piece,
    ):  # fmt: skip
        block, position = blocks[at + j], positions[at + j]
        k_row = address_at(k_lane, row_offset(block, position, k_block_stride, k_token_stride))
        v_row = address_at(v_lane, row_offset(block, position, v_block_stride, v_token_stride))
        is_there = goods[at + j] and uint32(token + uint32(AT_ONCE * j)) <= last
        if TOKENS % AT_ONCE == 0 or row < TOKENS:
            count = uint32(NBYTES if is_there else 0)
            k_target, v_target = uint32(k_target + uint32(K_JUMP * j)), uint32(v_target + uint32(V_JUMP * j))
            for_each(copy_pieces, PIECES_OF_LANE, (k_target, v_target, k_row, v_row, piece, count))

    @device_function
    def copy_rows(
        slot, blocks, positions, goods, at, token, last, k_lane, v_lane, k_block_stride, k_token_stride,
        v_block_stride, v_token_stride, row, piece,
    ):  # fmt: skip
        start = uint32(slot + uint32(piece * uint32(NBYTES)))
        k_target = uint32(start + uint32(row * uint32(K_STRIDE)))
        in_group = uint32(uint32(row & uint32(3)) * uint32(V_STRIDE))
        group = uint32(uint32(row >> uint32(2)) * uint32(V_GROUP))
        v_target = uint32(uint32(uint32(start + uint32(V_START)) + group) + in_group)
        for_each(
            copy_row,
            ROWS,
            (
                k_target, v_target, blocks, positions, goods, at, token, last, k_lane, v_lane, k_block_stride,
                k_token_stride, v_block_stride, v_token_stride, row, piece,
            ),
        )  # fmt: skip

    return copy_rows


def make_zero_ring(stage: StageShape) -> Any:
    """The device function ``zero_ring(shared, thread)``: zeros where fragments have more than is copied."""
    RING_BYTES, IS_PADDED = stage.ring_bytes, stage.is_padded

    @device_function
    def zero_ring(shared, thread):
        if IS_PADDED:
            at = uint32(thread * uint32(VECTOR_BYTES))
            while at < uint32(RING_BYTES):
                store_shared_words(uint32(shared + at), uint32(0), uint32(0), uint32(0), uint32(0))
                at = uint32(at + uint32(NUM_THREADS * VECTOR_BYTES))
            cuda.syncthreads()

    return zero_ring


def make_places(stage: StageShape) -> Any:
    """The device function ``places(team, g, t)``: where in a stage a lane's vectors 0 of K and V are, in bytes."""
    STEP, K_STRIDE, V_GROUP, V_START = stage.shape.step, stage.k_stride, stage.v_group, stage.v_start
    V_VECTOR = stage.shape.v_vector

    @device_function
    def places(team, g, t):
        token = uint32(uint32(team * uint32(STEP)) + key_token(g))
        k_place = uint32(uint32(token * uint32(K_STRIDE)) + uint32(t << 4))
        group = uint32(uint32(team * uint32(STEP // 4)) + t)
        v_place = uint32(uint32(group * uint32(V_GROUP)) + uint32(g * uint32(V_VECTOR)))
        return k_place, uint32(v_place + uint32(V_START))

    return places


def make_read_keys(stage: StageShape) -> Any:
    """The device function ``read_keys(chunk, words, where)``: a chunk of K of a step, as `load_keys` does.

    where is the shared address of the lane's vector 0 of its first token.
    """
    shape, K_STRIDE = stage.shape, stage.k_stride
    PER_CHUNK, VECTORS = shape.k_per_chunk, shape.k_vectors
    ALL_VECTORS = 2 * shape.tiles * shape.k_per_chunk

    @device_function
    def read_vector(i, chunk, words, where):
        token, c = TILE * (i // (2 * PER_CHUNK)) + 2 * (i % 2), i // 2 % PER_CHUNK
        vector = chunk * PER_CHUNK + c
        if vector < VECTORS:
            x = load_shared_words(uint32(where + uint32(K_STRIDE * token + K_VECTOR * vector)))
            assign(words, 4 * i, x)

    @device_function
    def read_keys(chunk, words, where):
        for_each(read_vector, ALL_VECTORS, (chunk, words, where))

    return read_keys


def make_read_values(stage: StageShape) -> Any:
    """The device function ``read_values(chunk, words, where)``: a chunk of V of a step, as `load_values` does.

    where is the shared address of the lane's vector 0 of token 4t.
    """
    shape, V_STRIDE, V_GROUP = stage.shape, stage.v_stride, stage.v_group
    PER_CHUNK, VECTORS, V_VECTOR, WORDS = shape.v_per_chunk, shape.v_vectors, shape.v_vector, shape.v_vector // 4
    ALL_VECTORS = 4 * shape.tiles * shape.v_per_chunk
    load = load_shared_words if shape.v_vector == VECTOR_BYTES else load_shared_pair

    @device_function
    def read_vector(i, chunk, words, where):
        at, c = TILE // 4 * V_GROUP * (i // (4 * PER_CHUNK)) + V_STRIDE * (i % 4), i // 4 % PER_CHUNK
        vector = chunk * PER_CHUNK + c
        if vector < VECTORS:
            x = load(uint32(where + uint32(at + 8 * V_VECTOR * vector)))
            assign(words, WORDS * i, x)

    @device_function
    def read_values(chunk, words, where):
        for_each(read_vector, ALL_VECTORS, (chunk, words, where))

    return read_values
