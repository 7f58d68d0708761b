"""How rows, steps and query heads of the split kernel on tensor cores are cut into fragments; only numbers."""

from __future__ import annotations

from dataclasses import dataclass

from .config import VECTOR_BYTES, SplitConfig

TILE = 16  # tokens
K_VECTOR = 64  # bytes of a row that the four lanes of a token load at once
CHUNK = 256  # bytes of a row in a buffer: one holds K and one V of 128 dims of 16 bits
MOST_BLOCKS = 4  # the most thread blocks to ask for on a multiprocessor
OTHER_REGISTERS = 40  # registers of a thread, at least, beside O and buffers
LOOP_REGISTERS = 8  # more, at least, for a loop over units
FRAGMENT_BYTES = 512  # of a warp's fragment; warps with the same heads share one copy in shared memory


@dataclass(frozen=True, slots=True)
class TensorShape:
    """The sizes that follow from a config."""

    config: SplitConfig

    @property
    def operand(self) -> str:
        """The dtype that the tensor cores multiply; fp8 and int8 are exact in float16."""
        return "bfloat16" if self.config.kv_kind == "bfloat16" else "float16"

    @property
    def is_coded(self) -> bool:
        """Whether rows have 8 bits an element, which are widened to the operand."""
        return self.config.kv_bytes == 1

    @property
    def tiles(self) -> int:
        """Tiles of a step: two for short rows, so that enough is in flight."""
        return 2 if self.config.row_bytes <= 128 else 1

    @property
    def step(self) -> int:
        """Tokens of a step."""
        return TILE * self.tiles

    # ---- rows

    @property
    def k_vectors(self) -> int:
        """Vectors of K per lane and row; the last one may reach past the row."""
        return -(-self.config.row_bytes // K_VECTOR)

    @property
    def v_vector(self) -> int:
        """Bytes of a vector of V: 16, or 8 where that wastes less."""
        padded = -(-self.config.row_bytes // 128) * 128
        is_whole = self.config.vector_bytes == VECTOR_BYTES and padded == self.k_vectors * K_VECTOR
        return 16 if is_whole else 8

    @property
    def v_vectors(self) -> int:
        """Vectors of V per lane and row for one warp; the last one may reach past the row."""
        return -(-self.config.row_bytes // (8 * self.v_vector * self.config.warps_for_dims))

    @property
    def v_dims(self) -> int:
        """Elements of a vector of V."""
        return self.v_vector // self.config.kv_bytes

    @property
    def num_chunks(self) -> int:
        return -(-self.config.row_bytes // CHUNK)

    @property
    def k_per_chunk(self) -> int:
        return self.k_vectors if self.num_chunks == 1 else CHUNK // K_VECTOR

    @property
    def v_per_chunk(self) -> int:
        return -(-self.v_vectors // self.num_chunks)

    @property
    def buffer(self) -> int:
        """Registers of a buffer."""
        return self.tiles * max(8 * self.k_per_chunk, self.v_vector * self.v_per_chunk)

    # ---- query heads

    @property
    def head_tiles(self) -> int:
        """Groups of 8 heads: heads g, and g + 8."""
        return 1 if self.config.heads_of_warp <= 8 else 2

    @property
    def is_normalised(self) -> bool:
        """Whether each head of q is brought into the range of float16 by a power of two."""
        return self.config.q_kind != self.operand

    @property
    def is_folded(self) -> bool:
        """Whether a fragment of Q holds two k16 steps."""
        return self.head_tiles == 1

    @property
    def k_steps(self) -> int:
        """k16 steps in a vector of K."""
        return 4 if self.is_coded else 2

    @property
    def q_per_vector(self) -> int:
        """Fragments of Q for a vector of K."""
        return self.k_steps // 2 if self.is_folded else self.k_steps

    @property
    def q_fragments(self) -> int:
        return self.k_vectors * self.q_per_vector

    @property
    def q_bytes(self) -> int:
        """Shared memory of the fragments of a warp's heads."""
        return FRAGMENT_BYTES * self.q_fragments

    # ---- accumulators

    @property
    def score_sets(self) -> int:
        """Accumulators for each product of S."""
        return 2 if self.is_folded else 1

    @property
    def num_products(self) -> int:
        """mma of O^T for 8 heads, each of 16 dims."""
        return self.v_vectors * self.v_dims // 2

    # ---- arrays of a lane: how many elements

    @property
    def num_raw(self) -> int:
        return 8 * self.tiles * self.score_sets

    @property
    def num_scores(self) -> int:
        return 4 * self.tiles * self.head_tiles

    @property
    def num_o(self) -> int:
        return 4 * self.num_products * self.head_tiles

    @property
    def registers(self) -> int:
        """Registers of O and of the buffers of rows."""
        return self.num_o + 2 * self.buffer

    @property
    def min_blocks(self) -> int:
        """Thread blocks on a multiprocessor to ask for: n of them leave 512 / n registers for each thread.

        The linker takes fewer while these spill. Two have enough in flight if rows wait in shared memory.
        """
        return 2 if self.config.staged else self._blocks_beside(OTHER_REGISTERS)

    @property
    def is_persistent(self) -> bool:
        """Whether thread blocks take units in turn: not where what they keep from one to the next costs one of them.

        Before 9.0, 140 bytes would spill at D = 128, G = 8.
        """
        keep_blocks = self.config.staged or self._blocks_beside(OTHER_REGISTERS + LOOP_REGISTERS) == self.min_blocks
        return self.config.architecture >= 9 and keep_blocks

    def _blocks_beside(self, other: int) -> int:
        return max(2, min(MOST_BLOCKS, 512 // (self.registers + other)))
