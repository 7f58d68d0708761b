"""write_kv: the keys and values of new tokens into their slots.

Grid. x over (token, group of elements), y over KV heads, z = 0 for K and 1 for V.

Who owns what. A thread moves 4 or 8 elements of one row with 16-byte loads and, except for V in the layout vllm, one
store of 16 or 8 bytes.

Shared memory. None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, int64, types, uint8, uint16, uint32, uint64

from ..device.bad_entries import SLOT, record
from ..device.conversions import narrow, unpack
from ..device.intrinsics import address, bits_float, float_bits, load_16, store_1, store_2, store_4, store_8, store_16
from ..device.source import KernelSource, device_function
from .tokens import NUM_THREADS, RowShape, make_item, row_shape

# NaN without its sign, as the CPU's conversions write it; float16 keeps as much of the payload as fits.
_NAN = {"float16": 0x7C00, "bfloat16": 0x7FC0}


@dataclass(frozen=True, slots=True)
class WriteConfig:
    """The compile-time constants of write_kv.

    Attributes
    ----------
    kind : str
        Elements of the caches: "float32", "float16", "bfloat16", "fp8_e4m3" or "fp8_e5m2".
    k_kind, v_kind : str
        The same for k and v.
    head_dim, block_size : int
        D and P.
    is_vllm : bool
        The caches are in the layout vllm, not in NHD or HND.
    k_per_head, v_per_head : bool
        The scale comes from an array, not from a number.
    checked : bool
        Skip and record slots at or past num_slots.
    hardware_fp8 : bool
        The device has instructions for fp8.
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


def make_write_kv(config: WriteConfig) -> KernelSource:
    """The kernel of a config.

    Its parameters: k, v, k_cache, v_cache, slots, k_scales, v_scales (0 for none), report, num_tokens,
    num_kv_heads, num_slots; in bytes the token and head strides of k and v, then block, position, head and column
    strides of k_cache and of v_cache; k_scale, v_scale.
    """
    k_row = row_shape(config.kind, config.head_dim, is_vllm=config.is_vllm, is_v=False)
    v_row = row_shape(config.kind, config.head_dim, is_vllm=config.is_vllm, is_v=True)
    write_k = _make_write(config.k_kind, config.kind, k_row, config.hardware_fp8)
    write_v = _make_write(config.v_kind, config.kind, v_row, config.hardware_fp8)
    k_size, v_size = (uint32(4 if kind == "float32" else 2) for kind in (config.k_kind, config.v_kind))
    item = make_item(k_row)
    block_size, checked = uint64(config.block_size), config.checked
    k_per_head, v_per_head = config.k_per_head, config.v_per_head

    def write_kv(
        k, v, k_cache, v_cache, slots, k_scales, v_scales, report,
        num_tokens, num_kv_heads, num_slots,
        k_token_stride, k_head_stride, v_token_stride, v_head_stride,
        k_block_stride, k_position_stride, k_cache_head_stride, k_column_stride,
        v_block_stride, v_position_stride, v_cache_head_stride, v_column_stride,
        k_scale, v_scale,
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
        block = int64(uint64(slot) // block_size)
        position = int64(uint64(slot) % block_size)
        head = int64(cuda.blockIdx.y)
        while head < num_kv_heads:
            if cuda.blockIdx.z == 0:
                source = address(k) + token * k_token_stride + head * k_head_stride + int64(first * k_size)
                target = address(k_cache) + block * k_block_stride
                target += position * k_position_stride + head * k_cache_head_stride
                write_k(source, target, k_column_stride, first, k_scales[head] if k_per_head else float32(k_scale))
            else:
                source = address(v) + token * v_token_stride + head * v_head_stride + int64(first * v_size)
                target = address(v_cache) + block * v_block_stride
                target += position * v_position_stride + head * v_cache_head_stride
                write_v(source, target, v_column_stride, first, v_scales[head] if v_per_head else float32(v_scale))
            head += int64(cuda.gridDim.y)

    bytes_, floats = types.CPointer(types.uint8), types.CPointer(types.float32)
    longs = types.CPointer(int64)
    parameters = [bytes_] * 4 + [longs, floats, floats, longs] + [int64] * 15 + [types.float64] * 2
    return KernelSource(write_kv, types.void(*parameters), NUM_THREADS)


def _make_write(source_kind: str, kind: str, row: RowShape, hardware_fp8: bool) -> Any:
    """The device function (source address, address of the row, column stride, first element, scale)."""
    encode = _make_encode(source_kind, kind, row.elements, hardware_fp8)
    store = _make_store(row)
    num_elements, chunk, itemsize = row.elements, uint32(row.chunk), uint32(row.itemsize)

    @device_function
    def write(source, target, column_stride, first, scale):
        codes = cuda.local.array(num_elements, uint32)
        encode(codes, source, scale)
        target += int64(first // chunk) * column_stride + int64(uint32(first % chunk) * itemsize)
        store(codes, target, column_stride)

    return write


def _make_encode(source_kind: str, kind: str, num_elements: int, hardware_fp8: bool) -> Any:
    """The device function that fills codes with the elements at an address as the bits that the cache stores."""
    if source_kind == "float32":
        num_loads, halves = num_elements // 4, False
    else:
        num_loads, halves = num_elements // 8, True
    convert = _make_convert(kind, hardware_fp8)
    widen = unpack(source_kind)
    as_is = source_kind == kind

    @device_function
    def encode(codes, source, scale):
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
    if kind == "float32":
        return None
    round_ = narrow(kind, hardware_fp8)
    # Arithmetic on a GPU loses the sign of a NaN.
    if kind.startswith("fp8"):

        @device_function
        def divide_and_round(x, scale):
            return uint32(round_(float32(x / scale)) | uint32(float_bits(x) >> uint32(24)) & uint32(0x80))

        return divide_and_round
    is_float16, nan = kind == "float16", uint32(_NAN[kind])

    @device_function
    def convert(x, scale):
        code = round_(x)
        bits = float_bits(x)
        if uint32(bits & uint32(0x7FFFFFFF)) > uint32(0x7F800000):
            code = uint32(uint32(bits >> uint32(16)) & uint32(0x8000) | nan)
            if is_float16:
                code = uint32(code | max(uint32(uint32(bits >> uint32(13)) & uint32(0x3FF)), uint32(1)))
        return code

    return convert


def _make_store(row: RowShape) -> Any:
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
