"""Split-KV decode attention for NHD and HND: one query token per sequence, the cache read once, one launch.

    q, out             (num_seqs, num_heads, head_dim)
    K cache, V cache   (num_blocks, block_size, num_kv_heads, head_dim) or (num_blocks, num_kv_heads, block_size,
                       head_dim), by their strides

Grid. x is seq * (num_kv_heads * num_tiles) + kv_head * num_tiles + tile: neighbours read neighbouring heads of the
same tokens. A tile is here the part of the query heads that share a KV head which one thread block takes
(`SplitConfig.num_heads`). y is the split.

Who owns what. The visible tokens of a sequence, at most `window` of them, are cut into splits whose length depends on
their number alone; thread blocks past the last split return at once. A thread block owns one split of one KV head, for
all heads of the tile, and each warp takes every fourth step of its tokens: tensor_cores/few_heads.py, or cuda_cores.py
for float32 caches. Where O of all dims does not fit into the registers of a warp (`limits.dims_of_warp`), a pair of
warps takes every second step. With more than 16 heads on tensor cores, two or four warps take the same tokens, each
with its share of the heads: tensor_cores/many_heads.py. Then merge.py adds the warps and, in the thread block that
finishes last for its sequence, KV head and tile, the splits.

Shared memory. The sums of all warps, in the place of Q or of staged rows and Q, and the weights of the splits: static,
or dynamic where static is too small. Always static are the maxima and sums of exponentials of all warps and, where O
takes nearly all registers, what the epilogue needs from the prologue.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, float64, int32, int64, types, uint32

from ..device.bad_entries import BLOCK_ID, SEQ_LEN, record
from ..device.intrinsics import address, divmod_32, load_4, shared_address
from ..device.logits import NONE
from ..device.source import KernelSource, device_function
from ..device.tensor_intrinsics import load_shared_words, store_shared_words
from .arguments import Cache, Options, Output, Pages, Partials, Query, Shared
from .config import LONG, MOST_SPLITS, NUM_THREADS, SHORTEST_SPLIT, SPLIT_UNIT, SplitConfig
from .cuda_cores import RowShape, make_attend_on_cuda_cores
from .merge import make_finish, make_store_pair, weights_bytes
from .shape import TensorShape
from .sums import are_dynamic, make_pair_address, sums_bytes
from .tensor_cores.few_heads import make_attend_on_tensor_cores
from .tensor_cores.many_heads import make_attend_with_many_heads
from .tensor_cores.stages import StageShape

BYTES, INTS, FLOATS = types.CPointer(types.uint8), types.CPointer(int32), types.CPointer(float32)
WORDS, LONGS = types.CPointer(uint32), types.CPointer(int64)
SIGNATURE = types.void(
    *(BYTES, FLOATS, FLOATS, FLOATS, WORDS),  # out, lse, partial_sums, partial_states, counters
    *(BYTES, BYTES, BYTES, INTS, INTS),  # q, k_cache, v_cache, block_tables, seq_lens
    *(FLOATS, FLOATS, FLOATS, FLOATS, LONGS),  # alibi_slopes, sinks, k_scale, v_scale, report
    *[int64] * 15,  # sizes, window, stride of block_tables in entries, other strides in bytes
    *[float64] * 4,  # scale, softcap, and k_scale and v_scale where they are numbers
)


def make_split(config: SplitConfig) -> KernelSource:
    """Attention of all query heads over all splits of all sequences."""
    NUM_TILES, NUM_HEADS, GROUP_SIZE = config.num_tiles, config.num_heads, config.group_size
    PAIRS, BLOCK_SIZE = config.head_dim // 2, config.block_size
    NUM_STATES, LONG_SPLIT, CHECKED = config.num_teams * config.num_heads, config.long_split, config.checked
    NUM_FLOATS, IS_FULL = 0 if are_dynamic(config) else _shared_bytes(config) // 4, config.is_full
    pair_address, store_pair = make_pair_address(config), make_store_pair(config)
    attend, finish = make_attend(config, pair_address), make_finish(config, pair_address, store_pair)

    @device_function
    def split_size(num_tokens):
        """As SplitConfig.split_size."""
        if num_tokens < LONG:
            return uint32(SHORTEST_SPLIT)
        count = min(max(uint32(num_tokens // uint32(LONG_SPLIT)), uint32(1)), uint32(MOST_SPLITS))
        return uint32((uint32(uint32(num_tokens - 1) // uint32(count * SPLIT_UNIT)) + 1) * SPLIT_UNIT)

    @device_function
    def store_nothing(output, thread):
        """The result of an empty sequence."""
        i = thread
        while i < uint32(output.num_heads * PAIRS):
            h, pair = divmod_32(i, PAIRS)
            store_pair(output.address + int64(h) * output.head_stride, pair, float32(0), float32(0))
            i = uint32(i + NUM_THREADS)
        if thread < output.num_heads and address(output.lse) != 0:
            output.lse[output.row + int64(thread)] = NONE

    def split(
        out, lse, partial_sums, partial_states, counters, q, k_cache, v_cache, block_tables, seq_lens, alibi_slopes,
        sinks, k_scale, v_scale, report, num_kv_heads, num_blocks, max_blocks, window, table_stride, q_seq_stride,
        q_head_stride, out_seq_stride, out_head_stride, k_block_stride, k_token_stride, k_head_stride,
        v_block_stride, v_token_stride, v_head_stride, scale, softcap, k_number, v_number,
    ):  # fmt: skip
        o = shared_address(cuda.shared.array(NUM_FLOATS, float32, alignment=16))
        maxima, sums = cuda.shared.array(NUM_STATES, float32), cuda.shared.array(NUM_STATES, float32)
        shared = Shared(o, maxima, sums)
        thread = uint32(cuda.threadIdx.x)
        # 32 bits where they suffice: what lives through the inner loop takes registers from it.
        seq, column = divmod_32(uint32(cuda.blockIdx.x), uint32(num_kv_heads * NUM_TILES))
        kv_head, tile = divmod_32(column, NUM_TILES)
        head = uint32(kv_head * GROUP_SIZE + tile * NUM_HEADS)
        num_heads = min(uint32(NUM_HEADS), uint32(GROUP_SIZE - tile * NUM_HEADS))

        seq_len = int64(int32(load_4(address(seq_lens) + int64(seq) * 4)))
        if CHECKED:
            if seq_len < 0 or seq_len > max_blocks * BLOCK_SIZE:
                record(report, SEQ_LEN, seq, 0, seq_len)
                seq_len = int64(0)
            elif seq_len > 0 and num_blocks == 0:
                record(report, BLOCK_ID, seq, 0, int64(block_tables[int64(seq) * table_stride]))
                seq_len = int64(0)
        length = uint32(seq_len)
        visible = min(length, uint32(window))
        size = split_size(visible)
        start = uint32(uint32(cuda.blockIdx.y) * size)
        if start >= visible:
            if start == 0:
                row = int64(seq) * (num_kv_heads * GROUP_SIZE) + int64(head)
                target = address(out) + int64(seq) * out_seq_stride + int64(head) * out_head_stride
                store_nothing(Output(target, out_head_stride, lse, row, num_heads, head, sinks, float32(0)), thread)
            return
        num_splits = uint32(uint32(uint32(visible - 1) // size) + 1)
        if IS_FULL:
            kept = shared_address(cuda.shared.array(4, uint32, alignment=16))
            if thread == 0:
                store_shared_words(kept, seq, head, num_splits, 0)
        first, q_pos = uint32(length - visible + start), uint32(length - 1)
        last = min(uint32(first + size - 1), q_pos)
        k_factor = k_scale[kv_head] if address(k_scale) != 0 else float32(k_number)
        q_row = address(q) + int64(seq) * q_seq_stride + int64(head) * q_head_stride
        k_rows = address(k_cache) + int64(kv_head) * k_head_stride
        v_rows = address(v_cache) + int64(kv_head) * v_head_stride
        factor = attend(
            thread,
            first,
            Query(q_row, q_head_stride, num_heads, head),
            Cache(k_rows, k_block_stride, k_token_stride),
            Cache(v_rows, v_block_stride, v_token_stride),
            Pages(address(block_tables) + int64(seq) * table_stride * 4, last, num_blocks, report, seq),
            Options(float32(float32(scale) * k_factor), float32(softcap), alibi_slopes, q_pos, seq),
            shared,
        )
        cuda.syncthreads()

        if IS_FULL:
            seq, head, num_splits, _ = load_shared_words(kept)
            kv_head = uint32(head // uint32(GROUP_SIZE))
        v_factor = v_scale[kv_head] if address(v_scale) != 0 else float32(v_number)
        row = int64(seq) * (num_kv_heads * GROUP_SIZE) + int64(head)
        target = address(out) + int64(seq) * out_seq_stride + int64(head) * out_head_stride
        counter = address(counters) + int64(cuda.blockIdx.x) * 4
        finish(
            thread,
            Output(target, out_head_stride, lse, row, num_heads, head, sinks, float32(factor * v_factor)),
            Partials(partial_sums, partial_states, counter, int64(cuda.blockIdx.y), num_splits, int64(cuda.gridDim.y)),
            shared,
        )

    return KernelSource(split, SIGNATURE, NUM_THREADS, _min_blocks(config))


def make_attend(config: SplitConfig, pair_address: Any) -> Any:
    """The inner loop of a config."""
    if config.staged:
        return make_attend_with_many_heads(config, pair_address)
    make = make_attend_on_tensor_cores if config.on_tensor_cores else make_attend_on_cuda_cores
    return make(config, pair_address)


def _min_blocks(config: SplitConfig) -> int:
    """Thread blocks on a multiprocessor: as many as need no spills."""
    return TensorShape(config).min_blocks if config.on_tensor_cores else RowShape(config).min_blocks


def dynamic_bytes(config: SplitConfig) -> int:
    """Bytes of dynamic shared memory of a launch."""
    return _shared_bytes(config) if are_dynamic(config) else 0


def _shared_bytes(config: SplitConfig) -> int:
    """Of the sums, with the weights if dynamic, or of what is there before them: Q, or staged rows and Q."""
    nbytes = sums_bytes(config) + weights_bytes(config) * are_dynamic(config)
    if not config.on_tensor_cores:
        return nbytes
    return max(nbytes, StageShape(config).nbytes if config.staged else TensorShape(config).q_bytes)
