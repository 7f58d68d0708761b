"""The online softmax of the kernel on tensor cores: S becomes P.

A lane has two numbers for each row: the shift, which is BIAS minus the pivot that exponents are relative to, and the
sum of its own exponentials. A pivot moves only if a logit of its row exceeds it by more than SLACK. So in most tiles no
lane asks another one for a maximum, and nothing is rescaled. The bits of a row depend on that row alone: the vote of
the warp only decides whether it rescales, and other rows are multiplied by 1.

With scales of rows, P has as a factor what a value's scale has beside a power of two, 1 to 2 (copies.py).
"""

from __future__ import annotations

from typing import Any

from ...device.intrinsics.thread import exp2, for_each, larger, local_array, multiply_and_add
from ...device.intrinsics.warp import any_lane, load_shared_2, pack_of
from ...device.language import float32, int32, int64, uint32
from ...device.logits import LOG2E, NONE, UNSEEN, cap, make_modify
from ...device.reductions import largest_of_quad
from ...device.source import device_function
from ...device.visible import first_key, last_key
from ..config import TensorConfig
from ..items import make_item_store
from .registers import make_row_of
from .tile import TileShape

SLACK = 8  # powers of two by which a logit may exceed its pivot


def bias(config: TensorConfig) -> int:
    """The exponent of P at the pivot: in float16 as large as SLACK allows, so that less of P underflows."""
    most = 14 if config.by_row else 15  # P times less than 2
    return most - SLACK if config.q_kind == "float16" else 0


def top(config: TensorConfig) -> Any:
    """The exponent above which a pivot moves."""
    return float32(bias(config) + SLACK)


