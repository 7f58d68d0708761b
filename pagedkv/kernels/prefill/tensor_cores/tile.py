"""How rows of queries, keys and dims are cut for tensor cores, and where they lie in shared memory; only numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ...device.sizes import WARP_SIZE
from ..config import TensorConfig

CHUNK = 16  # bytes of a copy, and of a row of a matrix that ldmatrix loads
CHUNK_DIMS = 8
SWIZZLED = 128  # bytes of a row in which chunks change places
ITEM_WORDS = 8  # words of the item, which all threads read
SYSTEM_BYTES = 1024  # of each thread block's shared memory, for the system
SMALL_SHARED_KIB = 100  # shared memory of compute capability 8.6, 8.9 and 12.0
FULL_WARPS = 8  # warps of a multiprocessor whose threads have 255 registers each


@dataclass(frozen=True, slots=True)
class TileShape:
    """A tile of query rows and one of keys.

    Attributes
    ----------
    config : TensorConfig
    """

    config: TensorConfig

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows that a warp has; it multiplies each fragment of K and V by all of them.

        With two, reading K and V from shared memory takes less time than the products. Two of 128 dims fill the
        registers, and options of logits need some; with scales of rows, 40 bytes would spill before 9.0.
        """
        config = self.config
        most_dims = 64 if config.by_row and config.architecture < 9 else 128
        return 2 if config.head_dim <= most_dims and not config.modified else 1

    @property
    def num_warps(self) -> int:
        """Warps of a thread block: eight with many dims, where four would convert an fp8 tile for few rows."""
        config = self.config
        return 8 if config.is_coded and config.head_dim > 128 and config.shared_kib > SMALL_SHARED_KIB else 4

    @property
    def min_blocks(self) -> int:
        """Thread blocks of a multiprocessor for which ptxas leaves registers."""
        return FULL_WARPS // self.num_warps

    @property
    def num_threads(self) -> int:
        """Threads of a thread block."""
        return WARP_SIZE * self.num_warps

    @property
    def rows_of_warp(self) -> int:
        return 16 * self.row_tiles

    @property
    def rows(self) -> int:
        """Query rows of a thread block."""
        return self.num_warps * self.rows_of_warp

    @property
    def keys(self) -> int:
        """Keys of a tile.

        32 if options need registers, or if shared memory has no room for two thread blocks with tiles of 64. fp8 with
        more than 128 dims has 32, too: the kernel that splits keys would have fewer warps otherwise, and both must move
        pivots at the same keys.
        """
        config = self.config
        has_room = config.shared_kib > SMALL_SHARED_KIB or not 64 < config.head_dim <= 128
        return 64 if has_room and not config.modified and not (config.is_coded and config.head_dim > 128) else 32

    @property
    def stages(self) -> int:
        """Tiles of K, and of V, in shared memory: two if all thread blocks have room; one for fp8, whose codes wait."""
        room = self.config.shared_kib * 1024 // self.min_blocks - SYSTEM_BYTES
        needed = self.q_bytes + 4 * self.tile_bytes + 4 * ITEM_WORDS
        return 2 if needed <= room and not self.config.is_coded else 1

    # ---- products

    @property
    def k_steps(self) -> int:
        """Steps of 16 dims in Q K^T, and pairs of 8 dims in P V; the last one may reach past the row."""
        return -(-self.config.head_dim // 16)

    @property
    def key_pairs(self) -> int:
        """Pairs of 8 keys in Q K^T, and steps of 16 keys in P V."""
        return self.keys // 16

    # ---- rows in shared memory

    @property
    def row_bytes(self) -> int:
        """Bytes from a row to the next one."""
        return -(-2 * self.config.head_dim // SWIZZLED) * SWIZZLED

    @property
    def q_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of K, or of V."""
        return self.keys * self.row_bytes

    @property
    def k_start(self) -> int:
        return self.q_bytes

    @property
    def v_start(self) -> int:
        return self.k_start + self.stages * self.tile_bytes

    @property
    def codes_start(self) -> int:
        """Where codes of fp8 caches wait for conversion: those of K, then of V, a piece for each thread and row."""
        return self.v_start + self.stages * self.tile_bytes

    @property
    def codes_bytes(self) -> int:
        """Bytes of the codes of K, or of V."""
        return self.keys * self.lanes * self.piece_dims if self.config.is_coded else 0

    @property
    def scales_start(self) -> int:
        """Where the scales of rows are, those of even tiles and then of odd ones: of keys, then of values.

        Behind them are the factors of P of the tile that is used.
        """
        return self.codes_start + 2 * self.codes_bytes

    @property
    def scales_bytes(self) -> int:
        return 20 * self.keys if self.config.by_row else 0

    @property
    def item_start(self) -> int:
        return self.scales_start + self.scales_bytes

    @property
    def nbytes(self) -> int:
        return self.item_start + 4 * ITEM_WORDS

    @property
    def has_gap(self) -> bool:
        """Whether the last step of 16 dims reaches past the row, to a chunk that has to be zero."""
        return self.config.head_dim % 16 != 0

    # ---- who copies what

    @property
    def copiers(self) -> int:
        """Threads that copy a tile of keys together."""
        return self.num_threads

    @property
    def all_rows(self) -> int:
        """Rows in shared memory: of Q, then of K and V."""
        return self.rows + 2 * self.stages * self.keys

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.config.head_dim // CHUNK_DIMS

    @property
    def q_lanes(self) -> int:
        """Lanes that share a row of Q, each with a chunk; a power of two, so some may have none."""
        return max(1 << (self.chunks - 1).bit_length(), self.copiers // self.keys)

    @property
    def q_rows_at_once(self) -> int:
        """Rows of Q that all copiers copy at once; a thread's next row is as many later."""
        return self.copiers // self.q_lanes

    @property
    def in_pairs(self) -> bool:
        """Whether a thread copies 16 codes at once, which become two chunks: fp8 rows of three or more such pieces."""
        return self.config.is_coded and self.config.head_dim % 16 == 0 and self.config.head_dim > 32

    @property
    def piece_dims(self) -> int:
        """Dims of a row of K or V that a thread copies at once."""
        return 2 * CHUNK_DIMS if self.in_pairs else CHUNK_DIMS

    @property
    def pieces_of_row(self) -> int:
        return self.config.head_dim // self.piece_dims

    @property
    def lanes(self) -> int:
        """Lanes that share a row of K or V; a power of two, so some may have no piece."""
        return max(1 << (self.pieces_of_row - 1).bit_length(), 4) if self.in_pairs else self.q_lanes

    @property
    def rows_at_once(self) -> int:
        """Rows of K or V that all copiers copy at once; a thread's next row is as many later."""
        return self.copiers // self.lanes

    @property
    def rows_of_thread(self) -> int:
        """Rows of a tile of K, and of one of V, of which a thread copies a chunk."""
        return self.keys // self.rows_at_once

    @property
    def warp_rows_at_once(self) -> int:
        return WARP_SIZE // self.lanes
