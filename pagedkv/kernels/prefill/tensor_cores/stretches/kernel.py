"""Prefill attention for few KV heads, whose rows have too few thread blocks: several take the keys of the same rows.

The kernels of many rows (../kernel.py and ../wgmma/kernel.py) have one thread block for 128 rows, however many keys
these see. A chunk of 512 tokens, with one KV head of 4 query heads, is 16 of them. So here the tokens of a sequence are
cut into stretches, from multiples of their length on, and the sums of a row begin anew with each. They begin at the
same keys in any chunk, and who computes a stretch changes no bits.

Grid. x is tile * num_kv_heads + kv_head, as in ../kernel.py. The thread blocks of a tile, which y counts, take its
stretches in turn. Each leaves the state of each of its stretches in a workspace (states.py). Where there are tiles
enough, one thread block takes all stretches of a tile, and adds each to the only state. A second launch folds what
there is, in the order of the stretches, and stores the rows (merge.py): both ways have the same bits. If the rows of a
tile see keys of one stretch alone, its thread block stores them, with the bits of the kernels of many rows.
"""

from __future__ import annotations

from typing import Any

from ....device.cache_rows import Cache, scales_of_keys, scales_of_values
from ....device.intrinsics.thread import address, bits_float, divmod_32, shared_address
from ....device.intrinsics.warp import shuffle, thread_number
from ....device.intrinsics.warpgroup import GROUP
from ....device.language import cuda, float32, int64, types, uint32
from ....device.source import KernelSource
from ...arguments import KeySpan, TileLogitOptions, TilePages, TileQuery, signature
from ...config import TensorConfig
from ...items import is_split, make_find_item, make_item_store
from ...output import make_store_nothing
from ..loop import make_attend_tiles
from ..prologue import make_prologue
from ..registers import make_registers, make_start, make_store_rows, make_store_words
from ..tile import SWIZZLED, TileShape
from ..wgmma.kernel import make_attend_tiles as make_attend_tiles_on_warpgroups
from ..wgmma.shape import WgmmaShape
from .states import make_states, make_stretches_of, state_bytes

WORKSPACES = (types.CPointer(float32),)


def make_prefill_stretches(config: TensorConfig) -> KernelSource:
    """The kernel on mma.sync of all rows of all sequences."""
    shape = TileShape(config)
    return _kernel_of(config, shape, make_attend_tiles(config, shape), SWIZZLED, min_blocks=shape.min_blocks)


def make_prefill_stretches_wgmma(config: TensorConfig) -> KernelSource:
    """The kernel on warpgroups of all rows of all sequences."""
    shape = WgmmaShape(config)
    return _kernel_of(config, shape, make_attend_tiles_on_warpgroups(config, shape), GROUP, is_specific=True)


