"""write_kv: the keys and values of new tokens into their slots; keys may be rotated on the way (rotated_keys.py).

Grid. x over (token, group of elements), y over KV heads, z = 0 for K and 1 for V.

Who owns what. A thread moves 4 or 8 elements of one row with 16-byte loads and, except for V in the layout vllm, one
store of 16 or 8 bytes.

Rows with scales of their own. Neighbouring lanes of a warp have a row, find its largest element by shuffles, and all
compute its scale, which the first one stores.

Shared memory. None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..device.bad_entries import POSITION, SLOT, record
from ..device.cache_rows import SCALE_STRIDES, place_of_scale, scales_of_keys, scales_of_values
from ..device.conversions import narrow, unpack
from ..device.intrinsics.thread import (
    address,
    bits_float,
    float_bits,
    load_16,
    store_1,
    store_2,
    store_4,
    store_8,
    store_16,
)
from ..device.language import cuda, float32, int32, int64, types, uint8, uint16, uint32, uint64
from ..device.rotation import position_of
from ..device.sizes import ELEMENT_BITS, LARGEST_CODE, SCALED_BY_ROW
from ..device.source import KernelSource, device_function
from .rotated_keys import make_rotate
from .tokens import NUM_THREADS, RowShape, lanes_of_row, make_item, row_shape


@dataclass(frozen=True, slots=True)
class WriteConfig:
    """The compile-time constants of write_kv.

    Attributes
    ----------
    kind : str
        Elements of the caches: "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2" or "int8".
    k_kind, v_kind : str
        The same for k and v.
    head_dim, block_size : int
        D and P.
    is_vllm : bool
        The caches are in the layout vllm, not in NHD or HND.
    k_per_head, v_per_head : bool
        The scale comes from an array, not from a number.
    checked : bool
        Skip and record slots at or past num_slots, and positions that the tables have no row for.
    hardware_fp8 : bool
        The device has instructions for fp8.
    rotary_dim : int
        How many of a key's first dims are rotated; 0 is a kernel that has no tables.
    table_kind : str
        Elements of cos and sin: "float32", or `k_kind`.
    interleaved : bool
        Pairs are neighbours, not half of rotary_dim apart.
    """

    kind: str
    k_kind: str
    v_kind: str
    head_dim: int
    block_size: int
    is_vllm: bool = False
    k_per_head: bool = False
    v_per_head: bool = False
    checked: bool = False
    hardware_fp8: bool = False
    rotary_dim: int = 0
    table_kind: str = "float32"
    interleaved: bool = False


def make_write_kv(config: WriteConfig) -> KernelSource:
    """The kernel of a config.

    Its parameters: k, v, k_cache, v_cache, slots, k_scales, v_scales (of KV heads or of rows, 0 for none), report,
    num_tokens, num_kv_heads, num_slots; in bytes the token and head strides of k and v, then block, position, head and
    column strides of k_cache and of v_cache, and those of scales of rows; k_scale, v_scale; and of what only a kernel
    that rotates looks at, cos, sin, positions, max_positions, bytes of a position, row strides of cos and of sin.
    """
    k_row = row_shape(config.kind, config.head_dim, is_vllm=config.is_vllm, is_v=False)
    v_row = row_shape(config.kind, config.head_dim, is_vllm=config.is_vllm, is_v=True)
    by_row = config.kind in SCALED_BY_ROW
    if by_row:
        k_row, v_row = lanes_of_row(k_row), lanes_of_row(v_row)
        write_k = _make_quantise(_make_floats_of_keys(config, k_row), config.head_dim, k_row)
        write_v = _make_quantise(_make_floats(config.v_kind, v_row.elements), config.head_dim, v_row)
    else:
        write_k = _make_write_keys(config, k_row)
        write_v = _make_write(config.v_kind, config.kind, v_row, config.hardware_fp8)
    item = make_item(k_row)
    block_size, checked, rotated = uint64(config.block_size), config.checked, config.rotary_dim > 0
    k_per_head, v_per_head = config.k_per_head, config.v_per_head

    def write_kv(
        k, v, k_cache, v_cache, slots, k_scales, v_scales, report,
        num_tokens, num_kv_heads, num_slots,
        k_token_stride, k_head_stride, v_token_stride, v_head_stride,
        k_block_stride, k_position_stride, k_cache_head_stride, k_column_stride,
        v_block_stride, v_position_stride, v_cache_head_stride, v_column_stride, scale_strides,
        k_scale, v_scale,
        cos, sin, positions, max_positions, position_bytes, cos_stride, sin_stride,
    ):  # fmt: skip
        which, first = item()
        token = int64(which)
        if token >= num_tokens:
            return
        slot = slots[token]
        if slot < 0:
            return
        if checked and slot >= num_slots:
            if cuda.blockIdx.z == 0 and cuda.blockIdx.y == 0 and first == 0:
                record(report, SLOT, token, int64(0), slot)
            return
        table_row = int64(0)
        if rotated:
            table_row = position_of(positions, position_bytes, token)
            if checked and (table_row < 0 or table_row >= max_positions):
                if cuda.blockIdx.z == 0 and cuda.blockIdx.y == 0 and first == 0:
                    record(report, POSITION, token, int64(0), table_row)
                return
        block = int64(uint64(slot) // block_size)
        position = int64(uint64(slot) % block_size)
        head = int64(cuda.blockIdx.y)
        while head < num_kv_heads:
            if cuda.blockIdx.z == 0:
                row = address(k) + token * k_token_stride + head * k_head_stride
                target = address(k_cache) + block * k_block_stride
                target += position * k_position_stride + head * k_cache_head_stride
                cosines, sines = address(cos) + table_row * cos_stride, address(sin) + table_row * sin_stride
                if by_row:
                    place = place_of_scale(scales_of_keys(k_scales, scale_strides, head), block, position)
                    write_k(row, target, k_column_stride, first, place, cosines, sines)
                else:
                    scale = k_scales[head] if k_per_head else float32(k_scale)
                    write_k(row, target, k_column_stride, first, scale, cosines, sines)
            else:
                row = address(v) + token * v_token_stride + head * v_head_stride
                target = address(v_cache) + block * v_block_stride
                target += position * v_position_stride + head * v_cache_head_stride
                if by_row:
                    place = place_of_scale(scales_of_values(v_scales, scale_strides, head), block, position)
                    write_v(row, target, v_column_stride, first, place, int64(0), int64(0))
                else:
                    write_v(row, target, v_column_stride, first, v_scales[head] if v_per_head else float32(v_scale))
            head += int64(cuda.gridDim.y)

    bytes_, floats = types.CPointer(types.uint8), types.CPointer(types.float32)
    longs = types.CPointer(int64)
    parameters = [bytes_] * 4 + [longs, floats, floats, longs] + [int64] * 15
    parameters += [SCALE_STRIDES] + [types.float64] * 2 + [bytes_] * 3 + [int64] * 4
    return KernelSource(write_kv, types.void(*parameters), NUM_THREADS)


def _make_write_keys(config: WriteConfig, shape: RowShape) -> Any:
    """The device function of `_make_write` for keys, and two more arguments: rows of cosines and sines."""
    if not config.rotary_dim:
        write = _make_write(config.k_kind, config.kind, shape, config.hardware_fp8)

        @device_function
        def write_as_they_are(row, target, column_stride, first, scale, cosines, sines):
            write(row, target, column_stride, first, scale)

        return write_as_they_are
    encode = _make_encode(config.k_kind, config.kind, shape.elements, config.hardware_fp8)
    convert = None if config.k_kind == config.kind else _make_convert(config.kind, config.hardware_fp8)
    rotated = (config.k_kind, config.table_kind, config.rotary_dim, shape.elements, convert)
    rotate, store = make_rotate(*rotated, interleaved=config.interleaved), _make_store(shape)
    num_elements, rotary_dim = shape.elements, uint32(config.rotary_dim)

    @device_function
    def write_rotated(row, target, column_stride, first, scale, cosines, sines):
        codes = cuda.local.array(num_elements, uint32)
        if uint32(first + uint32(num_elements)) > rotary_dim:
            encode(codes, row, first, scale)
        if first < rotary_dim:
            rotate(codes, row, first, cosines, sines, scale)
        store(codes, target, column_stride, first)

    return write_rotated


def _make_floats(source_kind: str, num_elements: int) -> Any:
    """The device function (bits, row, first, cosines, sines): the elements of a row from `first` on, as float32."""
    encode = _make_encode(source_kind, "float32", num_elements, False)

    @device_function
    def floats(bits, row, first, cosines, sines):
        encode(bits, row, first, float32(1))

    return floats


def _make_floats_of_keys(config: WriteConfig, shape: RowShape) -> Any:
    """The same for keys, of which some dims are rotated, and rounded to the kind of k."""
    floats = _make_floats(config.k_kind, shape.elements)
    if not config.rotary_dim:
        return floats
    sizes = (config.k_kind, config.table_kind, config.rotary_dim, shape.elements, _make_convert("float32", False))
    rotate = make_rotate(*sizes, interleaved=config.interleaved)
    num_elements, rotary_dim = uint32(shape.elements), uint32(config.rotary_dim)

    @device_function
    def rotated_floats(bits, row, first, cosines, sines):
        if uint32(first + num_elements) > rotary_dim:
            floats(bits, row, first, cosines, sines)
        if first < rotary_dim:
            rotate(bits, row, first, cosines, sines, float32(1))

    return rotated_floats


def _make_quantise(floats: Any, head_dim: int, shape: RowShape) -> Any:
    """The device function (row, target, column stride, first, place, cosines, sines): a row as codes, and its scale.

    The lanes of a row call it together; `place` is where the scale goes. As `KvFormat.quantise`: each step rounds to
    float32, a row of zeros has scale 0 and one that is not finite scale NaN, both with codes 0.
    """
    LANES, ELEMENTS, HEAD_DIM = shape.num_vectors, shape.elements, head_dim
    TURN = LANES * ELEMENTS
    TURNS = -(-head_dim // TURN)
    store, STEPS = _make_store(shape), LANES.bit_length() - 1

    @device_function
    def code_of(bits, divisor):
        x = max(min(float32(bits_float(bits) / divisor), float32(LARGEST_CODE)), float32(-LARGEST_CODE))
        # Rounded to nearest even, a number beside 1.5 * 2**23 is the low bits of the sum.
        return uint32(float_bits(float32(x + float32(12582912.0))) & uint32(0xFF))

    @device_function
    def quantise(row, target, column_stride, first, place, cosines, sines):
        bits, largest = cuda.local.array((TURNS, ELEMENTS), uint32), uint32(0)
        for i in range(TURNS):
            at = uint32(first + i * TURN)
            if at < HEAD_DIM:
                floats(bits[i], row, at, cosines, sines)
                for j in range(ELEMENTS):
                    largest = max(largest, uint32(bits[i, j] & uint32(0x7FFFFFFF)))
        lane = uint32(cuda.threadIdx.x) & uint32(31)
        lanes_of_row = uint32(uint32((1 << LANES) - 1) << uint32(lane & uint32(32 - LANES)))
        for b in range(STEPS):
            largest = max(largest, uint32(cuda.shfl_xor_sync(lanes_of_row, int32(largest), 1 << b)))
        scale = float32(bits_float(largest) / float32(LARGEST_CODE))
        # The bits of an infinity and of a NaN are larger than those of any number.
        is_finite = largest < uint32(0x7F800000)
        divisor = scale if is_finite and scale > float32(0) else float32(math.inf)
        for i in range(TURNS):
            at = uint32(first + i * TURN)
            if at < HEAD_DIM:
                for j in range(ELEMENTS):
                    code = code_of(bits[i, j], divisor)
                    bits[i, j] = code if is_finite else uint32(0)
                store(bits[i], target, column_stride, at)
        if first == 0:
            store_4(place, float_bits(scale) if is_finite else uint32(0x7FC00000))

    return quantise


def _make_write(source_kind: str, kind: str, shape: RowShape, hardware_fp8: bool) -> Any:
    """The device function (address of the row in k or v, in the cache, column stride, first element, scale)."""
    encode = _make_encode(source_kind, kind, shape.elements, hardware_fp8)
    store, num_elements = _make_store(shape), shape.elements

    @device_function
    def write(row, target, column_stride, first, scale):
        codes = cuda.local.array(num_elements, uint32)
        encode(codes, row, first, scale)
        store(codes, target, column_stride, first)

    return write


def _make_encode(source_kind: str, kind: str, num_elements: int, hardware_fp8: bool) -> Any:
    """The device function that fills codes with the elements of a row from `first` on, as the cache stores them."""
    size = uint32(ELEMENT_BITS[source_kind] // 8)
    if source_kind == "float32":
        num_loads, halves = num_elements // 4, False
    else:
        num_loads, halves = num_elements // 8, True
    convert = _make_convert(kind, hardware_fp8)
    widen = unpack(source_kind)
    as_is = source_kind == kind

    @device_function
    def encode(codes, row, first, scale):
        source = row + int64(first * size)
        for i in range(num_loads):
            words = load_16(source + int64(16 * i))
            for j in range(4):
                word = words[j]
                if halves:
                    at = 8 * i + 2 * j
                    if as_is:
                        codes[at] = uint32(word & uint32(0xFFFF))
                        codes[at + 1] = uint32(word >> uint32(16))
                    else:
                        low, high = widen(word)
                        codes[at] = convert(low, scale)
                        codes[at + 1] = convert(high, scale)
                elif as_is:
                    codes[4 * i + j] = word
                else:
                    codes[4 * i + j] = convert(bits_float(word), scale)

    return encode


def _make_convert(kind: str, hardware_fp8: bool) -> Any:
    """The device function (float32, scale) -> bits of an element; only fp8 has a scale."""
    round_, is_fp8 = narrow(kind, hardware_fp8), kind.startswith("fp8")

    @device_function
    def convert(x, scale):
        return round_(float32(x / scale)) if is_fp8 else round_(x)

    return convert


def _make_store(shape: RowShape) -> Any:
    """The device function that stores codes in a row of a cache, from the element `first` on."""
    store, chunk, itemsize = _make_store_at(shape), uint32(shape.chunk), uint32(shape.itemsize)

    @device_function
    def store_from(codes, target, column_stride, first):
        target += int64(first // chunk) * column_stride + int64(uint32(first % chunk) * itemsize)
        store(codes, target, column_stride)

    return store_from


def _make_store_at(row: RowShape) -> Any:
    """The device function that stores codes at an address: in one piece, or as elements a column stride apart."""
    if row.chunk == 1:
        num_elements = row.elements
        store_one = {1: store_1, 2: store_2, 4: store_4}[row.itemsize]
        cast = {1: uint8, 2: uint16, 4: uint32}[row.itemsize]

        @device_function
        def store_elements(codes, target, column_stride):
            for i in range(num_elements):
                store_one(target + i * column_stride, cast(codes[i]))

        return store_elements
    if row.itemsize == 4:

        @device_function
        def store_words(codes, target, column_stride):
            store_16(target, codes[0], codes[1], codes[2], codes[3])

        return store_words
    if row.itemsize == 2:

        @device_function
        def store_halves(codes, target, column_stride):
            store_16(
                target,
                uint32(codes[0] | codes[1] << uint32(16)),
                uint32(codes[2] | codes[3] << uint32(16)),
                uint32(codes[4] | codes[5] << uint32(16)),
                uint32(codes[6] | codes[7] << uint32(16)),
            )

        return store_halves

    @device_function
    def store_bytes(codes, target, column_stride):
        store_8(
            target,
            uint32(codes[0] | codes[1] << uint32(8) | codes[2] << uint32(16) | codes[3] << uint32(24)),
            uint32(codes[4] | codes[5] << uint32(8) | codes[6] << uint32(16) | codes[7] << uint32(24)),
        )

    return store_bytes
