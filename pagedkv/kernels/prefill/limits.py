"""The sizes of tiles: what fits into the registers of a thread and the shared memory of a multiprocessor."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import TensorConfig
    from .tensor_cores.split.shape import SplitShape
    from .tensor_cores.tile import TileShape

SYSTEM_BYTES = 1024  # of each thread block's shared memory
SMALL_SHARED_KIB = 100  # of compute capability 8.6, 8.9 and 12.0
# Sequences of up to so many rows (tokens, times query heads of a KV head) and of more than PART tokens are split.
FEW_ROWS = 32
PART = 512  # tokens that one warp takes, of sequences of up to LONGEST_OF_PARTS
LONGEST_OF_PARTS = 2**17
FULL_WARPS = 8  # on a multiprocessor, that 255 registers allow


def num_warps(config: TensorConfig) -> int:
    """Of a thread block. Eight convert an fp8 tile for twice as many rows, where shared memory has room for those; with
    up to 128 dims, four have 128 rows."""
    return 8 if config.is_fp8 and config.head_dim > 128 and config.shared_kib > SMALL_SHARED_KIB else 4


def row_tiles(config: TensorConfig) -> int:
    """With two, reading K and V from shared memory takes less time than the products; with 128 dims, two fill the
    registers, and the options of logits need some."""
    return 2 if config.head_dim <= 128 and not config.modified else 1


def keys(config: TensorConfig) -> int:
    """Logits of 32 keys at a time where options need registers, or where tiles of 64 leave room for one block, or, of
    fp8 with more than 128 dims, for fewer warps that split keys: both kernels then move pivots at the same keys."""
    if config.modified or (config.is_fp8 and config.head_dim > 128):
        return 32
    return 32 if config.shared_kib <= SMALL_SHARED_KIB and 64 < config.head_dim <= 128 else 64


def min_blocks(config: TensorConfig) -> int:
    """Thread blocks on a multiprocessor that ptxas leaves registers for."""
    return FULL_WARPS // num_warps(config)


def stages(shape: TileShape) -> int:
    """Two if two thread blocks have room for them; fp8 rows wait elsewhere."""
    room = shape.config.shared_kib * 1024 // min_blocks(shape.config) - SYSTEM_BYTES
    needed = shape.q_bytes + 4 * shape.tile_bytes + 4 * 8
    return 2 if needed <= room and not shape.config.is_fp8 else 1


def split_warps(shape: SplitShape) -> int:
    """Of a thread block that splits keys, each with tiles of its own: as many as shared memory has room for."""
    room = shape.config.shared_kib * 1024 - SYSTEM_BYTES
    return next((n for n in (4, 2) if shape.bytes_of(n) <= room), 1)


def optimisation(config: TensorConfig) -> int:
    """The level of ptxas. With 128 dims, level 3 spills 52 bytes on 9.0 and 60 on 10.0 (ptxas 13.5), level 1 nothing;
    with 256, level 3 spills nothing and needs fewer instructions."""
    return 1 if row_tiles(config) == 2 and config.head_dim > 64 else 3


def pins_thread(shape: TileShape) -> bool:
    """What follows from the thread's number stays in registers, which saves 30 instructions of a tile; with 128 dims
    and one stage on 8.0, that spills 24 bytes."""
    is_full = row_tiles(shape.config) == 2 and shape.config.head_dim > 64 and shape.keys == 64
    return not is_full or shape.stages == 2 or shape.config.is_fp8


def can_split(config: TensorConfig) -> bool:
    """Before 9.0, even one row tile spills 296 bytes with 256 dims."""
    return config.architecture >= 9 or config.head_dim <= 128


def split_row_tiles(config: TensorConfig) -> int:
    """One before 9.0, where two spill 364 bytes with 128 dims."""
    return row_tiles(config) if config.architecture >= 9 else 1


def split_asks_sums(config: TensorConfig) -> bool:
    """Whether sums tell that a pivot has to move, which saves 57 instructions of a tile and takes the registers of S
    while P is made: with two row tiles of 128 dims, that spills 60 bytes on 9.0, and with one 20 on 8.0, for another
    branch in a loop with calls."""
    return config.architecture >= 9 and (config.head_dim <= 64 or split_row_tiles(config) == 1)


def split_avoids_calls(config: TensorConfig) -> bool:
    """Whether warps meet at barriers of their own and lanes tell each other rows in shared memory: before 9.0, where
    nvJitLink does not know the lanes of a warp to be together in its loop, bar.warp.sync and shuffles are calls there,
    and half of the registers do not outlive one. With 128 dims on 8.0, both spill 36 bytes (148 in fp8) at 255
    registers, bar.warp.sync alone 132 in fp8; barriers and shared memory leave 162 (176 in fp8)."""
    return config.architecture < 9


def split_optimisation(config: TensorConfig) -> int:
    """The level of ptxas where keys are split: with 128 dims, level 3 spills 28 bytes on 9.0, level 1 nothing."""
    return 1 if config.head_dim > 64 else 3
