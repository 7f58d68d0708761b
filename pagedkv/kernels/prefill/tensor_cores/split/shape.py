"""How the kernel that splits keys cuts rows, keys and shared memory: numbers alone."""

from __future__ import annotations

from dataclasses import dataclass

from ....device.warp import WARP_SIZE
from ...config import FEW_ROWS, LONGEST_OF_PARTS, PART
from ..tile import CHUNK_DIMS, KEPT_WORDS, SYSTEM_BYTES, TileShape

PIECE = 32  # tokens of a tile that a warp copies at once: each lane looks up one of them
MOST_PARTS = LONGEST_OF_PARTS // PART  # of a sequence


@dataclass(frozen=True, slots=True)
class SplitShape(TileShape):
    """A tile of query rows that all warps of a thread block have, and for each warp a tile of K and one of V.

    Attributes
    ----------
    config : TensorConfig
    """

    @property
    def num_warps(self) -> int:
        """Warps of a thread block, each with tiles of its own: as many as shared memory has room for."""
        room = self.config.shared_kib * 1024 - SYSTEM_BYTES
        return next((n for n in (4, 2) if self.bytes_of(n) <= room), 1)

    @property
    def row_tiles(self) -> int:
        """One before 9.0, where two of 128 dims spill 364 bytes."""
        return super(SplitShape, self).row_tiles if self.config.architecture >= 9 else 1

    @property
    def rows(self) -> int:
        return self.rows_of_warp

    @property
    def tiles_of_sequence(self) -> int:
        return FEW_ROWS // self.rows

    @property
    def stages(self) -> int:
        return 1

    # ---- who copies what

    @property
    def copiers(self) -> int:
        return WARP_SIZE

    @property
    def all_rows(self) -> int:
        return self.rows + 2 * self.keys * self.num_warps

    @property
    def in_pairs(self) -> bool:
        return False

    @property
    def q_lanes(self) -> int:
        """Lanes that share a row, a power of two; some may have no chunk."""
        return max(1 << (self.chunks - 1).bit_length(), WARP_SIZE // self.rows)

    @property
    def pieces(self) -> int:
        """Pieces of a tile of keys."""
        return self.keys // PIECE

    @property
    def rows_of_thread(self) -> int:
        """Rows of a piece that a lane copies a chunk of."""
        return PIECE // self.rows_at_once

    # ---- shared memory

    @property
    def copied_bytes(self) -> int:
        """Bytes from where a piece is copied to to where the next one is."""
        return PIECE * (self.lanes * CHUNK_DIMS if self.config.is_fp8 else self.row_bytes)

    @property
    def v_start(self) -> int:
        return self.k_start + self.tile_bytes

    @property
    def codes_start(self) -> int:
        return self.k_start + 2 * self.tile_bytes * self.num_warps

    @property
    def codes_bytes(self) -> int:
        """Of K, or of V, of a warp."""
        return self.keys * self.lanes * CHUNK_DIMS if self.config.is_fp8 else 0

    @property
    def shares(self) -> bool:
        """Lanes exchange the places of rows through shared memory, and warps meet at barriers of their own.

        Before 9.0 nvJitLink does not know the lanes of a warp to be together in its loop. There bar.warp.sync and
        shuffles are calls, which half of the registers do not outlive: 36 bytes spill with 128 dims, 148 of fp8.
        """
        return self.config.architecture < 9

    @property
    def asks_sums(self) -> bool:
        """Sums tell whether a pivot has to move: 57 instructions of a tile fewer, and the registers of S while P is
        made. Two row tiles of 128 dims have none to spare (60 bytes spill), nor has the code before 9.0 (20 bytes)."""
        return self.config.architecture >= 9 and (self.config.head_dim <= 64 or self.row_tiles == 1)

    @property
    def slots_start(self) -> int:
        """Where slots begin for 16-bit caches; for fp8 they lie in the tile of V, which is free then."""
        return self.codes_start + 2 * self.codes_bytes * self.num_warps

    @property
    def slot_bytes(self) -> int:
        """A word, or two, for each row of a piece."""
        return (8 if self.config.wide else 4) * PIECE

    @property
    def slots_bytes(self) -> int:
        """Of a warp."""
        return self.pieces * self.slot_bytes if self.shares and not self.config.is_fp8 else 0

    @property
    def kept_start(self) -> int:
        return self.bytes_of(self.num_warps) - 4 * KEPT_WORDS

    def bytes_of(self, num_warps: int) -> int:
        """Shared memory of this many warps: Q, tiles and slots, and the item."""
        of_warp = 2 * (self.tile_bytes + self.codes_bytes) + self.slots_bytes
        return self.q_bytes + of_warp * num_warps + 4 * KEPT_WORDS

    # ---- parts

    def parts_of(self, max_seq_len: int, window: int) -> int:
        """The most parts that rows of a sequence of up to max_seq_len tokens see."""
        seen = min(max_seq_len, window + FEW_ROWS - 1)
        return max(1, min(-(-max_seq_len // PART), (seen - 1) // PART + 2, MOST_PARTS))
