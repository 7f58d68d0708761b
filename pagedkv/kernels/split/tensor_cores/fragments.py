"""Fragments of the split kernel on tensor cores: from rows of the caches, and into both matrix products.

Which lane has what of a tile is drawn at the top of few_heads.py; the names g, t, v, j and z are from there.
"""

from __future__ import annotations

from typing import Any

from ...device.halves import make_halves
from ...device.intrinsics import warp as tensor
from ...device.intrinsics.thread import assign, unrolled
from ...device.intrinsics.warp import permute, stream_8, stream_16
from ...device.language import uint32
from ...device.source import Steps, device_function
from ..config import VECTOR_BYTES
from ..shape import FRAGMENT_BYTES, K_VECTOR, TILE, TensorShape


@device_function
def key_token(g):
    """The token of a tile that lanes (g, t) load for one product; for the other it is two later."""
    return uint32((uint32(g >> 1) << 2) + (g & 1))


def make_rows(shape: TensorShape, row_address: Any) -> Steps:
    """The device functions that load the chunks of a step, from rows whose offsets lanes have shared.

    `base` is the address of the lane's vector 0 in the row at offset 0.
    """
    TILES, K_PER_CHUNK, K_VECTORS, ROW_BYTES = shape.tiles, shape.k_per_chunk, shape.k_vectors, shape.config.row_bytes
    FULL, ALIGNED = ROW_BYTES // K_VECTOR, shape.config.vector_bytes == VECTOR_BYTES
    V_PER_CHUNK, V_VECTORS, PER_TILE = shape.v_per_chunk, shape.v_vectors, shape.v_per_chunk * shape.v_vector
    V_VECTOR, WORDS, STRIDE = shape.v_vector, shape.v_vector // 4, 8 * shape.v_vector
    IS_WHOLE = V_VECTORS * STRIDE * shape.config.warps_for_dims == shape.config.row_bytes
    load_value = stream_16 if V_VECTOR == VECTOR_BYTES else stream_8

    @device_function
    def pair(x, y):
        return x[0], x[1], y[0], y[1]

    @device_function
    def load(where):
        return stream_16(where) if ALIGNED else pair(stream_8(where), stream_8(where + 8))

    @device_function
    def load_part(row, vector, t):
        """Load a vector that may lie past the row: then load the row's first bytes instead, and zero them."""
        left = ROW_BYTES - K_VECTOR * vector - 16 * t
        start, inside = row - 16 * t, row + K_VECTOR * vector
        if ALIGNED:
            x = stream_16(inside if left > 0 else start)
        else:
            x = pair(stream_8(inside if left > 0 else start), stream_8(inside + 8 if left > 8 else start))
        low, high = left > 0, left > (0 if ALIGNED else 8)
        zero = uint32(0)
        return x[0] if low else zero, x[1] if low else zero, x[2] if high else zero, x[3] if high else zero

    @unrolled(shape.k_per_chunk)
    def load_vectors(c, chunk, buffers, at, first, second, t):
        vector = chunk * K_PER_CHUNK + c
        if vector < K_VECTORS:
            if vector < FULL:
                x, y = load(first + K_VECTOR * vector), load(second + K_VECTOR * vector)
            else:
                x, y = load_part(first, vector, t), load_part(second, vector, t)
            assign(buffers, at + 8 * c, x)
            assign(buffers, at + (8 * c + 4), y)

    @device_function
    def load_keys(chunk, buffers, at, base, offset, token, t):
        """Register j of vector c of tile i goes to ``at + 8 (i * k_per_chunk + c) + j``; token is `key_token`.

        j from 4 on is the token two later. Bytes past the row become 0.
        """
        for i in range(TILES):
            first = row_address(base, offset, uint32(token + TILE * i))
            second = row_address(base, offset, uint32(token + TILE * i + 2))
            load_vectors(chunk, buffers, at + 8 * K_PER_CHUNK * i, first, second, t)

    @unrolled(4 * shape.tiles)
    def load_values(row_of_lane, chunk, buffers, at, base, offset, room, t):
        """Word j of vector c of token 4t + k of tile i goes to ``at + words (4 (i * v_per_chunk + c) + k) + j``.

        `room` is the bytes of the row from vector 0 on. A lane past the row loads the row's last vector, since those
        rows of the product are never stored.
        """
        i, k = row_of_lane // 4, row_of_lane % 4
        row = row_address(base, offset, uint32(uint32(t << 2) + TILE * i + k))
        for c in range(V_PER_CHUNK):
            vector = chunk * V_PER_CHUNK + c
            if vector < V_VECTORS:
                x = load_value(row + (STRIDE * vector if IS_WHOLE else min(STRIDE * vector, room - V_VECTOR)))
                assign(buffers, at + ((i * V_PER_CHUNK + c) * 4 + k) * WORDS, x)

    @unrolled(shape.tiles * PER_TILE)
    def zero_values(word, buffers, at, mine):
        """Zero tokens whose bit in `mine` is not set: they may be NaN, which a probability of 0 does not remove."""
        i, k = word // PER_TILE, word // WORDS % 4
        is_valid = uint32(mine & (1 << (TILE * i + k))) != 0
        buffers[at + word] = buffers[at + word] if is_valid else uint32(0)

    return Steps(load_keys, load_values, zero_values)


