"""How rows of queries, keys and dims are cut for warpgroups, and where they lie in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from ....device.intrinsics.warpgroup import GROUP, ROW
from ...config import TensorConfig
from ..tile import CHUNK, ITEM_WORDS, SYSTEM_BYTES, TileShape

NUM_WARPGROUPS, WARPS, ROWS = 2, 4, 64  # warps and rows of a warpgroup
PANEL_DIMS, PANEL_CHUNKS = 64, 8
SLOT_BYTES, NUMBER_AT = 4 * ITEM_WORDS, 24  # of an item in shared memory, and where in it its number is
# With 64 dims, 32 heads and G = 4, an H200 reaches 326 TFLOP/s by this kernel, and 330 by mma.sync.
DIMS = (128, 256)


def takes(config: TensorConfig) -> bool:
    """Whether the kernel takes a config: 16-bit caches, head dims at which it is the faster one, and no score_mod.

    A score_mod may end up as a call, and before a call ptxas would wait for all products.
    """
    return config.head_dim in DIMS and config.kv_kind == config.q_kind and config.score_mod is None


@dataclass(frozen=True, slots=True)
class WgmmaShape(TileShape):
    """A tile of query rows and one of keys.

    Each is cut into panels of 64 dims: rows of 128 bytes, one after the other, and then the next panel.
    """

    @property
    def row_tiles(self) -> int:
        return 1

    @property
    def num_warps(self) -> int:
        return NUM_WARPGROUPS * WARPS

    @property
    def keys(self) -> int:
        """Keys of a tile: fewer with 256 dims, where O takes 128 registers, and with options, whose code is long.

        For 80 keys Q K^T reads nine tenths of what shared memory can give meanwhile, for 64 all of it.
        """
        if self.config.modified:
            return 64
        return 128 if self.config.head_dim <= 128 else 80

    @property
    def nbytes(self) -> int:
        """Two slots for items: one that is computed, and the next one."""
        return self.item_start + 2 * SLOT_BYTES

    @property
    def stages(self) -> int:
        """Three where shared memory has room for them, so that warpgroups may be half a tile apart; else two."""
        room = self.config.shared_kib * 1024 - SYSTEM_BYTES
        return 3 if self.q_bytes + 6 * self.tile_bytes + 2 * SLOT_BYTES <= room else 2

    # ---- rows in shared memory

    @property
    def stored_start(self) -> int:
        """Where rows of O stand before they are stored: in the second stage of K, which the next item uses later."""
        return self.k_start + self.tile_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of 8 rows of O, which a warp stores at once."""
        return 8 * self.chunks * CHUNK

    @property
    def row_bytes(self) -> int:
        return ROW

    @property
    def panels(self) -> int:
        return self.config.head_dim // PANEL_DIMS

    @property
    def q_panel_bytes(self) -> int:
        return self.rows * ROW

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel of K, or of V."""
        return self.keys * ROW

    @property
    def q_bytes(self) -> int:
        return self.panels * self.q_panel_bytes

    @property
    def tile_bytes(self) -> int:
        return self.panels * self.panel_bytes

    # ---- products: bytes from the first step of 16 along k to each

    @property
    def q_steps(self) -> tuple[int, ...]:
        return tuple(_step_of_row(i, self.q_panel_bytes) for i in range(self.k_steps))

    @property
    def key_steps(self) -> tuple[int, ...]:
        return tuple(_step_of_row(i, self.panel_bytes) for i in range(self.k_steps))

    @property
    def value_steps(self) -> tuple[int, ...]:
        return tuple(2 * GROUP * i for i in range(self.key_pairs))


class GroupShape(WgmmaShape):
    """What one warpgroup copies: its own rows of Q, and half of each tile of keys."""

    __slots__ = ()

    @property
    def num_warps(self) -> int:
        return WARPS

    @property
    def keys(self) -> int:
        return WgmmaShape(self.config).keys // NUM_WARPGROUPS


def _step_of_row(i: int, panel_bytes: int) -> int:
    panel, step = divmod(i, PANEL_CHUNKS // 2)
    return panel * panel_bytes + step * 2 * CHUNK
