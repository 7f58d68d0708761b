"""The kernel after the one that splits keys: it merges the states of each row, and stores the row's output.

Grid. x is (seq * FEW_ROWS + row) * num_kv_heads + kv_head. Thread blocks of rows that do not exist, or whose keys are
not split, have no work. Arguments are those of the kernel that splits keys.

Who owns what. The first warp of a thread block finds the weights of all states. Each thread adds two dims, part after
part, by the formula of device/merging.py. States without keys add nothing, and adding the first one with keys changes
no bit of it: a row that sees keys of one part alone has the bits that it has without splits.
"""

from __future__ import annotations

from ....device.intrinsics.thread import (
    address,
    bits_float,
    divmod_32,
    larger,
    load_8,
    local_array,
    multiply_and_add,
    shared_address,
    store_4,
)
from ....device.intrinsics.warp import pack_of
from ....device.language import cuda, float32, int64, uint32
from ....device.logits import UNSEEN
from ....device.merging import make_add, make_add_states, weight_of
from ....device.reductions import largest_of_warp, sum_of_warp
from ....device.sizes import WARP_SIZE
from ....device.source import KernelSource, device_function
from ....device.visible import first_key, last_key
from ...arguments import signature
from ...config import FEW_ROWS, NUM_THREADS, TensorConfig
from ...items import make_item_store
from ...output import finish
from ..prologue import make_prologue
from ..tile import ITEM_WORDS
from .kernel import WORKSPACES
from .shape import MOST_PARTS, PartShape
from .states import make_states

LOADS = 16  # states that a thread loads before it adds the first
LOWEST = float32(-UNSEEN)  # the pivot of a row without keys: its weight is 0 beside any row with keys
NOTHING = float32(-0.0)  # adding it changes no number, not even -0


@device_function
def load_floats(where):
    """Load two float32 of a state."""
    x, y = load_8(where)
    return bits_float(x), bits_float(y)


def make_prefill_merge(config: TensorConfig) -> KernelSource:
    """The kernel that computes the output of rows whose keys are split, from their states."""
    shape, (store_item, load_item) = PartShape(config), make_item_store(0)
    ROWS, PAIRS, ROW_BYTES, GROUP_SIZE = shape.rows, config.head_dim // 2, 4 * config.head_dim, config.group_size
    add_states = make_add_states(load_floats, make_add(2, may_be_empty=True), 2, ROW_BYTES, LOADS)
    prologue, states, pack = make_prologue(config, shape), make_states(config, shape), pack_of(config.q_kind)

    @device_function
    def weigh(lane, where, count, weights):
        """Set the weights of all states, and return the row's pivot and sum of exponentials. A whole warp calls it."""
        maximum, total, s = LOWEST, float32(0), int64(lane)
        while s < count:
            maximum = larger(maximum, load_floats(where + s * 8)[0])
            s += WARP_SIZE
        maximum, s = largest_of_warp(maximum), int64(lane)
        while s < count:
            pivot, mine = load_floats(where + s * 8)
            weight = weight_of(pivot, maximum)
            weights[s], total = weight, multiply_and_add(weight, mine, total)
            s += WARP_SIZE
        return maximum, sum_of_warp(total)

    def prefill_merge(
        out, lse, q, k_cache, v_cache, block_tables, seq_lens, query_starts, alibi_slopes, sinks, k_scale, v_scale,
        partial_sums, partial_states,
        num_seqs, num_tokens, num_kv_heads, num_heads, max_seq_len, visible, scale_strides,
        least_keys, most_parts, by_tokens, table_stride, q_token_stride, q_head_stride, out_token_stride,
        out_head_stride, k_block_stride, k_token_stride, k_head_stride, v_block_stride, v_token_stride, v_head_stride,
        scale, softcap, k_number, v_number,
    ):  # fmt: skip
        words, of_row = cuda.shared.array(ITEM_WORDS, uint32), cuda.shared.array(2, float32)
        weights = cuda.shared.array(MOST_PARTS, float32)
        thread = uint32(cuda.threadIdx.x)
        row, kv_head = divmod_32(uint32(cuda.blockIdx.x), uint32(num_kv_heads))
        seq, row = divmod_32(row, FEW_ROWS)
        # Thread 0 reads the lengths for the block: they may change while the kernel runs, and all threads must agree.
        if thread == 0:
            first_row, lengths = uint32(uint32(row // uint32(ROWS)) * uint32(ROWS)), (query_starts, seq_lens)
            store_item(
                shared_address(words), states.split_item(first_row, seq, lengths, num_tokens, max_seq_len, least_keys)
            )
        cuda.syncthreads()
        item = load_item(shared_address(words))
        if row >= item.num_rows:
            return
        token, head = divmod_32(row, GROUP_SIZE)
        position, count, at = uint32(item.context + token), int64(0), int64(0)
        source = states.states_of(partial_sums, partial_states, item, kv_head, num_kv_heads, most_parts, by_tokens)
        if item.seq_len > 0:
            low, _ = prologue.span_of(item, visible)
            of_tile = states.parts_of(item.seq_len, low, low)
            last = last_key(position, visible, item.seq_len)
            parts = states.parts_of(item.seq_len, first_key(position, visible), last)
            count = int64(uint32(parts.last - parts.first)) + 1
            at = source.first + int64(uint32(row - item.first_row)) * source.row_stride
            at += int64(uint32(parts.first - of_tile.first))
        if thread < WARP_SIZE:
            maximum, total = weigh(thread, source.pivots + at * 8, count, weights)
            if thread == 0:
                of_row[0], of_row[1] = maximum, total
        cuda.syncthreads()
        strides = (out_token_stride, out_head_stride)
        output = prologue.output_of(out, strides, lse, sinks, v_scale, v_number, item, kv_head, num_heads)
        has_sink = address(sinks) != 0 and item.seq_len > 0
        sink = sinks[int64(output.head) + int64(head)] if has_sink else float32(0)
        factor, row_lse = finish(of_row[1], float32(-of_row[0]), has_sink, sink)
        factor = float32(factor * output.v_factor)
        if thread < uint32(PAIRS):
            sums, zero = local_array(2, float32), float32(0)
            sums[0], sums[1] = NOTHING, NOTHING
            where = source.sums + at * ROW_BYTES + int64(thread) * 8
            add_states(sums, where, weights, int64(0), int64(0), count)
            target = output.address + int64(token) * output.token_stride + int64(head) * output.head_stride
            first, second = float32(sums[0] * factor), float32(sums[1] * factor)
            word = pack(first if factor != zero else zero, second if factor != zero else zero)
            store_4(target + int64(thread) * 4, word)
        if thread == 0 and address(lse) != 0:
            lse[output.lse_row + int64(token) * num_heads + int64(head)] = row_lse

    return KernelSource(prefill_merge, signature(14, *WORKSPACES), NUM_THREADS)
