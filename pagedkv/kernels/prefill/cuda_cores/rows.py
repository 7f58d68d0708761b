"""Loads of the kernel on CUDA cores: rows of q and of the caches to shared memory, as float32."""

from __future__ import annotations

from typing import Any

from ...device.conversions import unpack
from ...device.intrinsics.thread import (
    bits_float,
    divmod_32,
    load_1,
    load_2,
    load_4,
    load_8,
    load_16,
)
from ...device.intrinsics.warp import (
    store_shared_4,
)
from ...device.language import int64, uint32
from ...device.sizes import ELEMENT_BITS
from ...device.source import device_function
from ..config import NUM_THREADS
from .shape import VECTOR, CoresShape


def make_load_quad(kind: str, hardware_fp8: bool) -> Any:
    """The device function ``load_quad(where)``: 4 elements side by side as float32."""
    BYTES, widen = ELEMENT_BITS[kind] // 8, unpack(kind, hardware_fp8)

    @device_function
    def load_quad(where):
        if BYTES == 4:
            x = load_16(where)
            return bits_float(x[0]), bits_float(x[1]), bits_float(x[2]), bits_float(x[3])
        if BYTES == 2:
            y = load_8(where)
            a, b = widen(y[0])
            c, d = widen(y[1])
            return a, b, c, d
        return widen(load_4(where))

    return load_quad


def make_load_strided(kind: str, hardware_fp8: bool) -> Any:
    """The device function ``load_strided(where, stride)``: 4 elements, `stride` bytes apart, as float32."""
    BYTES, widen = ELEMENT_BITS[kind] // 8, unpack(kind, hardware_fp8)
    load = {1: load_1, 2: load_2, 4: load_4}[BYTES]

    @device_function
    def load_one(where):
        return widen(uint32(load(where)))[0]

    @device_function
    def load_strided(where, stride):
        second, third, fourth = where + stride, where + 2 * stride, where + 3 * stride
        return load_one(where), load_one(second), load_one(third), load_one(fourth)

    return load_strided


def make_load_query(shape: CoresShape) -> Any:
    """The device function ``load_query(tile, q, strides, first_row, last_row, group_size, thread)``.

    Rows past the last one of the sequence repeat it.
    """
    VECTORS, ROW_BYTES, ALL = shape.row_vectors, shape.row_bytes, shape.rows * shape.row_vectors
    Q_BYTES, load_quad = ELEMENT_BITS[shape.config.q_kind] // 8, make_load_quad(shape.config.q_kind, False)

    @device_function
    def load_query(tile, q, strides, first_row, last_row, group_size, thread):
        i = thread
        while i < uint32(ALL):
            r, vector = divmod_32(i, VECTORS)
            token, head = divmod_32(min(uint32(first_row + r), last_row), group_size)
            where = q + int64(token) * strides[0] + int64(head) * strides[1] + int64(vector) * (VECTOR * Q_BYTES)
            a, b, c, d = load_quad(where)
            store_shared_4(uint32(tile + uint32(uint32(r * ROW_BYTES) + uint32(vector << 4))), a, b, c, d)
            i = uint32(i + NUM_THREADS)

    return load_query


def make_load_rows(shape: CoresShape, *, is_keys: bool) -> Any:
    """The device function ``load_rows(tile, rows, base, dim_stride, thread)``: a tile of K or of V as float32.

    In layout vllm, dim_stride is the stride of a vector of 16 bytes of K, or of a dim of V.
    """
    config = shape.config
    VECTORS, ROW_BYTES, ALL = shape.row_vectors, shape.row_bytes, shape.rows * shape.row_vectors
    KV_BYTES, OFFSET, IS_VLLM = ELEMENT_BITS[config.kv_kind] // 8, 0 if is_keys else shape.rows, config.is_vllm
    PER_VECTOR, IS_STRIDED = 16 // (VECTOR * KV_BYTES), config.is_vllm and not is_keys
    load_quad = make_load_quad(config.kv_kind, config.hardware_fp8)
    load_strided = make_load_strided(config.kv_kind, config.hardware_fp8)

    @device_function
    def load_rows(tile, rows, base, dim_stride, thread):
        i = thread
        while i < uint32(ALL):
            r, vector = divmod_32(i, VECTORS)
            where = base + rows[int64(r) + OFFSET]
            if IS_STRIDED:
                a, b, c, d = load_strided(where + int64(vector) * (VECTOR * dim_stride), dim_stride)
            elif IS_VLLM:
                piece, part = divmod_32(vector, PER_VECTOR)
                a, b, c, d = load_quad(where + int64(piece) * dim_stride + int64(part) * (VECTOR * KV_BYTES))
            else:
                a, b, c, d = load_quad(where + int64(vector) * (VECTOR * KV_BYTES))
            store_shared_4(uint32(tile + uint32(uint32(r * ROW_BYTES) + uint32(vector << 4))), a, b, c, d)
            i = uint32(i + NUM_THREADS)

    return load_rows
