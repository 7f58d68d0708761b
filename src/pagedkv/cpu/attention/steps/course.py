"""The course of a sweep: the steps of a tile one after the other, and where the rows of each lie.

Steps come token after token, and the heads of each, or head after head: the order in which rows lie in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .code import INT64, Code, Value
from .rows import Rows

if TYPE_CHECKING:
    from .sweep import Sweep


class Place(NamedTuple):
    """A step: of the tile, or, past its last one, of the next tile."""

    outer: Value
    inner: Value
    past: Value  # a bit


class Course:
    """The steps of a tile.

    Attributes
    ----------
    num_steps : Value
        Of all heads.
    """

    def __init__(self, code: Code, sweep: Sweep, step_tokens: int) -> None:
        builder = code.builder
        steps = builder.sdiv(code.plus(sweep.count, step_tokens - 1), INT64(step_tokens))
        self._code, self._sweep, self._step_tokens = code, sweep, step_tokens
        self._by_token = builder.icmp_signed("!=", sweep.token_major, INT64(0))
        self._outer_count = builder.select(self._by_token, steps, sweep.num_heads)
        self._inner_count = builder.select(self._by_token, sweep.num_heads, steps)
        self.num_steps = builder.mul(steps, sweep.num_heads)

    def place(self, number: Value) -> Place:
        """The step with a number of at most `num_steps`, which is the first one of the next tile."""
        builder = self._code.builder
        outer, inner = builder.sdiv(number, self._inner_count), builder.srem(number, self._inner_count)
        past = builder.icmp_signed("==", outer, self._outer_count)
        return Place(builder.select(past, INT64(0), outer), inner, past)

    def after(self, place: Place) -> Place:
        """The next step."""
        builder, inner = self._code.builder, self._code.plus(place.inner, 1)
        wraps = builder.icmp_signed("==", inner, self._inner_count)
        outer = builder.add(place.outer, builder.zext(wraps, INT64))
        ends = builder.icmp_signed("==", outer, self._outer_count)
        return Place(
            builder.select(ends, INT64(0), outer),
            builder.select(wraps, INT64(0), inner),
            builder.or_(place.past, ends),
        )

    def head(self, place: Place) -> Value:
        """The KV head of a step."""
        return self._code.builder.select(self._by_token, place.inner, place.outer)

    def token(self, place: Place) -> Value:
        """The first token of a step, counted from the tile's."""
        step = self._code.builder.select(self._by_token, place.outer, place.inner)
        return self._code.times(step, self._step_tokens)

    def rows(self, place: Place) -> Rows:
        """The rows of a step."""
        builder, sweep, head = self._code.builder, self._sweep, self.head(place)
        own = Rows(sweep.rows, builder.add(sweep.offset, builder.mul(head, sweep.head_stride)))
        later = Rows(sweep.next_rows, builder.add(sweep.next_offset, builder.mul(head, sweep.next_head_stride)))
        rows = Rows(*(builder.select(place.past, x, y) for x, y in zip(later, own, strict=True)))
        return rows.after(self._code, self.token(place))
