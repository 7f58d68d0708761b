"""Prefill of a few query rows over a long context on tensor cores: a draft to verify, the end of a chunked prompt.

It takes sequences with up to FEW_ROWS rows and more than PART keys; the kernel of many rows (../kernel.py) skips them.
Arguments and rows are the same in both.

Grid. x is (seq * tiles + tile) * num_kv_heads + kv_head, where a tile is as many rows as a warp has room for: 32, or
16 in each of two tiles. y counts parts, one for each warp. Thread blocks of other sequences have no work.

Who owns what. All warps of a thread block have the same rows. The tokens of a sequence are cut into parts, one for
each warp: PART tokens, or a power of two times as many in sequences beyond LONGEST_OF_PARTS. Within a part, tiles and
their order are those of the kernel of many rows on mma.sync. So the state that a warp stores in a workspace (states.py)
at its end has the same bits as there, if the row sees no key of other parts. A second launch merges states (merge.py).

Shared memory, dynamic: Q, K and V of each warp, codes of fp8 in flight, and the item, which all threads read.
"""

from __future__ import annotations

from ....device.cache_rows import Cache, scales_of_keys, scales_of_values
from ....device.intrinsics.thread import address, bits_float, divmod_32, shared_address
from ....device.intrinsics.warp import shuffle, thread_number
from ....device.language import cuda, float32, int64, types, uint32
from ....device.source import KernelSource
from ...arguments import KeySpan, TileLogitOptions, TilePages, TileQuery, signature
from ...config import TensorConfig
from ...items import make_item_store
from ..prologue import make_prologue
from ..registers import make_registers, make_start
from ..tile import SWIZZLED
from .loop import make_attend_part
from .shape import PartShape
from .states import make_states

WORKSPACES = (types.CPointer(float32), types.CPointer(float32))


def make_prefill_split(config: TensorConfig) -> KernelSource:
    """The kernel that stores a state for each row of the sequences with few rows, and each part of their keys."""
    shape = PartShape(config)
    ROWS, WARPS, TILES, GROUP_SIZE = shape.rows, shape.num_warps, shape.tiles_of_sequence, config.group_size
    MODIFIED, (store_item, load_item) = config.modified, make_item_store(shape.item_start)
    prologue, start, registers_of = make_prologue(config, shape), make_start(config, shape), make_registers(shape)
    attend_part, states = make_attend_part(config, shape), make_states(config, shape)

    def prefill_split(
        out, lse, q, k_cache, v_cache, block_tables, seq_lens, query_starts, alibi_slopes, sinks, k_scale, v_scale,
        partial_sums, partial_states,
        num_seqs, num_tokens, num_kv_heads, num_heads, max_seq_len, visible, scale_strides,
        least_keys, most_parts, by_tokens, table_stride, q_token_stride, q_head_stride, out_token_stride,
        out_head_stride, k_block_stride, k_token_stride, k_head_stride, v_block_stride, v_token_stride, v_head_stride,
        scale, softcap, k_number, v_number,
    ):  # fmt: skip
        shared = shared_address(cuda.shared.array(0, uint32, alignment=SWIZZLED))
        thread = thread_number()  # a volatile read: ptxas keeps in registers what follows from it
        lane, warp = uint32(thread & 31), shuffle(uint32(thread >> 5), 0)
        tile, kv_head = divmod_32(uint32(cuda.blockIdx.x), uint32(num_kv_heads))
        # Thread 0 reads the lengths for the block: they may change while the kernel runs, and all threads must agree.
        if thread == 0:
            seq, number = divmod_32(tile, TILES)
            first_row, lengths = uint32(number * ROWS), (query_starts, seq_lens)
            store_item(shared, states.split_item(first_row, seq, lengths, num_tokens, max_seq_len, least_keys))
        cuda.syncthreads()
        item = load_item(shared)
        if item.num_rows == 0 or item.seq_len == 0:
            return
        low, span = prologue.span_of(item, visible)
        parts = states.parts_of(item.seq_len, low, span.last)
        number = uint32(uint32(cuda.blockIdx.y) * WARPS)  # the first warp's part, counted from that of `low`
        if number > uint32(parts.last - parts.first):
            return
        part = uint32(uint32(uint32(parts.first + number) + warp) << parts.bits)
        end = uint32(part + uint32(uint32(uint32(1) << parts.bits) - 1))
        mine = KeySpan(max(part, span.first), min(end, span.last), span.unmasked, span.num_unmasked)
        factor, unit = prologue.factors_of(scale, k_scale, k_number, kv_head)
        registers = registers_of()
        start(registers, item, alibi_slopes, kv_head, uint32(0), uint32(lane >> 2))
        q_row = address(q) + int64(item.start) * q_token_stride
        q_row += int64(uint32(kv_head * GROUP_SIZE)) * q_head_stride
        attend_part(
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
            mine,
            unit,
        )
        # The loop needs the registers, so reload what the rest uses.
        item, thread = load_item(shared), thread_number()
        lane, warp = uint32(thread & 31), uint32(thread >> 5)
        tile, kv_head = divmod_32(uint32(cuda.blockIdx.x), uint32(num_kv_heads))
        number = uint32(uint32(uint32(cuda.blockIdx.y) * WARPS) + warp)
        low, span = prologue.span_of(item, visible)
        parts = states.parts_of(item.seq_len, low, span.last)
        if number <= uint32(parts.last - parts.first):
            target = states.states_of(partial_sums, partial_states, item, kv_head, num_kv_heads, most_parts, by_tokens)
            num_rows = min(uint32(item.num_rows - item.first_row), uint32(ROWS))
            states.store(registers, target, number, num_rows, uint32(lane >> 2), uint32(lane & 3))

    signed = signature(14, *WORKSPACES)
    return KernelSource(prefill_split, signed, shape.num_threads)


def dynamic_bytes(config: TensorConfig) -> int:
    """Bytes of dynamic shared memory of a launch."""
    return PartShape(config).nbytes