def make_logits(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``logits(registers, options, first, scales)``: products become logits, in units of log(2).

    first is the lane's first key of the tile, and scales where its scale is, if rows have them. Keys past the sequence
    take the position of its last one.
    """
    BY_ROW, SCORE_PAIRS, KEY_TILES = config.by_row, shape.row_tiles * 4 * shape.key_pairs, 2 * shape.key_pairs
    SCORES, PER_TILE, MODIFIED = shape.row_tiles * 8 * shape.key_pairs, 8 * shape.key_pairs, config.modified
    modify = make_modify(config.score_mod)

    @device_function
    def logit(x, registers, options, first):
        n, h, e = x % PER_TILE // 4, x // 2 % 2, x % 2
        i = 2 * (x // PER_TILE) + h
        k_pos = min(uint32(first + (8 * n + e)), options.last)
        y = modify(
            registers.s[x],
            float32(0),
            registers.slopes[i],
            int64(registers.positions[i]),
            int64(k_pos),
            registers.heads[i],
            options.seq,
        )
        registers.s[x] = float32(y * LOG2E)

    @device_function
    def scale(x, s, factor):
        s[x] = float32(s[x] * factor)

    @device_function
    def cap_logit(x, s, softcap):
        s[x] = cap(s[x], softcap)

    @device_function
    def multiply_by_scales(x, s, scales):
        n, h = x // 2 % KEY_TILES, x % 2
        at = x // (2 * KEY_TILES) * 4 * KEY_TILES + 4 * n + 2 * h
        a, b = load_shared_2(uint32(scales + 32 * n))
        s[at], s[at + 1] = float32(s[at] * a), float32(s[at + 1] * b)

    @device_function
    def logits(registers, options, first, scales):
        if BY_ROW:
            for_each(multiply_by_scales, SCORE_PAIRS, (registers.s, scales))
        if MODIFIED:
            for_each(scale, SCORES, (registers.s, options.scale))
            if options.softcap != float32(0):  # asked once for all logits, not for each
                for_each(cap_logit, SCORES, (registers.s, options.softcap))
            for_each(logit, SCORES, (registers, options, first))

    return logits


def make_hide_unseen(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``hide_unseen(registers, visible, shared, first, warp, g)``: unseen keys get -inf.

    `first` is the lane's first key of the tile. Calls with the option `mask` never come here: they run on CUDA cores.
    """
    OF_ROWS, OF_ROW, PER_TILE = 2 * shape.row_tiles, 4 * shape.key_pairs, 8 * shape.key_pairs
    GROUP_SIZE, row_of, (_, load_item) = config.group_size, make_row_of(shape), make_item_store(shape.item_start)

    @device_function
    def hide_logit(n, i, s, low, width):
        at = i // 2 * PER_TILE + 4 * (n // 2) + 2 * (i % 2) + n % 2
        if uint32(int32(8 * (n // 2) + n % 2) - low) > width:
            s[at] = NONE

    @device_function
    def hide_in_row(i, s, visible, item, first, warp, g):
        row = min(uint32(item.first_row + row_of(i, warp, g)), uint32(item.num_rows - 1))
        position = uint32(item.context + uint32(row // uint32(GROUP_SIZE)))
        low, last = first_key(position, visible), last_key(position, visible, item.seq_len)
        for_each(hide_logit, OF_ROW, (i, s, int32(int32(low) - int32(first)), uint32(last - low)))

    @device_function
    def hide_unseen(registers, visible, shared, first, warp, g):
        for_each(hide_in_row, OF_ROWS, (registers.s, visible, load_item(shared), first, warp, g))

    return hide_unseen


def make_pivots(config: TensorConfig, shape: TileShape) -> tuple[Any, Any, Any]:
    """The device functions ``find_largest_exponent(registers, largest_exponent, unit)``, ``move_pivots``, ``rescale``.

    The first stores the largest exponent of the lane's logits in largest_exponent[0]. If it is above TOP in a lane of
    the warp, ``move_pivots(registers, unit)`` moves pivots and rescales sums, and ``rescale(registers)`` rescales O.
    unit takes logits to units of log(2); it is positive, so the maximum may be taken first.
    """
    OF_ROWS, KEY_TILES, DIM_TILES = 2 * shape.row_tiles, 2 * shape.key_pairs, 2 * shape.k_steps
    SCORE_PAIRS, SUM_PAIRS = OF_ROWS * KEY_TILES, OF_ROWS * DIM_TILES
    BIAS, TOP = float32(bias(config)), top(config)

    @device_function
    def raise_maximum(x, s, maxima):
        i, n = 2 * (x // (2 * KEY_TILES)) + x % 2, x // 2 % KEY_TILES
        at = x // (2 * KEY_TILES) * 4 * KEY_TILES + 4 * n + 2 * (x % 2)
        y = larger(s[at], s[at + 1])
        maxima[i] = y if n == 0 else larger(maxima[i], y)

    @device_function
    def raise_largest(i, largest_exponent, maxima, shifts, unit):
        y = multiply_and_add(maxima[i], unit, shifts[i])
        largest_exponent[0] = y if i == 0 else larger(largest_exponent[0], y)

    @device_function
    def find_largest_exponent(registers, largest_exponent, unit):
        for_each(raise_maximum, SCORE_PAIRS, (registers.s, registers.maxima))
        for_each(raise_largest, OF_ROWS, (largest_exponent, registers.maxima, registers.shifts, unit))

    @device_function
    def move_pivot(i, registers, unit):
        largest = largest_of_quad(registers.maxima[i])
        old = registers.shifts[i]
        is_above = multiply_and_add(largest, unit, old) > TOP
        new = multiply_and_add(float32(-largest), unit, BIAS) if is_above else old
        registers.factors[i] = exp2(float32(new - old))
        registers.sums[i] = float32(registers.sums[i] * registers.factors[i])
        registers.shifts[i] = new

    @device_function
    def move_pivots(registers, unit):
        for_each(move_pivot, OF_ROWS, (registers, unit))

    @device_function
    def rescale_pair(x, o, factors):
        m, n, h = x // (2 * DIM_TILES), x // 2 % DIM_TILES, x % 2
        at = 4 * (m * DIM_TILES + n) + 2 * h
        o[at], o[at + 1] = float32(o[at] * factors[2 * m + h]), float32(o[at + 1] * factors[2 * m + h])

    @device_function
    def rescale(registers):
        for_each(rescale_pair, SUM_PAIRS, (registers.o, registers.factors))

    return find_largest_exponent, move_pivots, rescale


def make_weigh(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``weigh(registers, unit, factors)``: S becomes P, added to sums before it is rounded.

    With scales of rows, P has the significands of those of values as a factor that sums do not have.
    """
    BY_ROW = config.by_row
    KEY_TILES, P_OF_TILE = 2 * shape.key_pairs, 4 * shape.key_pairs
    SCORE_PAIRS = 2 * shape.row_tiles * KEY_TILES
    pack = pack_of(config.q_kind)

    @device_function
    def weigh_pair(x, s, p, sums, shifts, unit, factors):
        m, n, h = x // (2 * KEY_TILES), x // 2 % KEY_TILES, x % 2
        at, i = 4 * (m * KEY_TILES + n) + 2 * h, 2 * m + h
        first = exp2(multiply_and_add(s[at], unit, shifts[i]))
        second = exp2(multiply_and_add(s[at + 1], unit, shifts[i]))
        sums[i] = float32(sums[i] + float32(first + second))
        if BY_ROW:
            a, b = load_shared_2(uint32(factors + 32 * n))
            first = float32(first * a) if s[at] != NONE else float32(0)
            second = float32(second * b) if s[at + 1] != NONE else float32(0)
        p[m * P_OF_TILE + 4 * (n // 2) + 2 * (n % 2) + h] = pack(first, second)

    @device_function
    def weigh(registers, unit, factors):
        for_each(weigh_pair, SCORE_PAIRS, (registers.s, registers.p, registers.sums, registers.shifts, unit, factors))

    return weigh


def make_update_pivots(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``update_pivots(registers, largest_exponent, unit)``.

    It moves the pivots that logits in S exceed by too much, and rescales their sums and O.
    """
    TOP, (find_largest_exponent, move_pivots, rescale) = top(config), make_pivots(config, shape)

    @device_function
    def update_pivots(registers, largest_exponent, unit):
        find_largest_exponent(registers, largest_exponent, unit)
        if any_lane(largest_exponent[0] > TOP):
            move_pivots(registers, unit)
            rescale(registers)

    return update_pivots


def make_softmax(config: TensorConfig, shape: TileShape) -> Any:
    """The device function ``softmax(registers, largest_exponent, unit, factors)``: S becomes P, pivots are updated.

    `factors` is where the lane's first factor of P is, if rows have scales.
    """
    update_pivots, weigh = make_update_pivots(config, shape), make_weigh(config, shape)

    @device_function
    def softmax(registers, largest_exponent, unit, factors):
        update_pivots(registers, largest_exponent, unit)
        weigh(registers, unit, factors)

    return softmax


def make_softmax_by_sums(config: TensorConfig, shape: TileShape) -> Any:
    """As `make_softmax`, with the same bits, but it looks for maxima only if a sum has grown by 2**TOP or more.

    An exponential above 2**TOP adds as much to its sum: none is negative, and rounding keeps the order of sums. Several
    smaller ones may add up to that, too; then no pivot moves, and P comes out the same again. In the first tile, where
    largest_exponent[0] is UNSEEN, and after a tile where a pivot moved or a sum grew so, it looks before it computes P
    instead of after.
    """
    OF_ROWS, TOP = 2 * shape.row_tiles, top(config)
    MOST = float32(0.999 * 2.0**TOP)  # less than 2**TOP: exp2 rounds
    update_pivots, weigh = make_update_pivots(config, shape), make_weigh(config, shape)

    @device_function
    def copy_sum(i, target, source):
        target[i] = source[i]

    @device_function
    def watch_sum(i, has_grown, sums, before):
        has_grown[0] = has_grown[0] | uint32(sums[i] >= float32(before[i] + MOST))

    @device_function
    def softmax(registers, largest_exponent, unit, factors):
        before, has_grown = local_array(OF_ROWS, float32), local_array(1, uint32)
        is_updated = any_lane(largest_exponent[0] > TOP)
        if is_updated:
            update_pivots(registers, largest_exponent, unit)
        has_grown[0] = uint32(0)
        for_each(copy_sum, OF_ROWS, (before, registers.sums))
        weigh(registers, unit, factors)
        for_each(watch_sum, OF_ROWS, (has_grown, registers.sums, before))
        if any_lane(has_grown[0] != 0):
            if not is_updated:
                for_each(copy_sum, OF_ROWS, (registers.sums, before))
                update_pivots(registers, largest_exponent, unit)
                weigh(registers, unit, factors)
            largest_exponent[0] = UNSEEN

    return softmax


def make_exponentials(config: TensorConfig, shape: TileShape) -> tuple[Any, Any, Any]:
    """The device functions ``exponentiate(registers, largest_exponent, unit)``, ``rescale`` and ``round_p``.

    Together they do for one tile of rows what `make_softmax` does in one call. The caller waits between them for a
    product that still reads P and adds to O: `exponentiate` leaves exponentials in S and returns whether a pivot has
    moved, then `rescale` is due for O, and `round_p` rounds the exponentials from S to P.
    """
    PAIRS, TOP = 4 * shape.key_pairs, top(config)
    pack = pack_of(config.q_kind)
    find_largest_exponent, move_pivots, rescale = make_pivots(config, shape)

    @device_function
    def weigh(x, s, sums, shifts, unit):
        at, i = 2 * x, x % 2
        s[at] = exp2(multiply_and_add(s[at], unit, shifts[i]))
        s[at + 1] = exp2(multiply_and_add(s[at + 1], unit, shifts[i]))
        sums[i] = float32(sums[i] + float32(s[at] + s[at + 1]))

    @device_function
    def exponentiate(registers, largest_exponent, unit):
        find_largest_exponent(registers, largest_exponent, unit)
        has_moved = any_lane(largest_exponent[0] > TOP)
        if has_moved:
            move_pivots(registers, unit)
        for_each(weigh, PAIRS, (registers.s, registers.sums, registers.shifts, unit))
        return has_moved

    @device_function
    def round_pair(x, s, p):
        p[x] = pack(s[2 * x], s[2 * x + 1])

    @device_function
    def round_p(registers):
        for_each(round_pair, PAIRS, (registers.s, registers.p))

    return exponentiate, rescale, round_p
