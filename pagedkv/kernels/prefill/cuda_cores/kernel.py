"""Prefill attention on CUDA cores: what tensor cores do not take, and the form to read first.

float32 queries and caches, layout vllm, rows of more than 256 dims, padding on the left, masks, and slopes for each
sequence. Every option is an argument of the launch.

Grid and rows are as on tensor cores (../tensor_cores/, ../items.py). A few neighbouring lanes share a row of queries:
each has every `lanes`-th key of a tile in Q K^T and in the softmax, and every `lanes`-th vector of 4 dims of O.

Shared memory, dynamic: Q; one tile, for K and V in turn, both widened to float32, with a vector between rows so that
lanes hit different banks; P. Only the lanes that store a row of P load it. Static: offsets and scales of a tile's rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...device.cache_rows import make_scale_of, scale_of_row, scales_of_keys, scales_of_values
from ...device.intrinsics.thread import (
    address,
    assign,
    bits_float,
    clear,
    divmod_32,
    exp2,
    float_bits,
    for_each,
    larger,
    load_1,
    load_4,
    load_shared,
    local_array,
    multiply_and_add,
    shared_address,
    store_8,
    store_16,
)
from ...device.intrinsics.warp import (
    exchange,
    load_shared_word,
    pack_of,
    shuffle,
    store_shared_word,
    sync_warp,
)
from ...device.language import cuda, float32, int64, uint32
from ...device.logits import LOG2E, NONE, make_modify
from ...device.sizes import ELEMENT_BITS, SCALED_BY_ROW, WARP_SIZE
from ...device.source import KernelSource, device_function
from ...device.visible import first_key, last_key
from ..arguments import BYTES, INTS, Item, TileOutput, signature
from ..config import NUM_THREADS, CoresConfig
from ..items import make_find_item, start_of
from ..output import finish, make_store_nothing
from .rows import make_load_query, make_load_rows
from .shape import VECTOR, CoresShape


class QueryRow(NamedTuple):
    """The query row of a lane."""

    position: Any
    first: Any  # the first key that it sees
    last: Any  # the last one
    head: Any
    slope: Any
    seq: Any
    last_token: Any  # the sequence's last token
    first_in_mask: Any  # where the mask has its key 0, in keys


class Mask(NamedTuple):
    """Which keys rows see besides; see `pagedkv.prefill_attention`."""

    address: Any  # 0 for none
    num_bytes: Any
    shift: Any  # log2 of the keys that a byte holds


@device_function
def is_hidden(mask, key):
    """Whether the mask hides its entry `key`, counted over the rows of all sequences; it hides all past its end."""
    byte = key >> mask.shift
    if byte >= mask.num_bytes:
        return True
    bit = int64(load_1(mask.address + byte)) >> (key & ((int64(1) << mask.shift) - 1))
    return bit & 1 == 0


def make_prefill_on_cuda_cores(config: CoresConfig) -> KernelSource:
    """The kernel of all rows of all sequences, which attend to the keys that they see."""
    shape = CoresShape(config)
    ROWS, LANES, TILE_BYTES, P_BYTES = shape.rows, shape.lanes, shape.tile_bytes, shape.p_bytes
    Q_BYTES, ROW_BYTES, SUMS = ELEMENT_BITS[config.q_kind] // 8, shape.row_bytes, shape.vectors * VECTOR
    find_item, store_nothing = make_find_item(ROWS), make_store_nothing(ROWS, config.head_dim * Q_BYTES // 4)
    load_query, load_keys = make_load_query(shape), make_load_rows(shape, is_keys=True)
    load_values, store_row = make_load_rows(shape, is_keys=False), make_store(shape)
    dot_products, softmax, add_values = make_dot_products(shape), make_softmax(shape), make_add_values(shape)
    NUM_OFFSETS, BY_ROW, scale_of = 2 * ROWS, config.kv_kind in SCALED_BY_ROW, make_scale_of(config.kv_kind)
    NUM_SCALES = NUM_OFFSETS if BY_ROW else 1

    @device_function
    def start_in_mask(lane, places, seq, lengths, shift):
        """The byte of the mask with which a sequence begins. The whole warp calls it, and leaves sums in `places`."""
        query_starts, seq_lens = lengths
        total, i = int64(0), lane
        while i < seq:
            query_len = uint32(start_of(query_starts, uint32(i + 1)) - start_of(query_starts, i))
            keys = int64(query_len) * int64(load_4(address(seq_lens) + int64(i) * 4))
            total += (keys + (int64(1) << shift) - 1) >> shift
            i = uint32(i + WARP_SIZE)
        places[int64(lane)] = total
        sync_warp()
        start, n = int64(0), int64(0)
        while n < WARP_SIZE:
            start += places[n]
            n += 1
        return start

    @device_function
    def find_rows(rows, table, first, low, last, block_size, k_strides, v_strides, scales, of_keys, of_values, thread):
        """Store the offsets of a tile's rows in both caches, from the first row of the KV head on, and their scales."""
        if thread < ROWS:
            column, position = divmod_32(min(max(uint32(first + thread), low), last), block_size)
            block = int64(load_4(table + int64(column) * 4))
            rows[int64(thread)] = block * k_strides[0] + int64(position) * k_strides[1]
            rows[int64(thread) + ROWS] = block * v_strides[0] + int64(position) * v_strides[1]
            if BY_ROW:
                scales[int64(thread)] = scale_of_row(of_keys, block, position)
                scales[int64(thread) + ROWS] = scale_of_row(of_values, block, position)

    def prefill_on_cuda_cores(
        out, lse, q, k_cache, v_cache, block_tables, seq_lens, query_starts, alibi_slopes, sinks, k_scale, v_scale,
        leftpad, mask,
        num_seqs, num_tokens, num_kv_heads, num_heads, max_seq_len, visible, scale_strides, block_size,
        table_stride, q_token_stride, q_head_stride, out_token_stride, out_head_stride, k_block_stride,
        k_token_stride, k_head_stride, k_dim_stride, v_block_stride, v_token_stride, v_head_stride, v_dim_stride,
        slopes_stride, mask_bytes, mask_shift, scale, softcap, k_number, v_number,
    ):  # fmt: skip
        q_tile = shared_address(cuda.shared.array(0, uint32, alignment=16))
        rows, kept = cuda.shared.array(NUM_OFFSETS, int64), cuda.shared.array(7, uint32)
        mask_start, scales = cuda.shared.array(1, int64), cuda.shared.array(NUM_SCALES, float32)
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & 31), shuffle(uint32(thread >> 5), 0)
        tile, kv_head = divmod_32(uint32(cuda.blockIdx.x), uint32(num_kv_heads))
        lengths, group_size = (query_starts, seq_lens), uint32(uint32(num_heads) // uint32(num_kv_heads))
        # One warp reads the lengths for the block: they may change while the kernel runs, and all threads must agree.
        if warp == 0:
            found = find_item(lane, tile, group_size, lengths, num_seqs, num_tokens, max_seq_len)
            start = int64(0)
            if address(mask) != 0:
                start = start_in_mask(lane, rows, found.seq, lengths, mask_shift)
            if lane == 0:
                kept[0], kept[1], kept[2] = found.seq, found.first_row, found.num_rows
                kept[3], kept[4], kept[5] = found.start, found.context, found.seq_len
                kept[6] = load_4(address(leftpad) + int64(found.seq) * 4) if address(leftpad) != 0 else uint32(0)
                mask_start[0] = start << mask_shift
        cuda.syncthreads()
        item = Item(kept[0], kept[1], kept[2], kept[3], kept[4], kept[5])
        if item.num_rows == 0:
            return
        last_row = uint32(item.num_rows - 1)
        first_position = uint32(item.context + uint32(item.first_row // group_size))
        end_position = uint32(item.context + uint32(min(uint32(item.first_row + (ROWS - 1)), last_row) // group_size))
        last = last_key(end_position, visible, item.seq_len)
        low = max(first_key(first_position, visible), min(kept[6], item.seq_len))
        table = address(block_tables) + int64(item.seq) * table_stride
        head = uint32(kv_head * group_size)
        v_factor = scale_of(v_scale, v_number, kv_head)
        output = TileOutput(
            address(out) + int64(item.start) * out_token_stride + int64(head) * out_head_stride,
            out_token_stride,
            out_head_stride,
            lse,
            int64(item.start) * num_heads + int64(head),
            num_heads,
            sinks,
            head,
            v_factor,
        )
        if item.seq_len == 0:
            store_nothing(output, item, group_size, thread)
            return

        k_factor = scale_of(k_scale, k_number, kv_head)
        factor = float32(bits_float(uint32(scale)) * k_factor)
        k_head, v_head = address(k_cache) + kv_head * k_head_stride, address(v_cache) + kv_head * v_head_stride
        k_strides, v_strides = (k_block_stride, k_token_stride), (v_block_stride, v_token_stride)
        of_keys = scales_of_keys(k_scale, scale_strides, kv_head)
        of_values = scales_of_values(v_scale, scale_strides, kv_head)
        q_head = address(q) + int64(item.start) * q_token_stride + int64(head) * q_head_stride
        r, c = divmod_32(thread, LANES)
        token, of_group = divmod_32(min(uint32(item.first_row + r), last_row), group_size)
        position = uint32(item.context + token)
        slope = float32(0)
        if address(alibi_slopes) != 0:
            slope = alibi_slopes[int64(item.seq) * slopes_stride + int64(head) + int64(of_group)]
        row = QueryRow(
            position,
            max(first_key(position, visible), low),  # `low` may be the first key behind padding
            last_key(position, visible, item.seq_len),
            uint32(head + of_group),
            slope,
            item.seq,
            uint32(item.seq_len - 1),
            mask_start[0] + int64(token) * int64(item.seq_len),
        )
        hiding = Mask(address(mask), mask_bytes, mask_shift)
        kv_tile, p_row = uint32(q_tile + TILE_BYTES), uint32(uint32(q_tile + 2 * TILE_BYTES) + uint32(r * P_BYTES))
        q_row = uint32(q_tile + uint32(r * ROW_BYTES))
        load_query(q_tile, q_head, (q_token_stride, q_head_stride), item.first_row, last_row, group_size, thread)
        o, state = local_array(SUMS, float32), local_array(2, float32)
        clear(o, SUMS)
        state[0], state[1] = NONE, float32(0)
        first = uint32(uint32(low // uint32(ROWS)) * uint32(ROWS))
        while low <= last and first <= last:  # rows within padding see no key, and its block ids may be anything
            cuda.syncthreads()
            sizes = (uint32(block_size), k_strides, v_strides)
            find_rows(rows, table, first, low, last, *sizes, scales, of_keys, of_values, thread)
            cuda.syncthreads()
            load_keys(kv_tile, rows, k_head, k_dim_stride, thread)
            cuda.syncthreads()
            dot_products(p_row, q_row, kv_tile, c)
            softmax(p_row, o, state, row, hiding, scales, factor, bits_float(uint32(softcap)), first, c)
            cuda.syncthreads()
            load_values(kv_tile, rows, v_head, v_dim_stride, thread)
            cuda.syncthreads()
            add_values(o, p_row, kv_tile, c)
            first = uint32(first + ROWS)
        store_row(o, state, output, uint32(item.first_row + r), item.num_rows, token, of_group, c)

    return KernelSource(prefill_on_cuda_cores, signature(17, INTS, BYTES), NUM_THREADS)


def dynamic_bytes(config: CoresConfig) -> int:
    """Bytes of dynamic shared memory of a launch."""
    return CoresShape(config).nbytes


def make_dot_products(shape: CoresShape) -> Any:
    """The device function ``dot_products(p_row, q_row, tile, c)``, which stores q . k of a lane's keys in P."""
    KEYS, LANES, ROW_BYTES, VECTORS = shape.keys_of_lane, shape.lanes, shape.row_bytes, shape.row_vectors
    load = load_shared(VECTOR)

    @device_function
    def add_products(j, s, x, keys):
        y = load(uint32(keys + ROW_BYTES * LANES * j))
        total = multiply_and_add(x[0], y[0], s[j])
        total = multiply_and_add(x[1], y[1], total)
        total = multiply_and_add(x[2], y[2], total)
        s[j] = multiply_and_add(x[3], y[3], total)

    @device_function
    def put(j, s, p_row, c):
        store_shared_word(uint32(p_row + uint32(uint32(c + LANES * j) << 2)), float_bits(s[j]))

    @device_function
    def dot_products(p_row, q_row, tile, c):
        s = local_array(KEYS, float32)
        clear(s, KEYS)
        at, end, keys = q_row, uint32(q_row + 16 * VECTORS), uint32(tile + uint32(c * ROW_BYTES))
        while at < end:
            for_each(add_products, KEYS, (s, load(at), keys))
            at, keys = uint32(at + 16), uint32(keys + 16)
        for_each(put, KEYS, (s, p_row, c))

    return dot_products


def make_softmax(shape: CoresShape) -> Any:
    """The device function ``softmax(p_row, o, state, row, mask, scales, factor, softcap, first, c)``.

    Products become P, times the scales of values. state is the maximum and this lane's sum of exponentials. It rescales
    both and O, by 1 if no maximum moves.
    """
    BY_ROW, ROWS = shape.config.kv_kind in SCALED_BY_ROW, shape.rows
    KEYS, LANES, SUMS, STEPS = shape.keys_of_lane, shape.lanes, shape.vectors * VECTOR, shape.lanes.bit_length() - 1
    modify = make_modify(shape.config.score_mod)

    @device_function
    def largest_of_row(x):
        for b in range(STEPS):
            x = larger(x, exchange(x, uint32(1 << b)))
        return x

    @device_function
    def rescale(i, o, factor):
        o[i] = float32(o[i] * factor)

    @device_function
    def softmax(p_row, o, state, row, mask, scales, factor, softcap, first, c):
        largest, key = NONE, c
        while key < uint32(KEYS * LANES):
            where, token = uint32(p_row + uint32(key << 2)), uint32(first + key)
            x = float32(bits_float(load_shared_word(where)) * factor)
            if BY_ROW:
                x = float32(x * scales[int64(key)])
            k_pos = int64(min(token, row.last_token))
            x = float32(modify(x, softcap, row.slope, int64(row.position), k_pos, row.head, row.seq) * LOG2E)
            is_seen = row.first <= token and token <= row.last
            if is_seen and mask.address != 0:
                is_seen = not is_hidden(mask, row.first_in_mask + int64(token))
            x = x if is_seen else NONE
            largest = larger(largest, x)
            store_shared_word(where, float_bits(x))
            key = uint32(key + LANES)
        maximum = larger(state[0], largest_of_row(largest))
        pivot = float32(0) if maximum == NONE else maximum
        factor_of_o = exp2(float32(state[0] - pivot))
        total, key = float32(state[1] * factor_of_o), c
        while key < uint32(KEYS * LANES):
            where = uint32(p_row + uint32(key << 2))
            x = bits_float(load_shared_word(where))
            p = exp2(float32(x - pivot))
            total = float32(total + p)
            if BY_ROW:
                p = float32(p * scales[int64(key) + ROWS]) if x != NONE else float32(0)
            store_shared_word(where, float_bits(p))
            key = uint32(key + LANES)
        state[0], state[1] = maximum, total
        for_each(rescale, SUMS, (o, factor_of_o))
        sync_warp()

    return softmax


def make_add_values(shape: CoresShape) -> Any:
    """The device function ``add_values(o, p_row, tile, c)``: O += P V, for a lane's dims."""
    KEYS, LANES, ROW_BYTES = shape.rows, shape.lanes, shape.row_bytes
    VECTORS, IS_WHOLE, LAST = shape.vectors, shape.row_vectors % shape.lanes == 0, shape.row_vectors - 1
    load = load_shared(VECTOR)

    @device_function
    def add_vector(n, o, p, row, c):
        # Past the row, load its last vector: those sums are never stored.
        vector = uint32(c + LANES * n) if IS_WHOLE else min(uint32(c + LANES * n), uint32(LAST))
        x, at = load(uint32(row + uint32(vector << 4))), VECTOR * n
        a, b = multiply_and_add(p, x[0], o[at]), multiply_and_add(p, x[1], o[at + 1])
        assign(o, at, (a, b, multiply_and_add(p, x[2], o[at + 2]), multiply_and_add(p, x[3], o[at + 3])))

    @device_function
    def add_values(o, p_row, tile, c):
        row, at, end = tile, p_row, uint32(p_row + 4 * KEYS)
        while at < end:
            for_each(add_vector, VECTORS, (o, bits_float(load_shared_word(at)), row, c))
            row, at = uint32(row + ROW_BYTES), uint32(at + 4)

    return add_values


def make_store(shape: CoresShape) -> Any:
    """The device function ``store(o, state, output, row, num_rows, token, head, c)``: a lane's dims of a row."""
    LANES, VECTORS, ROW_VECTORS, STEPS = shape.lanes, shape.vectors, shape.row_vectors, shape.lanes.bit_length() - 1
    Q_BYTES = ELEMENT_BITS[shape.config.q_kind] // 8
    pack = pack_of(shape.config.q_kind)

    @device_function
    def store_vector(n, o, target, factor, is_inside, c):
        vector, at, zero = uint32(c + LANES * n), VECTOR * n, float32(0)
        a, b = float32(o[at] * factor), float32(o[at + 1] * factor)
        x, y = float32(o[at + 2] * factor), float32(o[at + 3] * factor)
        if factor == zero:  # without keys, values may still be NaN
            a = b = x = y = zero
        if is_inside and vector < ROW_VECTORS:
            where = target + int64(vector) * (VECTOR * Q_BYTES)
            if Q_BYTES == 4:
                store_16(where, float_bits(a), float_bits(b), float_bits(x), float_bits(y))
            else:
                store_8(where, pack(a, b), pack(x, y))

    @device_function
    def store(o, state, output, row, num_rows, token, head, c):
        total = state[1]
        for b in range(STEPS):
            total = float32(total + exchange(total, uint32(1 << b)))
        is_inside, has_sink = row < num_rows, address(output.sinks) != 0
        sink = output.sinks[int64(output.head) + int64(head)] if has_sink else float32(0)
        pivot = float32(0) if state[0] == NONE else state[0]
        factor, lse = finish(total, float32(-pivot), has_sink, sink)
        target = output.address + int64(token) * output.token_stride + int64(head) * output.head_stride
        for_each(store_vector, VECTORS, (o, target, float32(factor * output.v_factor), is_inside, c))
        if is_inside and c == 0 and address(output.lse) != 0:
            output.lse[output.lse_row + int64(token) * output.num_heads + int64(head)] = lse

    return store
