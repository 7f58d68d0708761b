"""Q of the split kernel on tensor cores, as fragments in shared memory.

Warps with the same heads divide the work, and share the fragments.

A quad is 4 neighbouring elements of a head: lane (g, t) has quad s of vector v of heads g and g + 8, elements
4 * ((v * 4 + t) * k_steps + s) and the next three, which are the reduction indices of one k16 step.
"""

from __future__ import annotations

from typing import Any

from ...device.conversions import unpack
from ...device.halves import SIGNS
from ...device.intrinsics.thread import bits_float, float_bits, larger, load_8, local_array, unrolled
from ...device.intrinsics.warp import pack_of, store_shared_words
from ...device.language import float32, int64, uint32
from ...device.reductions import largest_of_quad
from ...device.source import device_function
from ..config import NUM_WARPS
from ..shape import FRAGMENT_BYTES, K_VECTOR, TensorShape

LARGEST_EXPONENT = 14  # that of a normalised head's largest element
SMALLEST_SHIFT = -120


def make_stage_query(shape: TensorShape) -> Any:
    """The device function ``stage_query(q_shared, factors, query, g, t, warp, is_negative)``."""
    HEAD_TILES, WARPS = shape.head_tiles, NUM_WARPS // shape.config.warps_for_heads
    IS_FOLDED, IS_NORMALISED, NUM_FRAGMENTS = shape.is_folded, shape.is_normalised, shape.q_fragments
    NUM_QUADS, K_STEPS = shape.k_vectors * shape.k_steps, shape.k_steps
    HEAD_DIM, ROW_IS_WHOLE = shape.config.head_dim, shape.config.row_bytes % K_VECTOR == 0
    IS_WHOLE = NUM_FRAGMENTS % WARPS == 0
    widen, pack = unpack(shape.config.q_kind), pack_of(shape.operand)

    @device_function
    def load_quad(q, quad, t):
        """Load a quad as two words; 0 past the row."""
        vector, step = uint32(uint32(quad) // uint32(K_STEPS)), uint32(uint32(quad) % uint32(K_STEPS))
        first = int64(4 * ((4 * vector + int64(t)) * K_STEPS + step))
        is_inside = ROW_IS_WHOLE or first < HEAD_DIM
        x = load_8(q + (first * 2 if is_inside else int64(0)))
        return x[0] if is_inside else uint32(0), x[1] if is_inside else uint32(0)

    @unrolled(NUM_QUADS)
    def raise_largest(quad, largest, q, t):
        words = load_quad(q, quad, t)
        a, b = widen(words[0])
        c, d = widen(words[1])
        largest[0] = larger(largest[0], larger(larger(abs(a), abs(b)), larger(abs(c), abs(d))))

    @device_function
    def power_of_two(exponent):
        return bits_float(uint32((exponent + 127) << 23))

    @device_function
    def normalise(q, t):
        """The factor of q, an inverse power of two, and the power of two, the factor of products."""
        if not IS_NORMALISED:
            return float32(1), float32(1)
        of_lane = local_array(1, float32)
        of_lane[0] = float32(0)
        raise_largest(of_lane, q, t)
        largest = largest_of_quad(of_lane[0])
        exponent = max(int64(float_bits(largest) >> 23) - 127 - LARGEST_EXPONENT, SMALLEST_SHIFT)
        return power_of_two(-exponent), power_of_two(exponent)

    @device_function
    def scaled(word, inverse):
        low, high = widen(word)
        return pack(float32(low * inverse), float32(high * inverse))

    @device_function
    def operands(q, quad, inverse, t):
        """Two words of a fragment: a quad of a head."""
        words = load_quad(q, quad, t)
        if IS_NORMALISED:
            return scaled(words[0], inverse), scaled(words[1], inverse)
        return words

    @unrolled(-(-NUM_FRAGMENTS // WARPS))
    def put(i, warp, q_shared, sign, rows):
        """Store this warp's part of the fragments in shared memory."""
        f = WARPS * i + warp
        if IS_WHOLE or f < NUM_FRAGMENTS:
            q_first, q_second, inverse_first, inverse_second, t = rows
            above = operands(q_first, 2 * f if IS_FOLDED else f, inverse_first, t)
            if IS_FOLDED:
                below = operands(q_first, 2 * f + 1, inverse_first, t)
            else:
                below = operands(q_second, f, inverse_second, t)
            a0, a1, a2, a3 = above[0], below[0], above[1], below[1]
            where = uint32(q_shared + FRAGMENT_BYTES * f)
            store_shared_words(where, uint32(a0 ^ sign), uint32(a1 ^ sign), uint32(a2 ^ sign), uint32(a3 ^ sign))

    @device_function
    def stage_query(q_shared, factors, query, g, t, warp, is_negative):
        """Store the fragments of q; the whole thread block calls it.

        q_shared is the shared address of this lane's part of fragment 0. factors[h] becomes the factor of the scores of
        head g + 8h. Missing heads repeat the first one, and their results are never read. `warp` numbers the warps with
        the same heads, which divide the fragments among them. With `is_negative`, fragments are those of -q.
        """
        q_first = query.address + (int64(g) * query.head_stride if g < query.num_heads else int64(0))
        q_second = query.address + (int64(g + 8) * query.head_stride if g + 8 < query.num_heads else int64(0))
        inverse_first, factors[0] = normalise(q_first, t)
        inverse_second = float32(1)
        if HEAD_TILES == 2:
            inverse_second, factors[1] = normalise(q_second, t)
        rows = (q_first, q_second, inverse_first, inverse_second, t)
        put(warp, q_shared, uint32(SIGNS) if is_negative else uint32(0), rows)

    return stage_query
