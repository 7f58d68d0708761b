"""The order in which a pass over a tile takes its steps, and the addresses of the rows of each step.

A pass goes through rows in the order in which they lie in memory: token after token, and the heads of each, or block
after block, the heads of each, and the tokens of each head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .code import CACHE_LINE, INT64, INT_BYTES, Code, Value


class RowAddresses(NamedTuple):
    """Rows of a cache or of a scratch tile: row t begins at the int64 at addresses + 8 * t, plus an offset."""

    addresses: Value
    offset: Value  # in bytes

    def at(self, code: Code, t: int) -> Value:
        """The address of row t."""
        return code.builder.add(code.load(self.addresses, INT64, t * INT_BYTES), self.offset)

    def after(self, code: Code, t: Value) -> RowAddresses:
        """The rows from t on."""
        return RowAddresses(code.builder.add(self.addresses, code.times(t, INT_BYTES)), self.offset)


class RowsToPrefetch(NamedTuple):
    """The rows of a later step."""

    rows: RowAddresses
    item: int  # bytes of a dim


def prefetch_turn(code: Code, to_prefetch: RowsToPrefetch, first: Value, count: int, turn: Value, dims: int) -> None:
    """Prefetch the part of `count` rows from `first` on that a turn of `dims` dims reads.

    If that is less than a cache line, each turn prefetches a share of the rows, whole lines; if a line has more turns
    than there are rows, several turns prefetch the same row.
    """
    builder, size = code.builder, dims * to_prefetch.item
    begin = code.times(turn, size)
    if size < CACHE_LINE:
        turns = CACHE_LINE // size
        share = builder.udiv(code.times(builder.and_(turn, INT64(turns - 1)), count), INT64(turns))
        first, begin = builder.add(first, share), builder.and_(begin, INT64(-CACHE_LINE))
        count = max(1, count // turns)
    rows = to_prefetch.rows.after(code, first)
    for t in range(count):
        place = builder.add(rows.at(code, t), begin)
        for line in range(0, size, CACHE_LINE):
            code.prefetch(place, line)


class TilePass(NamedTuple):
    """One pass over a tile: which rows its steps read, for which heads and query rows, and in which order."""

    rows: Any  # the address of the addresses of the tile's rows in KV head 0
    offset: Any  # bytes from there to the work item's first KV head
    head_stride: Any  # bytes from a KV head to the next one
    next_rows: Any  # the same of the tile that is read next; after the last one, any rows that may be prefetched
    next_offset: Any
    next_head_stride: Any
    count: Any  # tokens of the tile
    num_heads: Any  # KV heads of the work item
    num_groups: Any  # groups of query rows of each KV head
    head_dim: Any
    run_steps: Any  # steps of a head before the next head's: those of a block if its tokens lie side by side, else 1
    tile: Any  # the address of room for the widened rows of two steps
    tile_rows: Any  # the address of their addresses
    # Of keys of int8, addresses of float32; 0 otherwise.
    key_factors: Any  # (heads, TILE) the factors of the tile's keys, from the work item's first KV head on
    row_factors: Any  # (rows,) those of the query rows


class StepPosition(NamedTuple):
    """Where a step stands in the order of a tile, or, after the last one, in that of the next tile."""

    begin: Value  # the first step of the run that it belongs to
    head: Value  # the KV head
    inner: Value  # the steps of this head and run before it
    past: Value  # a bit: the step is the next tile's


class StepOrder:
    """The order of a tile's steps: a run of steps of each head in turn, then the next run of each head.

    Attributes
    ----------
    num_steps : Value
        The steps of all heads.
    """

    def __init__(self, code: Code, tile_pass: TilePass, step_tokens: int) -> None:
        self._code, self._pass, self._step_tokens = code, tile_pass, step_tokens
        self._steps = code.builder.sdiv(code.plus(tile_pass.count, step_tokens - 1), INT64(step_tokens))
        self._longest = code.smaller(tile_pass.run_steps, self._steps)
        self.num_steps = code.builder.mul(self._steps, tile_pass.num_heads)

    def position(self, number: Value) -> StepPosition:
        """The position of a step by its number; `num_steps` is the first step of the next tile."""
        builder = self._code.builder
        of_heads = builder.mul(self._longest, self._pass.num_heads)
        past = builder.icmp_signed("==", number, self.num_steps)
        number = builder.select(past, INT64(0), number)
        begin = builder.mul(builder.sdiv(number, of_heads), self._longest)
        left, length = builder.srem(number, of_heads), self._run_length(begin)
        return StepPosition(begin, builder.sdiv(left, length), builder.srem(left, length), past)

    def after(self, step: StepPosition) -> StepPosition:
        """The position of the next step."""
        builder, zero, inner = self._code.builder, INT64(0), self._code.plus(step.inner, 1)
        next_head = builder.icmp_signed("==", inner, self._run_length(step.begin))
        head = builder.add(step.head, builder.zext(next_head, INT64))
        next_run = builder.icmp_signed("==", head, self._pass.num_heads)
        begin = builder.add(step.begin, builder.select(next_run, self._longest, zero))
        ends = builder.icmp_signed(">=", begin, self._steps)
        return StepPosition(
            builder.select(ends, zero, begin),
            builder.select(next_run, zero, head),
            builder.select(next_head, zero, inner),
            builder.or_(step.past, ends),
        )

    def _run_length(self, begin: Value) -> Value:
        """The steps of a run by its first step; the last runs of a tile may be shorter."""
        return self._code.smaller(self._longest, self._code.builder.sub(self._steps, begin))

    def token(self, step: StepPosition) -> Value:
        """The first token of a step, counted from the tile's first one."""
        return self._code.times(self._code.builder.add(step.begin, step.inner), self._step_tokens)

    def rows(self, step: StepPosition) -> RowAddresses:
        """The rows of a step."""
        builder, given, head = self._code.builder, self._pass, step.head
        own = RowAddresses(given.rows, builder.add(given.offset, builder.mul(head, given.head_stride)))
        later = RowAddresses(given.next_rows, builder.add(given.next_offset, builder.mul(head, given.next_head_stride)))
        rows = RowAddresses(*(builder.select(step.past, x, y) for x, y in zip(later, own, strict=True)))
        return rows.after(self._code, self.token(step))
