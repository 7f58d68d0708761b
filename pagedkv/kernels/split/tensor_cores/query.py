"""Q of the split kernel on tensor cores, as fragments of 16-bit terms in shared memory.

Terms take many instructions, so warps with the same heads divide the work, and share the fragments in shared memory.

A quad is 4 neighbouring elements of a head: lane (g, t) has quad s of vector v of heads g and g + 8, elements
4 * ((v * 4 + t) * k_steps + s) and the next three, which are the reduction indices of one k16 step.
"""

from __future__ import annotations

from typing import Any

from ...device.conversions import unpack
from ...device.halves import SIGNS
from ...device.intrinsics.thread import assign, bits_float, float_bits, larger, load_8, load_16, local_array, unrolled
from ...device.intrinsics.warp import pack_of, store_shared_words
from ...device.language import float32, int64, uint32
from ...device.reductions import largest_of_quad
from ...device.source import Steps, device_function
from ..config import NUM_WARPS
from ..shape import FRAGMENT_BYTES, K_VECTOR, TensorShape

LARGEST_EXPONENT = 14  # that of a normalised head's largest element
SMALLEST_SHIFT = -120


def make_stage_query(shape: TensorShape) -> Any:
    """The device function ``stage_query(q_shared, factors, query, g, t, warp, is_negative)``."""
    HEAD_TILES, WARPS = shape.head_tiles, NUM_WARPS // shape.config.warps_for_heads
    IS_FOLDED, IS_EXACT, IS_NORMALISED = shape.is_folded, shape.config.q_kind == shape.operand, shape.is_normalised
    NUM_QUADS = shape.k_vectors * shape.k_steps
    NUM_GROUPS = NUM_QUADS // 2 if shape.is_folded else NUM_QUADS  # groups of fragments with the same elements of q
    TERM_FRAGMENTS, BELOW = shape.q_fragments // NUM_GROUPS, 0 if shape.head_tiles == 1 and not shape.is_folded else 4
    IS_WHOLE = NUM_GROUPS % WARPS == 0
    quads, widen, pack = make_quads(shape), unpack(shape.operand), pack_of(shape.operand)

    @unrolled(NUM_QUADS)
    def raise_largest(quad, largest, q, t):
        x = quads.load_quad(q, quad, t)
        largest[0] = larger(largest[0], larger(larger(abs(x[0]), abs(x[1])), larger(abs(x[2]), abs(x[3]))))

    @device_function
    def power_of_two(exponent):
        return bits_float(uint32((exponent + 127) << 23))

    @device_function
    def normalise(q, t, side):
        """The factor of q, an inverse power of two with a sign, and the power of two, the factor of products."""
        if not IS_NORMALISED:
            return side, float32(1)
        of_lane = local_array(1, float32)
        of_lane[0] = float32(0)
        raise_largest(of_lane, q, t)
        largest = largest_of_quad(of_lane[0])
        exponent = max(int64(float_bits(largest) >> 23) - 127 - LARGEST_EXPONENT, SMALLEST_SHIFT)
        return float32(side * power_of_two(-exponent)), power_of_two(exponent)

    @device_function
    def load_scaled(rest, at, q, quad, inverse, t):
        x = quads.load_quad(q, quad, t)
        scaled = (float32(x[0] * inverse), float32(x[1] * inverse), float32(x[2] * inverse), float32(x[3] * inverse))
        assign(rest, at, scaled)

    @device_function
    def load_rest(rest, group, rows):
        """Load the elements of q from which a group of fragments is made."""
        q_first, q_second, inverse_first, inverse_second, t = rows
        if IS_FOLDED:
            load_scaled(rest, int64(0), q_first, 2 * group, inverse_first, t)
            load_scaled(rest, int64(4), q_first, 2 * group + 1, inverse_first, t)
        else:
            load_scaled(rest, int64(0), q_first, group, inverse_first, t)
            if HEAD_TILES == 2:
                load_scaled(rest, int64(4), q_second, group, inverse_second, t)

    @device_function
    def next_term(rest, at):
        """Round two float32 to the halves of a word, and subtract them from the rest."""
        word = pack(rest[at], rest[at + 1])
        low, high = widen(word)
        rest[at], rest[at + 1] = float32(rest[at] - low), float32(rest[at + 1] - high)
        return word

    @device_function
    def next_fragment(rest):
        """The next term of two quads, or the next two terms of one."""
        a0, a2 = next_term(rest, int64(0)), next_term(rest, int64(2))
        return a0, next_term(rest, int64(BELOW)), a2, next_term(rest, int64(BELOW + 2))

    @device_function
    def exact_fragment(group, rows):
        """Registers a0..a3 of a q that is exact in 16 bits."""
        q_first, q_second, _, _, t = rows
        if IS_FOLDED:
            above, below = quads.load_words(q_first, 2 * group, t), quads.load_words(q_first, 2 * group + 1, t)
        else:
            above, below = quads.load_words(q_first, group, t), quads.load_words(q_second, group, t)
        return above[0], below[0], above[1], below[1]

    @unrolled(-(-NUM_GROUPS // WARPS))
    def put(i, warp, q_shared, sign, rows):
        """Store this warp's part of the fragments in shared memory."""
        group = WARPS * i + warp
        if IS_WHOLE or group < NUM_GROUPS:
            where = uint32(q_shared + FRAGMENT_BYTES * TERM_FRAGMENTS * group)
            if IS_EXACT:
                a = exact_fragment(group, rows)
                a = uint32(a[0] ^ sign), uint32(a[1] ^ sign), uint32(a[2] ^ sign), uint32(a[3] ^ sign)
                store_shared_words(where, a[0], a[1], a[2], a[3])
            else:
                rest = local_array(8, float32)
                load_rest(rest, group, rows)
                for f in range(TERM_FRAGMENTS):
                    a = next_fragment(rest)
                    store_shared_words(uint32(where + FRAGMENT_BYTES * f), a[0], a[1], a[2], a[3])

    @device_function
    def stage_query(q_shared, factors, query, g, t, warp, is_negative):
        """Store the fragments of q; the whole thread block calls it.

        q_shared is the shared address of this lane's part of fragment 0. factors[h] becomes the factor of the scores of
        head g + 8h. Missing heads repeat the first one, and their results are never read. `warp` numbers the warps with
        the same heads, which divide the fragments among them. With `is_negative`, fragments are those of -q.
        """
        q_first = query.address + (int64(g) * query.head_stride if g < query.num_heads else int64(0))
        q_second = query.address + (int64(g + 8) * query.head_stride if g + 8 < query.num_heads else int64(0))
        side = float32(-1) if is_negative else float32(1)
        inverse_first, factors[0] = normalise(q_first, t, side)
        inverse_second = side
        if HEAD_TILES == 2:
            inverse_second, factors[1] = normalise(q_second, t, side)
        rows = (q_first, q_second, inverse_first, inverse_second, t)
        put(warp, q_shared, uint32(SIGNS) if is_negative else uint32(0), rows)

    return stage_query


def make_quads(shape: TensorShape) -> Steps:
    """The device functions ``load_words`` and ``load_quad``, for one quad of a lane; 0 past the row."""
    HEAD_DIM, IS_WHOLE, K_STEPS = shape.config.head_dim, shape.config.row_bytes % K_VECTOR == 0, shape.k_steps
    Q_BYTES, widen = shape.config.q_bytes, unpack(shape.config.q_kind)

    @device_function
    def first_dim(quad, t):
        vector, step = uint32(uint32(quad) // uint32(K_STEPS)), uint32(uint32(quad) % uint32(K_STEPS))
        return int64(4 * ((4 * vector + int64(t)) * K_STEPS + step))

    @device_function
    def load_words(q, quad, t):
        """Load a quad of 16-bit elements as two words."""
        first = first_dim(quad, t)
        is_inside = IS_WHOLE or first < HEAD_DIM
        x = load_8(q + (first * 2 if is_inside else int64(0)))
        return x[0] if is_inside else uint32(0), x[1] if is_inside else uint32(0)

    @device_function
    def load_quad(q, quad, t):
        """Load a quad as 4 float32."""
        first, zero = first_dim(quad, t), float32(0)
        is_inside = IS_WHOLE or first < HEAD_DIM
        if Q_BYTES == 4:
            x = load_16(q + (first * 4 if is_inside else int64(0)))
            a, b, c, d = bits_float(x[0]), bits_float(x[1]), bits_float(x[2]), bits_float(x[3])
            a, b = a if is_inside else zero, b if is_inside else zero
            return a, b, c if is_inside else zero, d if is_inside else zero
        y = load_words(q, quad, t)
        a, b = widen(y[0])
        c, d = widen(y[1])
        return a, b, c, d

    return Steps(load_words, load_quad)
