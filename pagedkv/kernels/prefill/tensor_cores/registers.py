"""What a lane of the kernel on tensor cores has in registers."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...device.intrinsics.thread import local_arrays
from ...device.language import float32, uint32
from .tile import TileShape

KEYS_AHEAD, VALUES_AHEAD = 1, 2  # fragments in flight ahead of the product that uses them


class Registers(NamedTuple):
    """Arrays of a lane. Of rows, element 2m + h is of row g + 8h of the warp's tile m of 16 rows."""

    o: Any  # accumulators of O: 4 for each tile of rows and 8 dims
    s: Any  # those of S, then logits: 4 for each tile of rows and 8 keys
    p: Any  # P, rounded, as operands
    q: Any  # fragments of Q: two steps of 16 dims
    k: Any  # fragments of K in flight
    v: Any
    sums: Any  # [row], of this lane's exponentials
    shifts: Any  # [row], added to logits to make exponents
    maxima: Any  # [row], of this lane's logits of the tile
    factors: Any  # [row], by which sums and O are rescaled where a pivot moves
    positions: Any  # [row], if an option needs them
    heads: Any
    slopes: Any


def make_registers(shape: TileShape) -> Any:
    """The device function ``registers()``."""
    row_tiles = shape.row_tiles
    of_rows = 2 * row_tiles
    options = of_rows if shape.config.modified else 1
    return local_arrays(
        Registers,
        o=(row_tiles * 8 * shape.k_steps, float32),
        s=(row_tiles * 8 * shape.key_pairs, float32),
        p=(row_tiles * 4 * shape.key_pairs, uint32),
        q=(row_tiles * 8, uint32),
        k=(4 * (KEYS_AHEAD + 1), uint32),
        v=(4 * (VALUES_AHEAD + 1), uint32),
        sums=(of_rows, float32),
        shifts=(of_rows, float32),
        maxima=(of_rows, float32),
        factors=(of_rows, float32),
        positions=(options, uint32),
        heads=(options, uint32),
        slopes=(options, float32),
    )
