"""The online softmax of the split kernel on tensor cores: from products to logits, and to P as fragments.

A lane has the logits of head g + 8h for tokens 4t .. 4t + 3 of each tile: two for each n, the tile's half, at
``2 * (n * head_tiles + h)``. Logits are in units of log(2), so that the softmax is one of powers of two.

Rows with scales of their own. The scale of a key multiplies its logit, that of a value its probability, after the sum
of probabilities. So that products fit into float16, and the largest one keeps its bits, the pivot is the largest sum of
a logit and the logarithm of its value's scale: the largest product is as large as P is elsewhere.
"""

from __future__ import annotations

from ...device.conversions import unpack
from ...device.halves import software_factor
from ...device.intrinsics.thread import (
    address,
    assign,
    exp2,
    larger,
    local_array,
    multiply_and_add,
    multiply_and_add_down,
    unrolled,
)
from ...device.intrinsics.warp import log2, low_bits, pack_of
from ...device.language import float32, int64, uint32
from ...device.logits import LOG2E, NONE, UNSEEN, make_modify, positive
from ...device.source import Steps, device_function
from ..shape import TILE, TensorShape

MOST_EXCESS = 3  # powers of two by which a logit may exceed its pivot
# Pivots follow exponents of scales between these: so two pivots for the same logit differ by less than 2**126.
LEAST_EXPONENT, MOST_EXPONENT = float32(-56), float32(64)


