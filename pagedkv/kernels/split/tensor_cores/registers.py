"""The registers of a lane in the inner loops on tensor cores."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...device.intrinsics.thread import local_arrays
from ...device.language import float32, uint32
from ..shape import TensorShape


class SplitRegisters(NamedTuple):
    """Arrays of a lane. Element h of those marked [h] is for head g + 8h."""

    words: Any  # rows of the caches: one buffer, or two
    raw: Any  # accumulators of S
    s: Any  # logits
    o: Any  # accumulators of O
    p: Any  # P, rounded
    p_rest: Any  # the remainder of P, rounded
    shifts: Any  # [h], minus the pivot that exponents are measured from
    sums: Any  # [h], sums of this lane's exponentials
    factors: Any  # [h], by which products are multiplied before logits are modified
    slopes: Any  # [h]
    units: Any  # [h], by which logits are multiplied to be in units of log(2)
    heads: Any  # [h], numbers of the heads
    scales: Any  # of the rows of this lane's tokens: of keys until there are logits, then of values


def make_registers(shape: TensorShape, num_buffers: int) -> Any:
    """The device function ``registers()``, which returns SplitRegisters."""
    each_head, terms_of_p = (shape.head_tiles, float32), (2 * shape.tiles * shape.head_tiles, uint32)
    return local_arrays(
        SplitRegisters,
        words=(num_buffers * shape.buffer, uint32),
        raw=(shape.num_raw, float32),
        s=(shape.num_scores, float32),
        o=(shape.num_o, float32),
        p=terms_of_p,
        p_rest=terms_of_p,
        shifts=each_head,
        sums=each_head,
        factors=each_head,
        slopes=each_head,
        units=each_head,
        heads=(shape.head_tiles, uint32),
        scales=(4 * shape.tiles if shape.config.by_row else 1, float32),
    )
