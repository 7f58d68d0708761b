"""Rows, and the course of a sweep over them: the steps of a tile one after the other, and where the rows of each lie.

Addresses that lie in memory name the rows of a cache or of a scratch tile. Steps come in the order in which rows lie:
token after token, and the heads of each, or block after block, the heads of each, and the tokens of each head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .code import CACHE_LINE, INT64, INT_BYTES, Code, Value


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


class Sweep(NamedTuple):
    """What the steps of a tile read, and in which order: the last arguments of both sweeps. Offsets are in bytes."""

    rows: Any  # the address of the addresses of the tile's rows in KV head 0
    offset: Any  # from there to the item's first KV head
    head_stride: Any  # from a KV head to the next one
    next_rows: Any  # the same of the tile that is read next; after the last one, any rows that may be prefetched
    next_offset: Any
    next_head_stride: Any
    count: Any  # tokens of the tile
    num_heads: Any  # KV heads of the item
    num_groups: Any  # of query rows, for each KV head
    head_dim: Any
    run_steps: Any  # of a head before the next head's: those of a block if its tokens lie side by side, else 1
    tile: Any  # room for the widened rows of two steps
    tile_rows: Any  # the address of their addresses


class Place(NamedTuple):
    """A step: of the tile, or, past its last one, of the next tile."""

    begin: Value  # the first step of the run of each head that it belongs to
    head: Value
    inner: Value  # of the head's run
    past: Value  # a bit


class Course:
    """The steps of a tile, in runs: some steps of each head in turn, then the next ones of each head.

    Attributes
    ----------
    num_steps : Value
        Of all heads.
    """

    def __init__(self, code: Code, sweep: Sweep, step_tokens: int) -> None:
        self._code, self._sweep, self._step_tokens = code, sweep, step_tokens
        self._steps = code.builder.sdiv(code.plus(sweep.count, step_tokens - 1), INT64(step_tokens))
        self._longest = code.smaller(sweep.run_steps, self._steps)
        self.num_steps = code.builder.mul(self._steps, sweep.num_heads)

    def place(self, number: Value) -> Place:
        """The step with a number of at most `num_steps`, which is the first one of the next tile."""
        builder = self._code.builder
        of_heads = builder.mul(self._longest, self._sweep.num_heads)
        past = builder.icmp_signed("==", number, self.num_steps)
        number = builder.select(past, INT64(0), number)
        begin = builder.mul(builder.sdiv(number, of_heads), self._longest)
        left, length = builder.srem(number, of_heads), self._length(begin)
        return Place(begin, builder.sdiv(left, length), builder.srem(left, length), past)

    def after(self, place: Place) -> Place:
        """The next step."""
        builder, zero, inner = self._code.builder, INT64(0), self._code.plus(place.inner, 1)
        next_head = builder.icmp_signed("==", inner, self._length(place.begin))
        head = builder.add(place.head, builder.zext(next_head, INT64))
        next_run = builder.icmp_signed("==", head, self._sweep.num_heads)
        begin = builder.add(place.begin, builder.select(next_run, self._longest, zero))
        ends = builder.icmp_signed(">=", begin, self._steps)
        return Place(
            builder.select(ends, zero, begin),
            builder.select(next_run, zero, head),
            builder.select(next_head, zero, inner),
            builder.or_(place.past, ends),
        )

    def _length(self, begin: Value) -> Value:
        """Steps of the runs that begin with a step; the last ones of a tile may be shorter."""
        return self._code.smaller(self._longest, self._code.builder.sub(self._steps, begin))

    def token(self, place: Place) -> Value:
        """The first token of a step, counted from the tile's."""
        return self._code.times(self._code.builder.add(place.begin, place.inner), self._step_tokens)

    def rows(self, place: Place) -> Rows:
        """The rows of a step."""
        builder, sweep, head = self._code.builder, self._sweep, place.head
        own = Rows(sweep.rows, builder.add(sweep.offset, builder.mul(head, sweep.head_stride)))
        later = Rows(sweep.next_rows, builder.add(sweep.next_offset, builder.mul(head, sweep.next_head_stride)))
        rows = Rows(*(builder.select(place.past, x, y) for x, y in zip(later, own, strict=True)))
        return rows.after(self._code, self.token(place))
