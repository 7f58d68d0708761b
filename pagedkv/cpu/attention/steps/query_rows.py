"""Loading query rows from q, and storing rows of the result.

Both have their dims in order, in the dtype of q. In between rows are float32, and their dims lie in places
(`dim_order`): four neighbouring places hold four dims of the same eight, the first and the last ones or the even and
the odd ones. Queries of int8 rows are rounded to int16, and their dims stay in order, two in each int32.

    q_kind   the dtype's index in Q_KINDS
    places   int64 (head_dim,) the place of each dim
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .code import ELEMENT_BYTES, FLOAT, FLOAT_BYTES, INT32, INT64, INT_BYTES, SHORT, Code, Value, step, vector
from .halves import to_half
from .widen import EVEN_ODD, UNIT, WIDEN

Q_KINDS = ("float32", "float16", "bfloat16")
HALF_UNIT = UNIT // 2


def make_load_query(*, even_odd: bool) -> Any:
    """The step ``load_query(target, group_rows, query, q_kind, factor, head_dim, places)``.

    It puts a row of q, times the number at `factor`, among the rows of its group.
    """
    dims = _dims(even_odd)

    def emit(
        code: Code,
        target: Value,
        group_rows: Value,
        query: Value,
        q_kind: Value,
        factor: Value,
        head_dim: Value,
        places: Value,
    ) -> None:
        by, stride = code.splat(code.load(factor, FLOAT), UNIT), code.times(group_rows, FLOAT_BYTES)

        def one_unit(kind: str, i: Value) -> None:
            raw = code.load(_unit(code, query, i, kind), vector(UNIT, _element(kind)))
            row = code.builder.fmul(by, WIDEN[kind](code, raw))
            for half, place in zip((dims[:HALF_UNIT], dims[HALF_UNIT:]), _places(code, places, i, dims), strict=True):
                code.store(code.shuffle(row, half), code.builder.add(target, code.builder.mul(place, stride)))

        _for_units(code, q_kind, head_dim, one_unit)

    return step(emit)


def make_round_query() -> Any:
    """The step ``round_query(target, group_rows, query, q_kind, factor, head_dim, row_factor)``.

    It puts a row of q, as int16 against its largest number, among the rows of its group, and stores what the int16 are
    multiplied by, times the number at `factor`: NaN if q is not finite.
    """

    def emit(
        code: Code,
        target: Value,
        group_rows: Value,
        query: Value,
        q_kind: Value,
        factor: Value,
        head_dim: Value,
        row_factor: Value,
    ) -> None:
        builder = code.builder

        def unit(kind: str, i: Value) -> Value:
            return WIDEN[kind](code, code.load(_unit(code, query, i, kind), vector(UNIT, _element(kind))))

        def find(kind: str, i: Value, largest: list[Value]) -> list[Value]:
            return [code.greater(largest[0], code.magnitudes(unit(kind, i)))]

        largest = [code.constant(0, UNIT, INT32)]
        for kind, count in _units_of(code, q_kind, head_dim):
            largest = code.loop(count, largest, partial(find, kind))
        to_short, from_short = code.shares(code.halve(largest[0], code.greater, 1))
        nothing = builder.fsub(from_short, from_short)  # NaN if it is not finite
        by = builder.fmul(builder.fadd(from_short, nothing), code.load(factor, vector(1)))
        code.store(by, row_factor)
        spread = code.repeat(to_short, UNIT)

        def round_unit(kind: str, i: Value) -> None:
            whole = builder.trunc(code.shorts(builder.fmul(unit(kind, i), spread)), vector(UNIT, SHORT))
            place = builder.add(target, builder.mul(i, code.times(group_rows, UNIT * ELEMENT_BYTES["int16"])))
            code.store(builder.bitcast(whole, vector(HALF_UNIT, INT32)), place)

        _for_units(code, q_kind, head_dim, round_unit)

    return step(emit)


def make_store_result(*, even_odd: bool) -> Any:
    """The step ``store_result(target, row, q_kind, factor, head_dim, places)``: a row times the number at `factor`."""
    dims = _dims(even_odd)

    def emit(
        code: Code, target: Value, row: Value, q_kind: Value, factor: Value, head_dim: Value, places: Value
    ) -> None:
        by = code.splat(code.load(factor, FLOAT), UNIT)

        def one_unit(kind: str, i: Value) -> None:
            found = _places(code, places, i, dims)
            at = [code.builder.add(row, code.times(place, FLOAT_BYTES)) for place in found]
            unit = code.joined([code.load(x, vector(HALF_UNIT)) for x in at])
            scaled = code.builder.fmul(by, code.shuffle(unit, [dims.index(dim) for dim in range(UNIT)]))
            code.store(NARROW[kind](code, scaled), _unit(code, target, i, kind))

        _for_units(code, q_kind, head_dim, one_unit)

    return step(emit)


def _dims(even_odd: bool) -> tuple[int, ...]:
    """The dims of a unit in the order of their places."""
    return EVEN_ODD if even_odd else tuple(range(UNIT))


def _element(kind: str) -> Any:
    return FLOAT if kind == "float32" else SHORT


def _unit(code: Code, row: Value, i: Value, kind: str) -> Value:
    """The address of unit i of a row in the dtype of q."""
    return code.builder.add(row, code.times(i, UNIT * ELEMENT_BYTES[kind]))


def _places(code: Code, places: Value, i: Value, dims: tuple[int, ...]) -> list[Value]:
    """The places where the two halves of unit i begin."""
    at = code.builder.add(places, code.times(i, UNIT * INT_BYTES))
    return [code.load(at, INT64, dims[half] * INT_BYTES) for half in (0, HALF_UNIT)]


def _for_units(code: Code, q_kind: Value, head_dim: Value, one_unit: Callable[[str, Value], None]) -> None:
    """Emit ``one_unit(kind, i)`` for all units i of a row."""
    for kind, count in _units_of(code, q_kind, head_dim):
        code.repeatedly(count, partial(one_unit, kind))


def _units_of(code: Code, q_kind: Value, head_dim: Value) -> Iterator[tuple[str, Value]]:
    """Each dtype of q with the number of its units: those of a row if it is q's, otherwise 0."""
    units, nothing = code.builder.sdiv(head_dim, INT64(UNIT)), INT64(0)
    for index, kind in enumerate(Q_KINDS):
        is_it = code.builder.icmp_signed("==", q_kind, INT64(index))
        yield kind, code.builder.select(is_it, units, nothing)


def _to_bfloat16(code: Code, row: Value) -> Value:
    """The bits of float32 rounded to bfloat16, to nearest even; a NaN keeps its sign."""
    builder, lanes = code.builder, row.type.count

    def number(value: int) -> Value:
        return code.constant(value, lanes, INT32)

    words = builder.bitcast(row, vector(lanes, INT32))
    upper = builder.lshr(words, number(16))
    odd = builder.and_(upper, number(1))
    rounded = builder.lshr(builder.add(words, builder.add(odd, number(0x7FFF))), number(16))
    quiet = builder.or_(upper, number(0x7FC0))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", row, row), quiet, rounded), vector(lanes, SHORT))


NARROW: dict[str, Callable[[Code, Value], Value]] = {
    "float32": lambda _, row: row,
    "float16": to_half,
    "bfloat16": _to_bfloat16,
}