def make_softmax(shape: TensorShape, lanes: Steps) -> Steps:
    """The device functions from products to logits, and from these to P, maxima, sums and O."""
    HEAD_TILES, MODIFIED = shape.head_tiles, shape.config.modified
    IS_FOLDED, STEP = shape.is_folded, shape.step
    FACTOR = float32(software_factor(shape.config.kv_kind, shape.config.hardware_fp8))
    # A power of two scales P, so that float16 underflows at 2**-37; with SLACK, P is at most 2**15.
    IS_HALF = shape.operand == "float16"
    bias = 12.0 if IS_HALF else 0.0
    BIAS, SLACK = float32(bias), float32(bias + MOST_EXCESS)
    PAIRS = 2 * shape.tiles * shape.head_tiles
    BY_ROW, NUM_SCALES = shape.config.by_row, 4 * shape.tiles
    NUM_EXPONENTS = NUM_SCALES if BY_ROW else 1
    pack, widen, modify = pack_of(shape.operand), unpack(shape.operand), make_modify(shape.config.score_mod)

    @unrolled(shape.head_tiles)
    def start(h, registers, query, slopes, g):
        """Initialise all but O. A missing head takes the number of the first one, so that no score_mod sees it."""
        registers.shifts[h], registers.sums[h] = UNSEEN, float32(0)
        mine = uint32(g + 8 * h)
        head = uint32(query.head + mine) if mine < query.num_heads else query.head
        registers.heads[h] = head
        registers.slopes[h] = slopes[head] if MODIFIED and address(slopes) != 0 else float32(0)

    @unrolled(shape.num_scores)
    def logits(i, registers, options, position):
        """Turn products into logits. `position` is the lane's first token; tokens past the query take its position."""
        raw = registers.raw
        n, h, k = i // (2 * HEAD_TILES), i // 2 % HEAD_TILES, i % 2
        # Folded, even k16 steps are in rows g, odd ones in rows g + 8.
        x = float32(raw[8 * n + k] + raw[8 * n + 6 + k]) if IS_FOLDED else raw[4 * n + 2 * h + k]
        if BY_ROW:
            x = float32(x * registers.scales[2 * n + k])
        if MODIFIED:
            k_pos = min(uint32(position + TILE * (n // 2) + 2 * (n % 2) + k), options.q_pos)
            x, head = float32(x * registers.factors[h]), registers.heads[h]
            x = modify(x, options.softcap, registers.slopes[h], int64(options.q_pos), int64(k_pos), head, options.seq)
        registers.s[i] = x

    @device_function
    def set_units(registers, scale):
        """Set the factors of products, before logits are modified, and units, which take logits to units of log(2).

        Neither is negative: the sign of the scale is in q.
        """
        factors, units = registers.factors, registers.units
        scale = abs(float32(scale * FACTOR))
        for h in range(HEAD_TILES):
            factors[h] = float32(factors[h] * scale)
            units[h] = positive(LOG2E if MODIFIED else float32(factors[h] * LOG2E))

    @unrolled(shape.num_scores)
    def mask(i, s, mine):
        """Store -inf for tokens whose bit in `mine` is not set."""
        n, k = i // (2 * HEAD_TILES), i % 2
        is_valid = uint32(mine & (1 << (TILE * (n // 2) + 2 * (n % 2) + k))) != 0
        s[i] = s[i] if is_valid else NONE

    @device_function
    def valid_tokens(base, last):
        """The tokens of a step up to the last one, as bits."""
        if uint32(base + STEP - 1) > last:
            return low_bits(uint32(last - base + 1) if base <= last else uint32(0))
        return uint32(0xFFFFFFFF)

    @unrolled(shape.tiles)
    def take_scales(i, scales, slot, scale, t):
        """Take the scales of the rows of this lane's tokens from the lanes that have offered them."""
        assign(scales, 4 * i, lanes.four_from(slot, scale, uint32((t << 2) + TILE * i)))

    @unrolled(NUM_SCALES)
    def take_exponents(i, exponents, scales):
        exponents[i] = min(larger(log2(abs(scales[i])), LEAST_EXPONENT), MOST_EXPONENT)

    @unrolled(PAIRS)
    def raise_maxima(i, largest, s, units, exponents):
        """Find the largest logits, with scales in units of log(2), and with the exponents of their scales."""
        n, h, x, y = i // HEAD_TILES, i % HEAD_TILES, s[2 * i], s[2 * i + 1]
        if BY_ROW:
            x = multiply_and_add(x, units[h], exponents[2 * n])
            y = multiply_and_add(y, units[h], exponents[2 * n + 1])
        x = larger(x, y)
        largest[h] = x if i < HEAD_TILES else larger(largest[h], x)

    @device_function
    def unit_of(units, h):
        """The factor that takes largest logits to units of log(2): with scales they are there."""
        return float32(1) if BY_ROW else units[h]

    @unrolled(shape.num_products)
    def rescale_products(i, o, h, even, odd):
        at = 4 * (i * HEAD_TILES + h)
        o[at], o[at + 1] = float32(o[at] * even), float32(o[at + 1] * odd)
        o[at + 2], o[at + 3] = float32(o[at + 2] * even), float32(o[at + 3] * odd)

    @device_function
    def rescale(shifts, units, sums, o, largest, slot, t):
        for h in range(HEAD_TILES):
            unit = unit_of(units, h)
            new = multiply_and_add(float32(-largest[h]), unit, BIAS)
            if IS_HALF:  # from 2**26 on, BIAS may be rounded up to 16
                new = min(new, multiply_and_add_down(float32(-largest[h]), unit, SLACK))
            shift = new if multiply_and_add(largest[h], unit, shifts[h]) > SLACK else shifts[h]
            factor = exp2(float32(shift - shifts[h]))
            sums[h] = float32(sums[h] * factor)
            shifts[h] = shift
            # This lane's O is of heads 2t and 2t + 1, whose factors lanes g = 2t and 2t + 1 have.
            even, odd = lanes.of_heads(slot, factor, t)
            rescale_products(o, h, even, odd)

    @unrolled(PAIRS)
    def weigh(i, s, units, shifts, sums, scales, p, p_rest):
        """Compute two probabilities, as a word of P and one of its remainder."""
        n, h = i // HEAD_TILES, i % HEAD_TILES
        first = exp2(multiply_and_add(s[2 * i], units[h], shifts[h]))
        second = exp2(multiply_and_add(s[2 * i + 1], units[h], shifts[h]))
        sums[h] = float32(sums[h] + float32(first + second))
        if BY_ROW:
            first, second = float32(first * scales[2 * n]), float32(second * scales[2 * n + 1])
        word = pack(first, second)
        low, high = widen(word)
        into = 2 * ((n // 2) * HEAD_TILES + h) + n % 2
        p[into], p_rest[into] = word, pack(float32(first - low), float32(second - high))

    @device_function
    def update(registers, slot, g, t):
        """Turn S into P, and rescale sums and O if a maximum has grown too far.

        One instruction multiplies by units[h] and adds shifts[h]; units are positive, so the maximum may be taken
        first. A shift, which is BIAS minus a maximum, stays until an exponent is above SLACK. Rescaling by 1 changes no
        bits, so it is skipped unless a shift of the warp has changed. `sums` are those of this lane's tokens alone.
        """
        s, units, shifts, sums = registers.s, registers.units, registers.shifts, registers.sums
        largest, exponents = local_array(HEAD_TILES, float32), local_array(NUM_EXPONENTS, float32)
        if BY_ROW:
            take_exponents(exponents, registers.scales)
        raise_maxima(largest, s, units, exponents)
        grew = False
        for h in range(HEAD_TILES):
            largest[h] = lanes.largest_of_head(slot, largest[h], g)
            grew = grew or multiply_and_add(largest[h], unit_of(units, h), shifts[h]) > SLACK
        if lanes.any_of_warp(grew):
            rescale(shifts, units, sums, registers.o, largest, slot, t)
        weigh(s, units, shifts, sums, registers.scales, registers.p, registers.p_rest)

    return Steps(start, logits, set_units, mask, valid_tokens, take_scales, update)
