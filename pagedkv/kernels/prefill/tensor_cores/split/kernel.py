"""Prefill of a few query rows over a long context on tensor cores: a draft to verify, the end of a chunked prompt.

It takes the sequences with up to FEW_ROWS rows and more than PART keys; the kernel of many rows (../kernel.py) skips
them. Arguments and rows are as there.

Grid. x is (seq * tiles + tile) * num_kv_heads + kv_head, where a tile is as many rows as a warp has room for: 32, or
16 of two tiles. y is the split. Thread blocks of other sequences only count.

Who owns what. All warps of a thread block have the same rows. The tokens of a sequence are cut into parts, one for
each warp: PART tokens, or a power of two times as many in sequences beyond LONGEST_OF_PARTS. A split is the parts of
all warps of a thread block. Within a part, tiles and their order are those of the kernel of many rows: the state that a
warp ends with has the bits that it has there if the row sees no key elsewhere. Then merge.py adds the warps, and in the
thread block that counts last for its rows and KV head, the splits.

Shared memory, dynamic: Q, K and V of each warp, codes of fp8 in flight; then in their place the states of the warps,
then the weights of the splits. After that, the item, which all threads read.
"""

from __future__ import annotations

from ....device.intrinsics.thread import address, bits_float, divmod_32, shared_address
from ....device.intrinsics.warp import (
    load_shared_word,
    shuffle,
    store_shared_word,
    thread_number,
)
from ....device.language import cuda, float32, int64, types, uint32
from ....device.last_block import is_last, publish
from ....device.row_offsets import Cache
from ....device.source import KernelSource, device_function
from ...arguments import Item, Options, Pages, Visible, signature
from ...config import FEW_ROWS, LONGEST_OF_PARTS, PART, TensorConfig
from ...items import item_of, make_keep
from ...output import make_store_nothing
from ..loop import Query, Span
from ..prologue import make_prologue
from ..registers import make_registers
from ..softmax import make_start
from ..tile import SWIZZLED
from .loop import make_attend_part
from .merge import Partials, make_merge, make_put_sums
from .shape import SplitShape

WORKSPACES = (types.CPointer(float32), types.CPointer(float32), types.CPointer(uint32))


