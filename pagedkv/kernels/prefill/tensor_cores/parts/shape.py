"""How the kernel that splits keys cuts rows, keys and shared memory; only numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ....device.sizes import WARP_SIZE
from ...config import FEW_ROWS, LONGEST_OF_PARTS, PART
from ..tile import CHUNK_DIMS, ITEM_WORDS, SYSTEM_BYTES, TileShape

PIECE = 32  # tokens of a tile that a warp copies at once: each lane looks up one of them
MOST_PARTS = LONGEST_OF_PARTS // PART  # the most parts of a sequence


@dataclass(frozen=True, slots=True)
class PartShape(TileShape):
    """A tile of query rows for all warps of a thread block, and a tile of K and one of V for each warp.

    Attributes
    ----------
    config : TensorConfig
    """

    @property
    def num_warps(self) -> int:
        """Warps of a thread block, as many as shared memory has room for with tiles of their own."""
        room = self.config.shared_kib * 1024 - SYSTEM_BYTES
        return next((n for n in (4, 2) if self.bytes_of(n) <= room), 1)

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows that a warp has: one before 9.0, where two of 128 dims would spill 364 bytes."""
        return super(PartShape, self).row_tiles if self.config.architecture >= 9 else 1

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
        """Bytes from the place that a piece is copied to, to that of the next one."""
        return PIECE * (self.lanes * CHUNK_DIMS if self.config.is_coded else self.row_bytes)

    @property
    def v_start(self) -> int:
        return self.k_start + self.tile_bytes

    @property
    def codes_start(self) -> int:
        return self.k_start + 2 * self.tile_bytes * self.num_warps

    @property
    def codes_bytes(self) -> int:
        """Bytes of a warp's codes of K, or of V."""
        return self.keys * self.lanes * CHUNK_DIMS if self.config.is_coded else 0

    @property
    def through_shared(self) -> bool:
        """Whether lanes exchange the offsets of rows through shared memory, and each warp has a barrier.

        Before 9.0 nvJitLink does not know that the lanes of a warp are together in its loop. It makes calls of
        bar.warp.sync and shuffles, and half of the registers do not survive a call: 36 bytes would spill with 128 dims,
        148 with fp8.
        """
        return self.config.architecture < 9

    @property
    def watches_sums(self) -> bool:
        """Whether sums, rather than maxima, tell that a pivot has to move, which saves 57 instructions of a tile.

        It takes the registers of S while P is computed. Two row tiles of 128 dims have none to spare (60 bytes would
        spill), nor has the code before 9.0 (20 bytes). With scales of rows, what a sum may grow by changes.
        """
        can_watch = not self.config.by_row and self.config.architecture >= 9
        return can_watch and (self.config.head_dim <= 64 or self.row_tiles == 1)

    @property
    def scales_start(self) -> int:
        """Where the scales of rows of each warp are; as in TileShape."""
        return self.slots_start + self.slots_bytes * self.num_warps

    @property
    def slots_start(self) -> int:
        """Where the slots of 16-bit caches begin; those of fp8 lie in the tile of V, which is free then."""
        return self.codes_start + 2 * self.codes_bytes * self.num_warps

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: one word or two for each row of a piece."""
        return (8 if self.config.wide else 4) * PIECE

    @property
    def slots_bytes(self) -> int:
        """Bytes of a warp's slots."""
        return self.pieces * self.slot_bytes if self.through_shared and not self.config.is_coded else 0

    @property
    def item_start(self) -> int:
        return self.bytes_of(self.num_warps) - 4 * ITEM_WORDS

    def bytes_of(self, num_warps: int) -> int:
        """Shared memory of `num_warps` warps: Q, tiles, slots and the item."""
        of_warp = 2 * (self.tile_bytes + self.codes_bytes) + self.slots_bytes + self.scales_bytes
        return self.q_bytes + of_warp * num_warps + 4 * ITEM_WORDS
