"""Widening the rows of the next step inside the arithmetic of this one, which leaves the units that widen idle."""

from __future__ import annotations

from typing import NamedTuple

from ..code import ELEMENT_BYTES, INT64, Code, Value
from ..rows import Rows
from ..shapes import FLOAT_BYTES, LANES, STEP
from .order import CHUNK_DIMS
from .widen import widen_chunk


class Following(NamedTuple):
    """The rows of the next step, which are whole chunks of `kind`, and where they go."""

    kind: str
    rows: Rows
    target: Value  # the address of the first widened row
    stride: Value  # from a widened row to the next one, in bytes
    wanted: Value  # a bit: there is a next step, whose rows nobody has widened

    @property
    def of_chunk(self) -> int:
        """Vectors of a widened chunk, a power of two."""
        return CHUNK_DIMS[self.kind] // LANES

    def where(self, code: Code, condition: Value) -> Following:
        """The same, wanted only where the condition holds."""
        return self._replace(wanted=code.builder.and_(self.wanted, condition))

    def widen(self, code: Code, first: Value, count: int, vector: Value) -> None:
        """Widen a vector of `count` rows from `first` on.

        A chunk is widened as a whole: each turn of its vectors takes a share of the rows, and one row at least.
        """
        builder, wanted = code.builder, self.wanted
        chunk, turn = self._chunk(code, vector), builder.urem(vector, INT64(self.of_chunk))
        share = max(count // self.of_chunk, 1)
        if count < self.of_chunk:
            wanted = builder.and_(wanted, builder.icmp_signed("<", turn, INT64(count)))
        with builder.if_then(wanted):
            self._widen(code, builder.add(first, code.times(turn, share)), share, chunk)

    def widen_column(self, code: Code, row: Value, first: Value, width: int) -> None:
        """Widen `width` vectors from `first` on of a row, or its chunk in one of the turns that share it."""
        builder, turns = code.builder, INT64(self.of_chunk // width)
        turn = builder.urem(builder.udiv(first, INT64(width)), turns)
        is_own = builder.icmp_signed("==", builder.urem(row, turns), turn)
        with builder.if_then(builder.and_(self.wanted, is_own)):
            self._widen(code, row, 1, self._chunk(code, first))

    def widen_rows(self, code: Code, first: Value, num_vectors: Value) -> None:
        """Widen the rows from `first` on."""
        builder, chunks = code.builder, self._chunk(code, num_vectors)
        with builder.if_then(self.wanted):
            code.repeatedly(
                builder.sub(INT64(STEP), first),
                lambda t: code.repeatedly(chunks, lambda chunk: self._widen(code, builder.add(first, t), 1, chunk)),
            )

    def _chunk(self, code: Code, vector: Value) -> Value:
        return code.builder.udiv(vector, INT64(self.of_chunk))

    def _widen(self, code: Code, first: Value, count: int, chunk: Value) -> None:
        """Widen a chunk of `count` rows from `first` on."""
        builder, dims, rows = code.builder, CHUNK_DIMS[self.kind], self.rows.after(code, first)
        begin, place = code.times(chunk, dims * ELEMENT_BYTES[self.kind]), code.times(chunk, dims * FLOAT_BYTES)
        target = builder.add(builder.add(self.target, builder.mul(first, self.stride)), place)
        for t, to in enumerate(code.rows(target, self.stride, count)):
            for v, widened in enumerate(widen_chunk(code, self.kind, builder.add(rows.at(code, t), begin))):
                code.store(widened, to, FLOAT_BYTES * LANES * v)
