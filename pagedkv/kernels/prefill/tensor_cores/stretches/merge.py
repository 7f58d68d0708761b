"""The kernel after the one whose thread blocks share keys: it folds the states of each row, and stores its output.

Grid. x is that of the other kernel, tile * num_kv_heads + kv_head; y counts 16 dims of the tiles of 16 rows of a warp.
Thread blocks whose rows see keys of one stretch alone have no work. Arguments are those of the other kernel.

Who owns what. Of each state, a thread has what the thread of its number had in registers.
"""

from __future__ import annotations

from ....device.intrinsics.thread import address, assign, divmod_32, for_each, local_array, shared_address, store_4
from ....device.intrinsics.warp import load_l2_4, pack_of, thread_number
from ....device.language import cuda, float32, int64, uint32
from ....device.reductions import sum_of_quad
from ....device.source import KernelSource, device_function
from ...arguments import signature
from ...config import TensorConfig
from ...items import is_split, make_find_item, make_item_store
from ...output import finish
from ..prologue import make_prologue
from ..tile import ITEM_WORDS, TileShape
from ..wgmma.shape import WgmmaShape
from .kernel import WORKSPACES
from .states import VECTOR, fold, make_stretches_of, state_bytes, weights_of


def make_prefill_stretches_merge(config: TensorConfig) -> KernelSource:
    """The kernel after that on mma.sync."""
    return _merge_of(config, TileShape(config))


def make_prefill_stretches_wgmma_merge(config: TensorConfig) -> KernelSource:
    """The kernel after that on warpgroups."""
    return _merge_of(config, WgmmaShape(config))


def _merge_of(config: TensorConfig, shape: TileShape) -> KernelSource:
    ROWS, GROUP_SIZE, STATE_BYTES, STEPS = shape.rows, config.group_size, state_bytes(shape), shape.k_steps
    ROWS_OF_WARP, CHUNKS, STRIDE = shape.rows_of_warp, shape.chunks, VECTOR * shape.num_threads
    OF_SUMS = 2 * shape.row_tiles * STEPS * STRIDE
    prologue, stretches_of = make_prologue(config, shape), make_stretches_of(config, shape)
    find_item, (store_item, load_item), pack = make_find_item(ROWS), make_item_store(0), pack_of(config.q_kind)

    @device_function
    def load(x, where, m, step):
        """Load the sums and shifts of two rows, and four dims of each."""
        values = where + int64(uint32(m * (2 * STEPS) + 2 * step)) * STRIDE
        assign(x, 0, load_l2_4(where + OF_SUMS + int64(m) * STRIDE))
        assign(x, 4, load_l2_4(values))
        assign(x, 8, load_l2_4(values + STRIDE))

    @device_function
    def fold_dim(i, state, x, weights):
        h, at = i // 2 % 2, 4 + i
        state[at] = fold(state[at], x[at], weights[2 * h], weights[2 * h + 1])

    @device_function
    def fold_row(h, state, x, weights):
        state[2 + h], weights[2 * h], weights[2 * h + 1] = weights_of(state[2 + h], x[2 + h])
        state[h] = fold(state[h], x[h], weights[2 * h], weights[2 * h + 1])

    @device_function
    def add_lanes(h, state):
        state[h] = sum_of_quad(state[h])

    @device_function
    def store_pair(i, h, state, target, step, factor):
        chunk, at, zero = uint32(2 * step + i), 4 + 4 * i + 2 * h, float32(0)
        first, second = float32(state[at] * factor), float32(state[at + 1] * factor)
        word = pack(first if factor != zero else zero, second if factor != zero else zero)
        if chunk < CHUNKS:
            store_4(target + int64(chunk) * 16, word)

    @device_function
    def store_row(h, state, output, item, row, step, t):
        row = uint32(row + 8 * h)
        if row < item.num_rows:
            token, head = divmod_32(row, GROUP_SIZE)
            has_sink = address(output.sinks) != 0
            sink = output.sinks[int64(output.head) + int64(head)] if has_sink else float32(0)
            factor, lse = finish(state[h], state[2 + h], has_sink, sink)
            factor = float32(factor * output.v_factor)
            target = output.address + int64(token) * output.token_stride + int64(head) * output.head_stride
            for_each(store_pair, 2, (h, state, target + int64(t) * 4, step, factor))
            if step == 0 and t == 0 and address(output.lse) != 0:
                output.lse[output.lse_row + int64(token) * output.num_heads + int64(head)] = lse

    def prefill_stretches_merge(
        out, lse, q, k_cache, v_cache, block_tables, seq_lens, query_starts, alibi_slopes, sinks, k_scale, v_scale,
        partials,
        num_seqs, num_tokens, num_kv_heads, num_heads, max_seq_len, visible, scale_strides,
        few_rows, stretch, most_states, table_stride, q_token_stride, q_head_stride, out_token_stride, out_head_stride,
        k_block_stride, k_token_stride, k_head_stride, v_block_stride, v_token_stride, v_head_stride,
        scale, softcap, k_number, v_number,
    ):  # fmt: skip
        words = shared_address(cuda.shared.array(ITEM_WORDS, uint32))
        thread = thread_number()
        lane, warp = uint32(thread & 31), uint32(thread >> 5)
        tile, kv_head = divmod_32(uint32(cuda.blockIdx.x), uint32(num_kv_heads))
        lengths = (query_starts, seq_lens)
        # Thread 0 reads the lengths for the block: they may change while the kernel runs, and all threads must agree.
        found = find_item(lane, tile, uint32(GROUP_SIZE), lengths, num_seqs, num_tokens, max_seq_len)
        if thread == 0:
            store_item(words, found)
        cuda.syncthreads()
        item = load_item(words)
        if item.num_rows == 0 or item.seq_len == 0 or is_split(item, few_rows):
            return
        _, count = stretches_of(item, visible, stretch)
        if count == 1:
            return
        m, step = divmod_32(uint32(cuda.blockIdx.y), STEPS)
        where = address(partials) + int64(cuda.blockIdx.x) * most_states * STATE_BYTES + int64(thread) * VECTOR
        state, x, weights, s = local_array(12, float32), local_array(12, float32), local_array(4, float32), uint32(1)
        load(state, where, m, step)
        while s < count and most_states > 1:  # where there is one state, it has the keys of all stretches
            load(x, where + int64(s) * STATE_BYTES, m, step)
            for_each(fold_row, 2, (state, x, weights))
            for_each(fold_dim, 8, (state, x, weights))
            s = uint32(s + 1)
        for_each(add_lanes, 2, (state,))
        strides = (out_token_stride, out_head_stride)
        output = prologue.output_of(out, strides, lse, sinks, v_scale, v_number, item, kv_head, num_heads)
        row = uint32(uint32(item.first_row + warp * ROWS_OF_WARP) + uint32(uint32(16 * m) + uint32(lane >> 2)))
        for_each(store_row, 2, (state, output, item, row, step, uint32(lane & 3)))

    return KernelSource(prefill_stretches_merge, signature(14, *WORKSPACES), shape.num_threads)