def make_products(shape: TensorShape) -> Steps:
    """The device functions of both products of a chunk, which begins at words[at], and of the operands they make.

    raw has 4 accumulators for each tile, token row and set, o for each product of 16 dims and 8 heads. p and p_rest
    have two words for each tile and 8 heads.
    """
    TILES, K_PER_CHUNK, K_VECTORS = shape.tiles, shape.k_per_chunk, shape.k_vectors
    IS_FOLDED, SETS, Q_PER_VECTOR = shape.is_folded, shape.score_sets, shape.q_per_vector
    V_PER_CHUNK, V_VECTORS, WORDS = shape.v_per_chunk, shape.v_vectors, shape.v_vector // 4
    EXPAND, HEAD_TILES, IS_CODED = shape.v_dims // (2 * WORDS), shape.head_tiles, shape.is_coded
    mma = tensor.mma_of(shape.operand)
    lower, upper = make_halves(shape.config.kv_kind, shape.config.hardware_fp8)

    @device_function
    def key_fragment(words, at, step):
        """Registers b0 and b1 of a k16 step, from the four words at `at`."""
        if IS_CODED:
            return lower(words[at + step]), upper(words[at + step])
        return words[at + 2 * step], words[at + 2 * step + 1]

    @device_function
    def value_fragment(v0, v1, v2, v3, z):
        """Registers a0..a3, from one word of each of a lane's four tokens: dims in rows, pairs of tokens in halves."""
        if IS_CODED:
            # Bytes 2z and 2z + 1 of both tokens: dim 4j + 2z below, the next one above.
            selector = uint32(0x7362) if z else uint32(0x5140)
            x, y = permute(v0, v1, selector), permute(v2, v3, selector)
            return lower(x), upper(x), lower(y), upper(y)
        return permute(v0, v1, 0x5410), permute(v0, v1, 0x7632), permute(v2, v3, 0x5410), permute(v2, v3, 0x7632)

    @unrolled((4 if shape.is_folded else 2) * shape.tiles)
    def multiply_steps(i, f, c, raw, buffers, at, a):
        # e is the k16 step of a folded fragment; n the tile, and in it the token of a lane or the one two later.
        e, n = i // (2 * TILES), i % (2 * TILES)
        step = 2 * f + e if IS_FOLDED else f
        words = at + 8 * ((n // 2) * K_PER_CHUNK + c) + 4 * (n % 2)
        b = key_fragment(buffers, words, step)
        mma(raw, 4 * (n * SETS + e), a, b[0], b[1])

    @unrolled(shape.k_per_chunk * shape.q_per_vector)
    def multiply_keys(fragment, chunk, registers, at, q_shared):
        """raw += Q K^T; q_shared is the shared address of this lane's part of fragment 0."""
        c, f = fragment // Q_PER_VECTOR, fragment % Q_PER_VECTOR
        vector = chunk * K_PER_CHUNK + c
        if vector < K_VECTORS:
            a = tensor.load_shared_words(uint32(q_shared + FRAGMENT_BYTES * (vector * Q_PER_VECTOR + f)))
            multiply_steps(f, c, registers.raw, registers.words, at, a)

    @unrolled(shape.head_tiles)
    def multiply_heads(h, product, i, o, a, p, p_rest):
        into, b = 4 * (product * HEAD_TILES + h), 2 * (i * HEAD_TILES + h)
        mma(o, into, a, p[b], p[b + 1])
        mma(o, into, a, p_rest[b], p_rest[b + 1])

    @unrolled(EXPAND)
    def multiply_halves(z, v, product, i, o, words, p, p_rest):
        a = value_fragment(words[v], words[v + WORDS], words[v + 2 * WORDS], words[v + 3 * WORDS], z)
        multiply_heads(product + z, i, o, a, p, p_rest)

    @unrolled(shape.tiles * shape.v_per_chunk * WORDS)
    def multiply_values(word, chunk, registers, at):
        """O += V^T P^T."""
        i, c, j = word // (V_PER_CHUNK * WORDS), word // WORDS % V_PER_CHUNK, word % WORDS
        vector = chunk * V_PER_CHUNK + c
        if vector < V_VECTORS:
            v, product = at + (i * V_PER_CHUNK + c) * 4 * WORDS + j, (vector * WORDS + j) * EXPAND
            multiply_halves(v, product, i, registers.o, registers.words, registers.p, registers.p_rest)

    return Steps(multiply_keys, multiply_values, key_fragment, value_fragment)
