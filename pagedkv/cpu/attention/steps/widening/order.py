"""The order in which the dims of a widened row lie: the one that is cheapest to widen to.

Rows are widened in chunks of 64 bytes. Where two 16-bit halves of a word become two vectors, these hold even and odd
dims. Queries and accumulators lie in the same order, so a sum over dims follows it: it depends on the cache's
dtype and head_dim alone, never on the machine.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..code import ELEMENT_BYTES
from ..shapes import LANES

UNIT = 8  # dims of what is left after whole chunks, a few of these
CHUNK_DIMS = {"float32": 16, "float16": 16, "bfloat16": 32, "fp8_e4m3": 64, "fp8_e5m2": 64}
EVEN_ODD = (0, 2, 4, 6, 1, 3, 5, 7)


def chunk_order(kind: str) -> tuple[int, ...]:
    """The dims of a chunk of 64 bytes (32 in float16) as they lie after widening, in vectors of LANES."""
    if kind == "bfloat16":
        return (*range(0, 32, 2), *range(1, 32, 2))
    if ELEMENT_BYTES[kind] == 1:  # each 16 bytes are unpacked into two times 8, and each 8 into even and odd ones
        return tuple(
            16 * quarter + half + i
            for half in (0, 8)
            for parity in (0, 1)
            for quarter in range(4)
            for i in range(parity, 8, 2)
        )
    return tuple(range(LANES))


def unit_order(kind: str) -> tuple[int, ...]:
    """The dims of a unit as they lie after widening."""
    return tuple(range(UNIT)) if kind in ("float32", "float16") else EVEN_ODD


def is_shuffled(kind: str) -> bool:
    """Widened rows are in another order than those of the cache."""
    return unit_order(kind) == EVEN_ODD


@lru_cache(maxsize=64)
def order(kind: str, head_dim: int) -> npt.NDArray[np.int64]:
    """The dim at each place of a widened row, (head_dim,)."""
    dims, chunk, unit = CHUNK_DIMS[kind], np.array(chunk_order(kind)), np.array(unit_order(kind))
    whole = head_dim // dims * dims
    parts = [first + chunk for first in range(0, whole, dims)]
    parts += [first + unit for first in range(whole, head_dim, UNIT)]
    return _frozen(np.concatenate(parts))


@lru_cache(maxsize=64)
def places(kind: str, head_dim: int) -> npt.NDArray[np.int64]:
    """The place of each dim in a widened row, (head_dim,)."""
    return _frozen(np.argsort(order(kind, head_dim)))


def _frozen(array: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    array.flags.writeable = False
    return array
