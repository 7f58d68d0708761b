"""Steps of the split kernel on tensor cores: q as fragments of 16-bit terms, in registers or in shared memory.

A quad is 4 neighbouring elements of a head: lane (g, t) has quad s of vector v of heads g and g + 8, elements
4 * ((v * 4 + t) * k_steps + s) and the next three, which are the reduction indices of one k16 step.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64, uint32

from .intrinsics import bits_float, float_bits, for_each, larger, load_8, load_16, unpack
from .source import device_function
from .split_config import NUM_WARPS, SplitConfig
from .split_fragments import FRAGMENT_BYTES, TensorShape
from .tensor_intrinsics import exchange, pack_bfloat16, pack_float16, store_shared_words

LARGEST_EXPONENT = 14  # of a normalised head's largest element
SMALLEST_SHIFT = -120


def make_stage_query(config: SplitConfig, shape: TensorShape) -> Any:
    """The device function ``stage_query(q_frags, q_shared, factors, q, head_stride, num_heads, g, t, worker)``.

    q is the address of the warp's first head, q_shared that of this lane's part of fragment 0; factors[h] becomes what
    the scores of head g + 8h have to be multiplied with. A warp may have fewer heads: their rows are zero. `worker`
    numbers the warps that have the same heads.
    """
    HEAD_TILES, FRAGMENTS, NUM_WORKERS = shape.head_tiles, shape.q_fragments, NUM_WARPS // config.head_shares
    Q_IN_SHARED, IS_NORMALISED = shape.q_in_shared, shape.is_normalised
    FOLD, TERMS, K_STEPS, Q_PER_VECTOR = shape.fold, shape.terms, shape.k_steps, shape.q_per_vector
    PER_STEP = 1 if shape.fold else shape.q_per_vector // shape.k_steps
    K_VECTORS, NUM_QUADS = shape.k_vectors, shape.k_vectors * shape.k_steps
    IS_EXACT, load_words = config.q_kind == shape.operand, make_load_words(config, shape)
    load_quad, split_pair = make_load_quad(config, shape), make_split_pair(shape)

    @device_function
    def raise_largest(quad, largest, q, exists, t):
        x = load_quad(q, quad // K_STEPS, quad % K_STEPS, exists, t)
        largest[0] = larger(largest[0], larger(larger(abs(x[0]), abs(x[1])), larger(abs(x[2]), abs(x[3]))))

    @device_function
    def normaliser(q, exists, t):
        """The power of two that q is to be divided by, as an exponent."""
        of_lane = cuda.local.array(1, float32)
        of_lane[0] = float32(0)
        for_each(raise_largest, NUM_QUADS, (of_lane, q, exists, t))
        largest = larger(of_lane[0], exchange(of_lane[0], 1))
        largest = larger(largest, exchange(largest, 2))
        return max(int64(float_bits(largest) >> 23) - 127 - LARGEST_EXPONENT, SMALLEST_SHIFT)

    @device_function
    def power_of_two(exponent):
        return bits_float(uint32(uint32(exponent + 127) << uint32(23)))

    @device_function
    def words(q, vector, step, term, inverse, exists, t):
        """A term of a quad: the words of its first two and of its last two elements."""
        if term >= TERMS:
            return uint32(0), uint32(0)
        if IS_EXACT:
            return load_words(q, vector, step, exists, t)
        x = load_quad(q, vector, step, exists, t)
        if IS_NORMALISED:
            return split_pair(x[0] * inverse, x[1] * inverse, term), split_pair(x[2] * inverse, x[3] * inverse, term)
        return split_pair(x[0], x[1], term), split_pair(x[2], x[3], term)

    @device_function
    def fragment(f, vector, q_first, q_second, inverse_first, inverse_second, first_exists, second_exists, t):
        """Registers a0..a3 of a vector's fragment f, a constant.

        What is in rows g, and in rows g + 8, is by the table of split_tensor.
        """
        if FOLD:
            above = words(q_first, vector, 2 * f, 0, inverse_first, first_exists, t)
            below = words(q_first, vector, 2 * f + 1, 0, inverse_first, first_exists, t)
        elif HEAD_TILES == 1:
            step, term = f // PER_STEP, 2 * (f % PER_STEP)
            above = words(q_first, vector, step, term, inverse_first, first_exists, t)
            below = words(q_first, vector, step, term + 1, inverse_first, first_exists, t)
        else:
            step, term = f // PER_STEP, f % PER_STEP
            above = words(q_first, vector, step, term, inverse_first, first_exists, t)
            below = words(q_second, vector, step, term, inverse_second, second_exists, t)
        return above[0], below[0], above[1], below[1]

    @device_function
    def keep(f, q_frags, rows):
        a = fragment(f % Q_PER_VECTOR, f // Q_PER_VECTOR, *rows)
        q_frags[4 * f], q_frags[4 * f + 1], q_frags[4 * f + 2], q_frags[4 * f + 3] = a[0], a[1], a[2], a[3]

    @device_function
    def put(f, vector, q_shared, rows):
        a = fragment(f, vector, *rows)
        where = uint32(q_shared + uint32(FRAGMENT_BYTES * (vector * Q_PER_VECTOR + f)))
        store_shared_words(where, a[0], a[1], a[2], a[3])

    @device_function
    def stage_query(q_frags, q_shared, factors, q, head_stride, num_heads, g, t, worker):
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
        if Q_IN_SHARED:
            vector = worker
            while vector < K_VECTORS:
                for_each(put, Q_PER_VECTOR, (vector, q_shared, rows))
                vector += NUM_WORKERS
        else:
            for_each(keep, FRAGMENTS, (q_frags, rows))

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


def make_split_pair(shape: TensorShape) -> Any:
    """The device function ``split_pair(x, y, term)``: that term of two float32 as the halves of a word.

    Term 0 is the value rounded to 16 bits; each further one is the rest rounded to 16 bits.
    """
    pack = pack_bfloat16 if shape.operand == "bfloat16" else pack_float16
    widen = unpack(shape.operand)

    @device_function
    def split_pair(x, y, term):
        word = pack(x, y)
        for _ in range(term):
            low, high = widen(word)
            x, y = float32(x - low), float32(y - high)
            word = pack(x, y)
        return word

    return split_pair