def _kernel_of(config: TensorConfig, shape: TileShape, attend_tiles: Any, alignment: int, **facts: Any) -> KernelSource:
    ALIGNMENT, STATE_BYTES = alignment, state_bytes(shape)
    ROWS, GROUP_SIZE, prologue = shape.rows, config.group_size, make_prologue(config, shape)
    MODIFIED, (store_item, load_item) = config.modified, make_item_store(shape.item_start)
    find_item, registers_of = make_find_item(ROWS), make_registers(shape)
    states, stretches_of = make_states(shape), make_stretches_of(config, shape)
    start, store_words = make_start(config, shape), make_store_words(config, shape)
    store_rows = make_store_rows(config, shape, store_words)
    store_nothing = make_store_nothing(ROWS, config.head_dim // 2, shape.num_threads)

    def prefill_stretches(
        out, lse, q, k_cache, v_cache, block_tables, seq_lens, query_starts, alibi_slopes, sinks, k_scale, v_scale,
        partials,
        num_seqs, num_tokens, num_kv_heads, num_heads, max_seq_len, visible, scale_strides,
        few_rows, stretch, most_states, table_stride, q_token_stride, q_head_stride, out_token_stride, out_head_stride,
        k_block_stride, k_token_stride, k_head_stride, v_block_stride, v_token_stride, v_head_stride,
        scale, softcap, k_number, v_number,
    ):  # fmt: skip
        shared = shared_address(cuda.shared.array(0, uint32, alignment=ALIGNMENT))
        thread = thread_number()
        tile, kv_head = divmod_32(uint32(cuda.blockIdx.x), uint32(num_kv_heads))
        lane, lengths = uint32(thread & 31), (query_starts, seq_lens)
        # Thread 0 reads the lengths for the block: they may change while the kernel runs, and all threads must agree.
        found = find_item(lane, tile, uint32(GROUP_SIZE), lengths, num_seqs, num_tokens, max_seq_len)
        if thread == 0:
            store_item(shared, found)
        registers, number, out_strides = registers_of(), uint32(cuda.blockIdx.y), (out_token_stride, out_head_stride)
        while True:
            cuda.syncthreads()  # the stretch before has read what is in shared memory
            item, thread = load_item(shared), thread_number()
            if item.num_rows == 0 or is_split(item, few_rows):
                return
            lane, warp = uint32(thread & 31), shuffle(uint32(thread >> 5), 0)
            tile, kv_head = divmod_32(uint32(cuda.blockIdx.x), uint32(num_kv_heads))
            if item.seq_len == 0:
                if number == 0:
                    output = prologue.output_of(
                        out, out_strides, lse, sinks, v_scale, v_number, item, kv_head, num_heads
                    )
                    store_nothing(output, item, uint32(GROUP_SIZE), thread)
                return
            first, count = stretches_of(item, visible, stretch)
            if number >= count:
                return
            low, span = prologue.span_of(item, visible)
            key = uint32(uint32(first + number) * uint32(stretch))
            last = min(uint32(uint32(key + uint32(stretch)) - 1), span.last)
            factor, unit = prologue.factors_of(scale, k_scale, k_number, kv_head)
            start(registers, item, alibi_slopes, kv_head, warp, uint32(lane >> 2))
            q_row = address(q) + int64(item.start) * q_token_stride
            q_row += int64(uint32(kv_head * GROUP_SIZE)) * q_head_stride
            attend_tiles(
                registers,
                shared,
                thread,
                lane,
                warp,
                item,
                TileQuery(q_row, q_token_stride, q_head_stride, not MODIFIED and factor < float32(0)),
                Cache(address(k_cache) + int64(kv_head) * k_head_stride, k_block_stride, k_token_stride),
                Cache(address(v_cache) + int64(kv_head) * v_head_stride, v_block_stride, v_token_stride),
                TilePages(
                    address(block_tables) + int64(item.seq) * table_stride,
                    low,
                    span.last,
                    scales_of_keys(k_scale, scale_strides, kv_head),
                    scales_of_values(v_scale, scale_strides, kv_head),
                ),
                visible,
                TileLogitOptions(factor, bits_float(uint32(softcap)), item.seq, uint32(item.seq_len - 1)),
                KeySpan(max(key, span.first), last, span.unmasked, span.num_unmasked),
                unit,
            )
            # The loop needs the registers, so compute again what the rest uses.
            item, thread = load_item(shared), thread_number()
            lane, warp = uint32(thread & 31), uint32(thread >> 5)
            first, count = stretches_of(item, visible, stretch)
            if count == 1:
                tile, kv_head = divmod_32(uint32(cuda.blockIdx.x), uint32(num_kv_heads))
                output = prologue.output_of(out, out_strides, lse, sinks, v_scale, v_number, item, kv_head, num_heads)
                store_rows(registers, output, item, warp, uint32(lane >> 2), uint32(lane & 3), shared)
                return
            place = int64(cuda.blockIdx.x) * most_states + (int64(number) if most_states > 1 else int64(0))
            target = address(partials) + place * STATE_BYTES
            if most_states == 1 and number > 0:
                states.add(registers, target, thread)
            else:
                states.store(registers, target, thread)
            number = uint32(number + uint32(cuda.gridDim.y))

    return KernelSource(prefill_stretches, signature(14, *WORKSPACES), shape.num_threads, **facts)
