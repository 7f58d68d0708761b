"""Split-KV decode attention for NHD and HND: one query token per sequence, the cache read once, one launch.

    q, out             (num_seqs, num_heads, head_dim)
    K cache, V cache   (num_blocks, block_size, num_kv_heads, head_dim) or (num_blocks, num_kv_heads, block_size,
                       head_dim), by their strides

Units. A unit is one split of one column, and a column is seq * (num_kv_heads * num_tiles) + kv_head * num_tiles + tile:
neighbours read neighbouring heads of the same tokens. Here a tile is the query heads of a KV head that one thread block
takes (`SplitConfig.num_heads`). The grid has as many thread blocks as run at once, and they take units in turn, all
columns of split 0 first; or (see `is_persistent`) it has one for each unit, x the column and y the split. Who computes
a unit changes no bits.

Who owns what. The visible tokens of a sequence are cut into splits whose length depends on their number and that of the
KV heads alone. Each warp of a thread block takes every fourth step of a unit's tokens: tensor_cores/few_heads.py, or
cuda_cores.py for float32 queries, which is the route to read first. If O of all dims does not fit into the registers of
a warp (`SplitConfig.warps_for_dims`), a group of two warps takes every second step. With more than 16 heads on tensor
cores, if rows fit into shared memory (`SplitConfig.staged`), all warps take the same tokens, each with heads of its
own: tensor_cores/many_heads.py. Then merge.py adds the warps and, in the thread block that counts last for its column,
the splits. A unit past the last split is only counted.

Shared memory. One buffer, static, or dynamic if that is too small: for the sums of all warps and Q behind them, so that
a warp that is done stores its sums while others still read Q; or first for staged rows and Q, then for the sums. Then
for the merge of the splits. Always static are the maxima, sums of exponentials and weights of all warp groups, the
lengths of the next units, on which all threads agree, and the count, a word from thread 0.
"""

from __future__ import annotations

from typing import Any

from ..device.cache_rows import SCALE_STRIDES, Cache, make_scale_of, scales_of_keys, scales_of_values
from ..device.halves import software_factor
from ..device.intrinsics.thread import address, bits_float, divmod_32, load_4, shared_address
from ..device.intrinsics.warp import prefetch_l2
from ..device.language import cuda, float32, int32, int64, types, uint32
from ..device.last_block import is_last, publish
from ..device.sizes import WARP_SIZE
from ..device.source import KernelSource, device_function
from ..device.visible import VISIBLE, first_key_of_last
from .arguments import SharedSums, SplitLogitOptions, SplitOutput, SplitPages, SplitPartials, SplitQuery, SplitUnit
from .config import FEW_SPLITS, FULL_GRID, MANY_SPLITS, NUM_THREADS, SHORTEST_SPLIT, SPLIT_UNIT, SplitConfig
from .cuda_cores import make_attend_on_cuda_cores
from .merge import make_merge, merge_bytes
from .shape import MOST_BLOCKS, TensorShape
from .sums import are_dynamic, make_sums_layout, sums_bytes
from .tensor_cores.few_heads import make_attend_on_tensor_cores
from .tensor_cores.many_heads import make_attend_with_many_heads
from .tensor_cores.stages import StageShape

BYTES, INTS, FLOATS = types.CPointer(types.uint8), types.CPointer(int32), types.CPointer(float32)
WORDS = types.CPointer(uint32)
LINE_ENTRIES = 32  # block table entries in a line of L2
SIGNATURE = types.void(
    *(BYTES, FLOATS, FLOATS, FLOATS, WORDS),  # out, lse, partial_sums, partial_states, counters
    *(BYTES, BYTES, BYTES, INTS, INTS),  # q, k_cache, v_cache, block_tables, seq_lens
    *(FLOATS, FLOATS, FLOATS, FLOATS),  # alibi_slopes, sinks, k_scale, v_scale
    *(*[int64] * 5, VISIBLE, SCALE_STRIDES, *[int64] * 11),  # sizes, visible, strides in bytes
    *[int64] * 4,  # the bits of float32: scale, softcap, and k_scale and v_scale where they are numbers
)


