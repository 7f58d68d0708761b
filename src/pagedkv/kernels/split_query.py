"""Steps of the split kernel on tensor cores: q as fragments of 16-bit terms, in registers or in shared memory.

A quad is 4 neighbouring elements of a head: lane (g, t) has quad s of vector v of heads g and g + 8, elements
4 * ((v * 4 + t) * k_steps + s) and the next three, which are the reduction indices of one k16 step.
"""

from __future__ import annotations

from typing import Any

from numba import float32, int64, uint32

from .conversions import unpack
from .intrinsics import assign, bits_float, float_bits, for_each, larger, load_8, load_16, local_array
from .source import device_function
from .split_config import NUM_WARPS, SplitConfig
from .split_shape import FRAGMENT_BYTES, TensorShape
from .tensor_intrinsics import exchange, pack_bfloat16, pack_float16, store_shared_words

SIGN = 0x80008000  # of both halves of a word
LARGEST_EXPONENT = 14  # of a normalised head's largest element
SMALLEST_SHIFT = -120


def make_stage_query(config: SplitConfig, shape: TensorShape) -> Any:
    """The device function ``stage_query(q_frags, q_shared, factors, q, head_stride, num_heads, ...)``.

    q is the address of the warp's first head, q_shared that of this lane's part of fragment 0; factors[h] becomes what
    the scores of head g + 8h have to be multiplied with. A warp may have fewer heads: their rows are zero. `worker`
    numbers the warps that have the same heads. If `is_negative`, fragments are those of -q.
    """
    HEAD_TILES, NUM_WORKERS, NUM_WORDS = shape.head_tiles, NUM_WARPS // config.head_shares, 4 * shape.q_fragments
    Q_IN_SHARED, IS_NORMALISED = shape.q_in_shared, shape.is_normalised
    FOLD, K_STEPS, Q_PER_VECTOR = shape.fold, shape.k_steps, shape.q_per_vector
    PER_VECTOR = shape.k_steps // 2 if shape.fold else shape.k_steps  # groups of fragments with the same elements of q
    NUM_GROUPS = shape.k_vectors * PER_VECTOR
    TERM_FRAGMENTS, BELOW = shape.q_per_vector // PER_VECTOR, 0 if shape.head_tiles == 1 and not shape.fold else 4
    K_VECTORS, NUM_QUADS = shape.k_vectors, shape.k_vectors * shape.k_steps
    IS_EXACT, load_words = config.q_kind == shape.operand, make_load_words(config, shape)
    load_quad, next_term = make_load_quad(config, shape), make_next_term(shape)

    @device_function
    def raise_largest(quad, largest, q, exists, t):
        x = load_quad(q, quad // K_STEPS, quad % K_STEPS, exists, t)
        largest[0] = larger(largest[0], larger(larger(abs(x[0]), abs(x[1])), larger(abs(x[2]), abs(x[3]))))

    @device_function
    def normaliser(q, exists, t):
        """The power of two that q is to be divided by, as an exponent."""
        of_lane = local_array(1, float32)
        of_lane[0] = float32(0)
        for_each(raise_largest, NUM_QUADS, (of_lane, q, exists, t))
        largest = larger(of_lane[0], exchange(of_lane[0], 1))
        largest = larger(largest, exchange(largest, 2))
        return max(int64(float_bits(largest) >> 23) - 127 - LARGEST_EXPONENT, SMALLEST_SHIFT)

    @device_function
    def power_of_two(exponent):
        return bits_float(uint32(uint32(exponent + 127) << uint32(23)))

    @device_function
    def load_scaled(rest, at, q, vector, step, inverse, exists, t):
        x = load_quad(q, vector, step, exists, t)
        scaled = (float32(x[0] * inverse), float32(x[1] * inverse), float32(x[2] * inverse), float32(x[3] * inverse))
        assign(rest, at, scaled)

    @device_function
    def exact_fragment(f, vector, rows):
        """Registers a0..a3 of fragment f of a vector, a constant: q as it stands."""
        q_first, q_second, _, _, first_exists, second_exists, t = rows
        if FOLD:
            above = load_words(q_first, vector, 2 * f, first_exists, t)
            below = load_words(q_first, vector, 2 * f + 1, first_exists, t)
        else:
            above = load_words(q_first, vector, f, first_exists, t)
            below = load_words(q_second, vector, f, second_exists, t)
        return above[0], below[0], above[1], below[1]

    @device_function
    def next_fragment(rest):
        """A term of what is left of two quads, or two terms of one."""
        a0, a2 = next_term(rest, int64(0)), next_term(rest, int64(2))
        return a0, next_term(rest, int64(BELOW)), a2, next_term(rest, int64(BELOW + 2))

    @device_function
    def load_rest(i, rest, vector, rows):
        """What fragments i * TERM_FRAGMENTS and the next ones of a vector are made from, i a constant."""
        q_first, q_second, inverse_first, inverse_second, first_exists, second_exists, t = rows
        if FOLD:
            load_scaled(rest, int64(0), q_first, vector, 2 * i, inverse_first, first_exists, t)
            load_scaled(rest, int64(4), q_first, vector, 2 * i + 1, inverse_first, first_exists, t)
        else:
            load_scaled(rest, int64(0), q_first, vector, i, inverse_first, first_exists, t)
            if HEAD_TILES == 2:
                load_scaled(rest, int64(4), q_second, vector, i, inverse_second, second_exists, t)

    @device_function
    def keep(i, q_frags, rows):
        vector, first = i // PER_VECTOR, i % PER_VECTOR
        rest = local_array(8, float32)
        if not IS_EXACT:
            load_rest(first, rest, vector, rows)
        for f in range(TERM_FRAGMENTS):
            a = exact_fragment(first, vector, rows) if IS_EXACT else next_fragment(rest)
            assign(q_frags, 4 * (i * TERM_FRAGMENTS + f), a)

    @device_function
    def put(i, vector, q_shared, sign, rows):
        rest = local_array(8, float32)
        if not IS_EXACT:
            load_rest(i, rest, vector, rows)
        for f in range(TERM_FRAGMENTS):
            a = exact_fragment(i, vector, rows) if IS_EXACT else next_fragment(rest)
            a = (uint32(a[0] ^ sign), uint32(a[1] ^ sign), uint32(a[2] ^ sign), uint32(a[3] ^ sign))
            fragment = vector * Q_PER_VECTOR + (i * TERM_FRAGMENTS + f)
            store_shared_words(uint32(q_shared + uint32(FRAGMENT_BYTES * fragment)), a[0], a[1], a[2], a[3])

    @device_function
    def stage_query(q_frags, q_shared, factors, q, head_stride, num_heads, g, t, worker, is_negative):
        first_exists, second_exists = g < num_heads, g + 8 < num_heads
        q_first = q + (int64(g) * head_stride if first_exists else int64(0))
        q_second = q + (int64(g + 8) * head_stride if second_exists else int64(0))
        inverse_first, inverse_second = float32(1), float32(1)
        factors[0] = float32(1)
        if IS_NORMALISED:
            exponent = normaliser(q_first, first_exists, t)
            inverse_first, factors[0] = power_of_two(-exponent), power_of_two(exponent)
        if HEAD_TILES == 2:
            factors[1] = float32(1)
            if IS_NORMALISED:
                exponent = normaliser(q_second, second_exists, t)
                inverse_second, factors[1] = power_of_two(-exponent), power_of_two(exponent)
        rows = (q_first, q_second, inverse_first, inverse_second, first_exists, second_exists, t)
        sign = uint32(SIGN) if is_negative else uint32(0)
        if Q_IN_SHARED:
            vector = worker
            while vector < K_VECTORS:
                for_each(put, PER_VECTOR, (vector, q_shared, sign, rows))
                vector += NUM_WORKERS
        else:
            for_each(keep, NUM_GROUPS, (q_frags, rows))
            if is_negative:
                for i in range(NUM_WORDS):
                    q_frags[i] = uint32(q_frags[i] ^ uint32(SIGN))

    return stage_query


def make_load_words(config: SplitConfig, shape: TensorShape) -> Any:
    """The device function ``load_words(q, vector, step, exists, t)``: a quad of 16-bit elements as two words."""
    HEAD_DIM, K_STEPS = config.head_dim, shape.k_steps

    @device_function
    def load_words(q, vector, step, exists, t):
        first = 4 * ((4 * vector + int64(t)) * K_STEPS + step)
        is_inside = exists and first < HEAD_DIM
        x = load_8(q + (first * 2 if is_inside else int64(0)))
        return x[0] if is_inside else uint32(0), x[1] if is_inside else uint32(0)

    return load_words


def make_load_quad(config: SplitConfig, shape: TensorShape) -> Any:
    """The device function ``load_quad(q, vector, step, exists, t)``: 4 float32 of a head, 0 past its end."""
    HEAD_DIM, Q_BYTES, K_STEPS = config.head_dim, config.q_bytes, shape.k_steps
    widen = unpack(config.q_kind)

    @device_function
    def load_quad(q, vector, step, exists, t):
        first = 4 * ((4 * vector + int64(t)) * K_STEPS + step)
        is_inside = exists and first < HEAD_DIM
        where = q + (first * Q_BYTES if is_inside else int64(0))
        zero = float32(0)
        if Q_BYTES == 4:
            x = load_16(where)
            a, b, c, d = widen(x[0])[0], widen(x[1])[0], widen(x[2])[0], widen(x[3])[0]
        else:
            y = load_8(where)
            a, b = widen(y[0])
            c, d = widen(y[1])
        return a if is_inside else zero, b if is_inside else zero, c if is_inside else zero, d if is_inside else zero

    return load_quad


def make_next_term(shape: TensorShape) -> Any:
    """The device function ``next_term(rest, at)``: two float32 rounded to the halves of a word, and subtracted."""
    pack = pack_bfloat16 if shape.operand == "bfloat16" else pack_float16
    widen = unpack(shape.operand)

    @device_function
    def next_term(rest, at):
        word = pack(rest[at], rest[at + 1])
        low, high = widen(word)
        rest[at], rest[at + 1] = float32(rest[at] - low), float32(rest[at + 1] - high)
        return word

    return next_term
