"""Rows of a cache or of a scratch tile, named by addresses that lie in memory, and prefetching them."""

from __future__ import annotations

from typing import NamedTuple

from .code import INT64, Code, Value
from .shapes import CACHE_LINE, INT_BYTES


class Rows(NamedTuple):
    """Row t begins at the int64 at addresses + 8 * t, plus an offset in bytes."""

    addresses: Value
    offset: Value

    def at(self, code: Code, t: int) -> Value:
        """The address of row t."""
        return code.builder.add(code.load(self.addresses, INT64, t * INT_BYTES), self.offset)

    def after(self, code: Code, t: Value) -> Rows:
        """The rows from t on."""
        return Rows(code.builder.add(self.addresses, code.times(t, INT_BYTES)), self.offset)


class Ahead(NamedTuple):
    """Rows that a later step reads, and the bytes of a dim in them."""

    rows: Rows
    item: int


def prefetch_turn(code: Code, ahead: Ahead, first: Value, count: int, turn: Value, dims: int) -> None:
    """Prefetch the part of `count` rows from `first` on that a turn of `dims` dims reads.

    Where that is less than a line, each turn takes its share of the rows, and their whole line; where a line has more
    turns than there are rows, several turns take the same row.
    """
    builder, size = code.builder, dims * ahead.item
    begin = code.times(turn, size)
    if size < CACHE_LINE:
        turns = CACHE_LINE // size
        share = builder.udiv(code.times(builder.and_(turn, INT64(turns - 1)), count), INT64(turns))
        first, begin = builder.add(first, share), builder.and_(begin, INT64(-CACHE_LINE))
        count = max(1, count // turns)
    rows = ahead.rows.after(code, first)
    for t in range(count):
        place = builder.add(rows.at(code, t), begin)
        for line in range(0, size, CACHE_LINE):
            code.prefetch(place, line)