def make_prefill_split(config: TensorConfig) -> KernelSource:
    """Attention of the rows of sequences that have few of them, over all splits of their keys."""
    shape = SplitShape(config)
    ROWS, WARPS, TILES, GROUP_SIZE = shape.rows, shape.num_warps, shape.tiles_of_sequence, config.group_size
    PART_BITS, LONGEST_BITS = PART.bit_length() - 1, LONGEST_OF_PARTS.bit_length() - 1
    MODIFIED, (keep, kept) = config.modified, make_keep(shape.kept_start)
    TOLD, FIRST = shape.kept_start + 24, shape.kept_start + 28
    prologue, start, registers_of = make_prologue(config, shape), make_start(config, shape), make_registers(shape)
    attend_part, put_sums, merge = make_attend_part(config, shape), make_put_sums(shape), make_merge(config, shape)
    store_nothing = make_store_nothing(ROWS, config.head_dim // 2, shape.num_threads)

    @device_function
    def item_here(first_row, seq, lengths, num_tokens, max_seq_len, least_keys):
        """The item, with 0 rows if this kernel does not take it."""
        item = item_of(seq, first_row, uint32(GROUP_SIZE), lengths, num_tokens, max_seq_len)
        is_here = first_row < item.num_rows and item.num_rows <= uint32(FEW_ROWS)
        if not is_here or item.seq_len < uint32(least_keys):
            return Item(seq, first_row, uint32(0), item.start, item.context, item.seq_len)
        return item

    @device_function
    def part_bits(seq_len):
        """The binary logarithm of the tokens of a part."""
        return uint32(32 + PART_BITS - uint32(cuda.clz(uint32(uint32(seq_len - 1) >> LONGEST_BITS))))

    def prefill_split(
        out, lse, q, k_cache, v_cache, block_tables, seq_lens, query_starts, alibi_slopes, sinks, k_scale, v_scale,
        partial_sums, partial_states, counters,
        num_seqs, num_tokens, num_kv_heads, num_heads, max_seq_len, window, is_causal,
        least_keys, most_splits, by_tokens, table_stride, q_token_stride, q_head_stride, out_token_stride,
        out_head_stride, k_block_stride, k_token_stride, k_head_stride, v_block_stride, v_token_stride, v_head_stride,
        scale, softcap, k_number, v_number,
    ):  # fmt: skip
        shared = shared_address(cuda.shared.array(0, uint32, alignment=SWIZZLED))
        thread = thread_number()  # a volatile read: ptxas keeps what follows from it through the loop
        lane, warp = uint32(thread & 31), shuffle(uint32(thread >> 5), 0)
        tile, kv_head = divmod_32(uint32(cuda.blockIdx.x), uint32(num_kv_heads))
        # Thread 0 reads the lengths for the block: they may change while the kernel runs, and all threads must agree.
        if thread == 0:
            seq, number = divmod_32(tile, TILES)
            lengths = (query_starts, seq_lens)
            keep(shared, item_here(uint32(number * ROWS), seq, lengths, num_tokens, max_seq_len, least_keys))
        cuda.syncthreads()
        item, split = kept(shared), uint32(cuda.blockIdx.y)
        out_strides, visible = (out_token_stride, out_head_stride), Visible(is_causal != 0, uint32(window))
        num_splits, first_split, bits = uint32(0), uint32(0), uint32(0)
        low, span = prologue.span_of(item, visible)
        if item.num_rows > 0 and item.seq_len > 0:
            bits = part_bits(item.seq_len)
            first_split = uint32(uint32(low >> bits) // uint32(WARPS))
            num_splits = uint32(uint32(uint32(uint32(span.last >> bits) // uint32(WARPS)) - first_split) + 1)
            if thread == 0:
                store_shared_word(uint32(shared + FIRST), first_split)
        elif item.num_rows > 0 and split == 0:
            output = prologue.output_of(out, out_strides, lse, sinks, v_scale, v_number, item, kv_head, num_heads)
            store_nothing(output, item, uint32(GROUP_SIZE), thread)
        if split < num_splits:
            part = uint32(uint32(uint32(uint32(first_split + split) * WARPS) + warp) << bits)
            end = uint32(part + uint32(uint32(uint32(1) << bits) - 1))
            mine = Span(max(part, span.first), min(end, span.last), span.clear, span.num_clear)
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
                Query(q_row, q_token_stride, q_head_stride, not MODIFIED and factor < float32(0)),
                Cache(address(k_cache) + int64(kv_head) * k_head_stride, k_block_stride, k_token_stride),
                Cache(address(v_cache) + int64(kv_head) * v_head_stride, v_block_stride, v_token_stride),
                Pages(address(block_tables) + int64(item.seq) * table_stride, low, span.last),
                visible,
                Options(factor, bits_float(uint32(softcap)), item.seq, uint32(item.seq_len - 1)),
                mine,
                unit,
            )
            cuda.syncthreads()  # sums take the place of the tiles
            thread = thread_number()
            lane, warp = uint32(thread & 31), uint32(thread >> 5)
            put_sums(registers, shared, warp, uint32(lane >> 2), uint32(lane & 3))
            cuda.syncthreads()

        # The loop needs the registers: reload what the rest uses.
        item, thread = kept(shared), thread_number()
        tile, kv_head = divmod_32(uint32(cuda.blockIdx.x), uint32(num_kv_heads))
        output = prologue.output_of(out, out_strides, lse, sinks, v_scale, v_number, item, kv_head, num_heads)
        first_row, count = item.first_row, min(uint32(item.num_rows - item.first_row), uint32(ROWS))
        first = int64(item.start) * GROUP_SIZE if by_tokens != 0 else int64(item.seq) * FEW_ROWS
        first = ((first + int64(first_row)) * num_kv_heads + int64(kv_head)) * most_splits
        sums, states = address(partial_sums), address(partial_states)
        partials = Partials(sums, states, first, num_kv_heads * most_splits, num_splits)
        if split < num_splits:
            merge.leave(thread, shared, first_row, count, output, partials, split)
            if num_splits > 1:
                publish(thread)

        if is_last(thread, address(counters), most_splits, num_splits, uint32(shared + TOLD)):
            first_split = load_shared_word(uint32(shared + FIRST))
            merge.merge_splits(thread, shared, first_row, count, output, partials, first_split)

    signed = signature(14, *WORKSPACES)
    return KernelSource(prefill_split, signed, shape.num_threads)


def dynamic_bytes(config: TensorConfig) -> int:
    """Bytes of dynamic shared memory of a launch."""
    return SplitShape(config).nbytes
