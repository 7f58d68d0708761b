"""gather_kv: copy the keys and values of one sequence to dense rows.

Grid. x over (token, group of elements), y over KV heads, z = 0 for K and 1 for V.

Who owns what. A thread moves 4 or 8 elements of one row and stores them 16 bytes at a time.

Shared memory. None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..device.bad_entries import BLOCK_ID, record
from ..device.cache_rows import SCALE_STRIDES, scale_of_row, scales_of_keys, scales_of_values
from ..device.conversions import unpack
from ..device.intrinsics.thread import address, float_bits, load_1, load_2, load_4, load_8, load_16, store_16
from ..device.language import cuda, float32, int64, types, uint32, uint64
from ..device.sizes import SCALED_BY_ROW
from ..device.source import KernelSource, device_function
from .tokens import NUM_THREADS, RowShape, make_item, row_shape


@dataclass(frozen=True, slots=True)
class GatherConfig:
    """The compile-time constants of gather_kv.

    Attributes
    ----------
    kind : str
        Elements of the caches: "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2" or "int8". Those of 8 bits are
        widened to float32 and multiplied by their scale; the others are copied.
    head_dim, block_size : int
        D and P.
    is_vllm : bool
        The caches are in the layout vllm, not in NHD or HND.
    k_per_head, v_per_head : bool
        The scale comes from an array, not from a number.
    checked : bool
        Skip and record block ids outside 0..num_blocks-1.
    hardware_fp8 : bool
        The device has instructions for fp8; e4m3 is widened with them.
    """

    kind: str
    head_dim: int
    block_size: int
    is_vllm: bool = False
    k_per_head: bool = False
    v_per_head: bool = False
    checked: bool = False
    hardware_fp8: bool = False


def make_gather_kv(config: GatherConfig) -> KernelSource:
    """The kernel of a config.

    Its parameters are k_cache, v_cache, k, v (C-contiguous), block_table, k_scales, v_scales (of KV heads or of rows, 0
    for none), report, num_tokens, num_kv_heads, num_blocks; in bytes the block, position, head and column strides of
    k_cache and of v_cache, and those of scales of rows; k_scale, v_scale.
    """
    k_row = row_shape(config.kind, config.head_dim, is_vllm=config.is_vllm, is_v=False)
    v_row = row_shape(config.kind, config.head_dim, is_vllm=config.is_vllm, is_v=True)
    gather_k, gather_v = (_make_gather(config.kind, row, config.hardware_fp8) for row in (k_row, v_row))
    item = make_item(k_row)
    row_bytes = int64(config.head_dim * (4 if k_row.itemsize == 1 else k_row.itemsize))
    by_row = config.kind in SCALED_BY_ROW
    block_size, checked = uint64(config.block_size), config.checked
    k_per_head, v_per_head = config.k_per_head, config.v_per_head

    def gather_kv(
        k_cache, v_cache, k, v, block_table, k_scales, v_scales, report,
        num_tokens, num_kv_heads, num_blocks,
        k_block_stride, k_position_stride, k_head_stride, k_column_stride,
        v_block_stride, v_position_stride, v_head_stride, v_column_stride, scale_strides,
        k_scale, v_scale,
    ):  # fmt: skip
        which, first = item()
        token = int64(which)
        if token >= num_tokens:
            return
        column = int64(which // block_size)
        position = int64(which % block_size)
        block = int64(block_table[column])
        if checked and (block < 0 or block >= num_blocks):
            if cuda.blockIdx.z == 0 and cuda.blockIdx.y == 0 and first == 0:
                record(report, BLOCK_ID, int64(-1), column, block)
            return
        head = int64(cuda.blockIdx.y)
        while head < num_kv_heads:
            target = (token * num_kv_heads + head) * row_bytes
            if cuda.blockIdx.z == 0:
                source = address(k_cache) + block * k_block_stride + position * k_position_stride + head * k_head_stride
                if by_row:
                    scale = scale_of_row(scales_of_keys(k_scales, scale_strides, head), block, position)
                else:
                    scale = k_scales[head] if k_per_head else float32(k_scale)
                gather_k(source, address(k) + target, k_column_stride, first, scale)
            else:
                source = address(v_cache) + block * v_block_stride + position * v_position_stride + head * v_head_stride
                if by_row:
                    scale = scale_of_row(scales_of_values(v_scales, scale_strides, head), block, position)
                else:
                    scale = v_scales[head] if v_per_head else float32(v_scale)
                gather_v(source, address(v) + target, v_column_stride, first, scale)
            head += int64(cuda.gridDim.y)

    bytes_, ints, floats = types.CPointer(types.uint8), types.CPointer(types.int32), types.CPointer(float32)
    parameters = [bytes_] * 4 + [ints, floats, floats, types.CPointer(int64)] + [int64] * 11
    parameters += [SCALE_STRIDES] + [types.float64] * 2
    return KernelSource(gather_kv, types.void(*parameters), NUM_THREADS)


def _make_gather(kind: str, row: RowShape, hardware_fp8: bool) -> Any:
    """The device function (address of the cache row, address of the dense row, column stride, first element, scale)."""
    load = _make_load(row)
    is_coded = row.itemsize == 1
    num_words, chunk, itemsize = row.elements * row.itemsize // 4, uint32(row.chunk), uint32(row.itemsize)
    widen = unpack(kind, hardware_fp8)

    @device_function
    def gather(source, target, column_stride, first, scale):
        words = cuda.local.array(num_words, uint32)
        source += int64(first // chunk) * column_stride + int64(uint32(first % chunk) * itemsize)
        load(words, source, column_stride)
        if is_coded:
            target += int64(uint32(first * uint32(4)))
            for i in range(num_words):
                a, b, c, d = widen(words[i])
                store_16(
                    target + 16 * i,
                    float_bits(float32(a * scale)),
                    float_bits(float32(b * scale)),
                    float_bits(float32(c * scale)),
                    float_bits(float32(d * scale)),
                )
        else:
            target += int64(uint32(first * itemsize))
            store_16(target, words[0], words[1], words[2], words[3])

    return gather


def _make_load(row: RowShape) -> Any:
    """The device function that loads words from an address, in one piece or as elements a column stride apart."""
    num_words = row.elements * row.itemsize // 4
    if row.chunk == 1:
        per_word, element_bits = 4 // row.itemsize, 8 * row.itemsize
        load_one = {1: load_1, 2: load_2, 4: load_4}[row.itemsize]

        @device_function
        def load_elements(words, source, column_stride):
            for i in range(num_words):
                word = uint32(0)
                for j in range(per_word):
                    element = uint32(load_one(source + (i * per_word + j) * column_stride))
                    word = uint32(word | uint32(element << uint32(j * element_bits)))
                words[i] = word

        return load_elements
    load_all = {2: load_8, 4: load_16}[num_words]

    @device_function
    def load_words(words, source, column_stride):
        loaded = load_all(source)
        for i in range(num_words):
            words[i] = loaded[i]

    return load_words