def make_split(config: SplitConfig) -> KernelSource:
    """The kernel of all query heads of all sequences, which attend to all splits."""
    NUM_TILES, NUM_HEADS, GROUP_SIZE = config.num_tiles, config.num_heads, config.group_size
    SHORT_SPLIT, LONG_SPLIT = uint32(config.short_split), uint32(config.long_split)
    BLOCK_SIZE, PERSISTENT = config.block_size, is_persistent(config)
    NUM_LENGTHS = NUM_THREADS if PERSISTENT else 1
    LEADING_ZEROS, MANY = 32 - FULL_GRID.bit_length(), int32(MANY_SPLITS.bit_length() - 1)
    NUM_FLOATS = 0 if are_dynamic(config) else _shared_bytes(config) // 4
    NUM_STATES, IS_EVEN = config.num_warp_groups * config.num_heads, NUM_TILES * NUM_HEADS == GROUP_SIZE
    sums_layout, scale_of = make_sums_layout(config), make_scale_of(config.kv_kind)
    make_attend, min_blocks = _inner_loop(config)
    attend_split, merge = make_attend(config, sums_layout), make_merge(config, sums_layout)
    VALUE_FACTOR = float32(software_factor(config.kv_kind, config.hardware_fp8) if config.on_tensor_cores else 1.0)

    @device_function
    def unit_of(number, num_columns, num_kv_heads):
        """A unit by its number; without a loop over units, by the thread block's place in the grid."""
        column, split = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
        if PERSISTENT:
            split, column = divmod_32(number, uint32(num_columns))
        seq, in_seq = divmod_32(column, uint32(num_kv_heads * NUM_TILES))
        kv_head, tile = divmod_32(in_seq, NUM_TILES)
        return SplitUnit(column, split, seq, kv_head, uint32(kv_head * GROUP_SIZE + tile * NUM_HEADS))

    @device_function
    def split_size(num_tokens, num_kv_heads):
        """The tokens of a split, as SplitConfig.split_size, from binary logarithms of numbers of splits."""
        filling = max(int32(int32(cuda.clz(uint32(num_kv_heads))) - LEADING_ZEROS), int32(0))
        size = max(uint32(num_tokens >> uint32(filling)), min(uint32(num_tokens // uint32(FEW_SPLITS)), SHORT_SPLIT))
        size = uint32(min(size, LONG_SPLIT) & uint32(-SPLIT_UNIT))
        most = uint32(max(filling, MANY))
        whole_units = uint32(uint32(uint32(uint32(num_tokens - 1) >> most) // uint32(SPLIT_UNIT) + 1) * SPLIT_UNIT)
        return max(max(size, uint32(SHORTEST_SPLIT)), whole_units)

    @device_function
    def tokens_of(split, length, visible, num_kv_heads):
        """The number of splits of a sequence, and the first and last token of one of them."""
        seen_from = first_key_of_last(length, visible)
        num_seen = uint32(length - seen_from)
        size = split_size(num_seen, num_kv_heads)
        first = uint32(seen_from + split * size)
        # Without a branch, so that ptxas knows it is warp-uniform: shuffles in loops need no code for diverged lanes.
        num_splits = uint32(uint32(uint32(num_seen + size) - 1) // size)
        return num_splits, first, min(uint32(first + size - 1), uint32(length - 1))

    @device_function
    def prefetch_entries(thread, number, length, places):
        """Bring the block table entries of a unit into L2, if its sequence is so long; the first warp does it."""
        num_columns, num_kv_heads, visible, block_tables, table_stride = places
        if thread < WARP_SIZE:
            unit = unit_of(number, num_columns, num_kv_heads)
            num_splits, first, last = tokens_of(unit.split, length, visible, num_kv_heads)
            entry, last_entry = uint32(first // uint32(BLOCK_SIZE)), uint32(last // uint32(BLOCK_SIZE))
            entry = uint32(entry + thread * LINE_ENTRIES)
            if unit.split < num_splits and entry < uint32(last_entry + LINE_ENTRIES):
                table = address(block_tables) + int64(unit.seq) * table_stride
                prefetch_l2(table + int64(min(entry, last_entry)) * 4)

    @device_function
    def length_of(seq_lens, seq, max_seq_len):
        """The length of a sequence; one out of range counts as 0: the units and the workspace end at max_seq_len."""
        seq_len = int64(int32(load_4(address(seq_lens) + int64(seq) * 4)))
        return uint32(0 if seq_len < 0 or seq_len > max_seq_len else seq_len)

    @device_function
    def heads_from(head):
        """The number of query heads of a thread block whose first one is `head`."""
        if IS_EVEN:
            return uint32(NUM_HEADS)
        kv_head = uint32(head // uint32(GROUP_SIZE))
        return min(uint32(NUM_HEADS), uint32(uint32(kv_head + 1) * GROUP_SIZE - head))

    @device_function
    def output_of(out, strides, lse, sinks, v_scale, v_number, num_heads, unit):
        """Where the rows of a unit go, from that of its first head on."""
        v_factor = float32(VALUE_FACTOR * scale_of(v_scale, v_number, unit.kv_head))
        row = int64(unit.seq) * num_heads + int64(unit.head)
        target = address(out) + int64(unit.seq) * strides[0] + int64(unit.head) * strides[1]
        return SplitOutput(target, strides[1], lse, row, heads_from(unit.head), unit.head, sinks, v_factor)

    def split(
        out, lse, partial_sums, partial_states, counters, q, k_cache, v_cache, block_tables, seq_lens, alibi_slopes,
        sinks, k_scale, v_scale, num_kv_heads, num_heads, max_seq_len, most_splits, num_columns, visible,
        scale_strides, table_stride, q_seq_stride, q_head_stride, out_seq_stride, out_head_stride, k_block_stride,
        k_token_stride, k_head_stride, v_block_stride, v_token_stride, v_head_stride, scale, softcap, k_number,
        v_number,
    ):  # fmt: skip
        room = cuda.shared.array(NUM_FLOATS, float32, alignment=16)
        maxima, sums = cuda.shared.array(NUM_STATES, float32), cuda.shared.array(NUM_STATES, float32)
        weights = cuda.shared.array(NUM_STATES, float32)
        shared = SharedSums(shared_address(room), maxima, sums, weights)
        lengths, counted = cuda.shared.array(NUM_LENGTHS, uint32), cuda.shared.array(1, uint32)
        thread = uint32(cuda.threadIdx.x)
        strides, partials = (out_seq_stride, out_head_stride), SplitPartials(partial_sums, partial_states, most_splits)
        places = num_columns, num_kv_heads, visible, block_tables, table_stride
        number, num_units, turn = uint32(cuda.blockIdx.x), uint32(num_columns * most_splits), uint32(0)
        while number < num_units:
            if PERSISTENT:
                cuda.syncthreads()  # the unit before has read what is in shared memory
            if turn % NUM_LENGTHS == 0:
                # Entries arrive beside the length that says which of them count, if it is near the longest.
                prefetch_entries(thread, number, uint32(max_seq_len), places)
                # Those of the next units, each read by one thread: it may change meanwhile, and all threads must agree.
                later = uint32(number + thread * uint32(cuda.gridDim.x))
                if thread < NUM_LENGTHS and later < num_units:
                    seq = unit_of(later, num_columns, num_kv_heads).seq
                    lengths[thread] = length_of(seq_lens, seq, max_seq_len)
                cuda.syncthreads()
            # 32 bits where they suffice: what outlives the inner loop takes registers from it.
            unit, length = unit_of(number, num_columns, num_kv_heads), lengths[turn % NUM_LENGTHS]
            num_splits, first, last = tokens_of(unit.split, length, visible, num_kv_heads)
            number, turn = uint32(number + uint32(cuda.gridDim.x)) if PERSISTENT else num_units, uint32(turn + 1)
            if PERSISTENT and number < num_units:
                prefetch_entries(thread, number, lengths[turn % NUM_LENGTHS], places)
            # Where rows go is computed again where it is used: it would take registers in the inner loop.
            if num_splits == 0 and unit.split == 0:
                output = output_of(out, strides, lse, sinks, v_scale, v_number, num_heads, unit)
                merge.store_nothing(output, thread)
            if unit.split < num_splits:
                k_factor = scale_of(k_scale, k_number, unit.kv_head)
                q_row = address(q) + int64(unit.seq) * q_seq_stride + int64(unit.head) * q_head_stride
                k, v = int64(unit.kv_head) * k_head_stride, int64(unit.kv_head) * v_head_stride
                q_pos, scale_of_k = uint32(length - 1), float32(bits_float(uint32(scale)) * k_factor)
                attend_split(
                    thread,
                    first,
                    SplitQuery(q_row, q_head_stride, heads_from(unit.head), unit.head),
                    Cache(address(k_cache) + k, k_block_stride, k_token_stride),
                    Cache(address(v_cache) + v, v_block_stride, v_token_stride),
                    SplitPages(
                        address(block_tables) + int64(unit.seq) * table_stride,
                        last,
                        scales_of_keys(k_scale, scale_strides, unit.kv_head),
                        scales_of_values(v_scale, scale_strides, unit.kv_head),
                    ),
                    SplitLogitOptions(scale_of_k, bits_float(uint32(softcap)), alibi_slopes, q_pos, unit.seq),
                    shared,
                )
                cuda.syncthreads()
                output = output_of(out, strides, lse, sinks, v_scale, v_number, num_heads, unit)
                merge.merge_warps(thread, output, partials, num_splits, unit.split, shared)
                if num_splits > 1:
                    publish(thread)

            counter = address(counters) + int64(unit.column) * 4
            if is_last(thread, counter, most_splits, num_splits, shared_address(counted)):
                output = output_of(out, strides, lse, sinks, v_scale, v_number, num_heads, unit)
                merge.merge_splits(thread, output, partials, num_splits, room)

    return KernelSource(split, SIGNATURE, NUM_THREADS, min_blocks)


def _inner_loop(config: SplitConfig) -> tuple[Any, int]:
    """The factory of the inner loop, and the thread blocks to ask for on a multiprocessor."""
    if not config.on_tensor_cores:
        return make_attend_on_cuda_cores, MOST_BLOCKS
    make = make_attend_with_many_heads if config.staged else make_attend_on_tensor_cores
    return make, TensorShape(config).min_blocks


def is_persistent(config: SplitConfig) -> bool:
    """Whether thread blocks take units in turn, in a grid of as many as run at once; else each has one."""
    return config.on_tensor_cores and TensorShape(config).is_persistent


def dynamic_bytes(config: SplitConfig) -> int:
    """Bytes of dynamic shared memory of a launch."""
    return _shared_bytes(config) if are_dynamic(config) else 0


def _shared_bytes(config: SplitConfig) -> int:
    """Bytes that the sums need, with Q behind them or with staged rows and Q before them, or the merge after them."""
    nbytes = sums_bytes(config)
    if config.staged:
        nbytes = max(nbytes, StageShape(config).nbytes)
    elif config.on_tensor_cores:
        nbytes += TensorShape(config).q_bytes
    return max(nbytes, merge_bytes(config))
