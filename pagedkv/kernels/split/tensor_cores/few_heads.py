"""The inner loop of the split kernel on tensor cores: caches of float16, bfloat16 and fp8, from memory to registers.

The loop has no barrier and no ldmatrix, and reads only Q from shared memory. The order of an mma's reduction index is
free as long as both operands agree, and so is the order of its rows and columns; so every lane loads 16 contiguous
bytes of a row and hands the pieces to several mma. A step is one or two tiles of 16 tokens; a warp takes every fourth
step of its split. If O of all dims does not fit into registers (`SplitConfig.warps_for_dims`), a group of two warps
takes every second step: each has all of S, and half of the dims of O.

    lane = 4 g + t, g = 0..7, t = 0..3                        m16n8k16: A 16 x 16, B 16 x 8, C 16 x 8

    S = Q K^T, heads x tokens, over head_dim
        B is K    token row(g), and row(g) + 2 for another B; row(g) = 4 (g >> 1) + (g & 1)
                  16 bytes at byte 64 v + 16 t of the row, for each vector v: k16 steps without a permute, since
                  reduction indices 2t, 2t + 1, 2t + 8, 2t + 9 are a quad of 4 neighbouring dims
        A is Q    the same quads of heads g (rows 0..7), see below for rows 8..15
        C is S    head g, tokens 4t, 4t + 1 of the tile, from another B 4t + 2, 4t + 3

    O^T = V^T P^T, dims x heads, over tokens
        A is V    tokens 4t .. 4t + 3, 16 bytes at byte 128 v + 16 g of the row; a permute pairs the tokens
                  row g is dim 8 g + 2 j of the vector, j = 0..3, row g + 8 the next one
                  (fp8: dim 16 g + 4 j + 2 z, z = 0, 1)
        B is P    head g, tokens 4t .. 4t + 3: both C of S, packed to 16 bits, where they are
        C is O    the same dims as A, of heads 2t and 2t + 1

Rows 8..15 of Q. With 9 to 16 heads they are heads 8..15. With fewer they would be idle, so they hold the next k16 step
(`TensorShape.is_folded`): the fragment serves both steps, each with its own accumulators, half of them unused.

P has two terms of 16 bits, so that rounding it costs little accuracy (but infinite values may come out as NaN).

Two buffers of registers are in flight, and the chunks of K and then V of a step alternate between them: a used buffer
is refilled with the chunk two later. Loads are unconditional: past the end they load the last token. The last step of a
warp stands behind the loop; it alone masks tokens past the end, which are all of them in a warp without tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...device.intrinsics.thread import clear, divmod_32, unrolled
from ...device.intrinsics.warp import or_of_warp
from ...device.language import cuda, float32, int64, uint32
from ...device.source import Steps, device_function
from ..config import SplitConfig
from ..lanes import SLOT_BYTES, make_lanes, make_row_lookup
from ..shape import TensorShape
from ..sums import make_store_sums, sums_bytes
from .fragments import key_token, make_products, make_rows
from .query import make_stage_query
from .registers import make_registers
from .softmax import make_softmax


class LaneRows(NamedTuple):
    """Where a lane's first vectors lie in the rows at offset 0."""

    k: Any  # the address of its vector 0 of K
    v: Any  # the address of its vector 0 of V
    room: Any  # bytes of a row of V from vector 0 on
    token: Any  # `key_token`
    t: Any


def make_attend_on_tensor_cores(config: SplitConfig, sums: Steps) -> Any:
    """The device function ``attend_split(...)``: a warp attends to its tokens of the split, and stores its sums."""
    shape, BY_ROW = TensorShape(config), config.by_row
    CHUNKS, BUFFER, STEP, TURN = shape.num_chunks, shape.buffer, shape.step, shape.step * config.num_warp_groups
    NUM_RAW, NUM_O, WARPS_FOR_DIMS, ALL = shape.num_raw, shape.num_o, config.warps_for_dims, uint32(0xFFFFFFFF)
    ROW_BYTES, V_VECTOR, V_WARP_BYTES = config.row_bytes, shape.v_vector, 8 * shape.v_vector * shape.v_vectors
    SUMS_BYTES = sums_bytes(config)
    lanes, new_registers = make_lanes(config), make_registers(shape, 2)
    lookup = make_row_lookup(config, lanes.fetch)
    caches, products, stage_query = make_rows(shape, lookup.row_address), make_products(shape), make_stage_query(shape)
    softmax, store_sums = make_softmax(shape, lanes), make_store_sums(shape, sums)

    @unrolled(CHUNKS)
    def use_keys(i, registers, q_shared, rows, k_offset, v_offset):
        """Multiply chunk i of K, and refill its buffer with the chunk two later if that is of this step."""
        at = (i % 2) * BUFFER
        products.multiply_keys(i, registers, at, q_shared)
        if i + 2 < CHUNKS:
            caches.load_keys(i + 2, registers.words, at, rows.k, k_offset, rows.token, rows.t)
        elif i + 2 < 2 * CHUNKS:
            caches.load_values(i + 2 - CHUNKS, registers.words, at, rows.v, v_offset, rows.room, rows.t)

    @unrolled(CHUNKS)
    def use_values(i, registers, rows, next_k, v_offset, next_v, valid, is_last):
        """Multiply chunk i of V, and refill its buffer with the chunk two later, if the warp has one."""
        at = ((CHUNKS + i) % 2) * BUFFER
        if is_last and valid != ALL:
            caches.zero_values(registers.words, at, uint32(valid >> uint32(rows.t << 2)))
        products.multiply_values(i, registers, at)
        if i + 2 < CHUNKS:
            caches.load_values(i + 2, registers.words, at, rows.v, v_offset, rows.room, rows.t)
        elif is_last:
            pass
        elif i + 2 < 2 * CHUNKS:
            caches.load_keys(i + 2 - CHUNKS, registers.words, at, rows.k, next_k, rows.token, rows.t)
        else:
            caches.load_values(i + 2 - 2 * CHUNKS, registers.words, at, rows.v, next_v, rows.room, rows.t)

    @device_function
    def take_scales(registers, slot, scale, t):
        if BY_ROW:
            lanes.offer(slot, scale)
            softmax.take_scales(registers.scales, slot, scale, t)

    @device_function
    def attend_split(thread, first, query, k, v, pages, options, shared):
        """Attend to the tokens first .. pages.last; the whole thread block calls it.

        Latency is hidden in three stages: the block table is read two steps before a row is used, the offset of the row
        is computed one step before, and a chunk of it is loaded two chunks before it is multiplied.
        """
        lane = uint32(thread & 31)
        # Broadcast, so that ptxas knows it to be warp-uniform: loops over steps need no code for diverged lanes.
        warp = or_of_warp(uint32(thread >> 5))
        warp_group, dims_part = divmod_32(warp, WARPS_FOR_DIMS)
        g, t = uint32(lane >> 2), uint32(lane & 3)
        q_shared, token = uint32(shared.address + SUMS_BYTES + lane * 16), key_token(g)
        v_first = int64(g) * V_VECTOR + int64(dims_part) * V_WARP_BYTES
        rows = LaneRows(k.address + int64(t) * 16, v.address + v_first, ROW_BYTES - v_first, token, t)
        keys, values, others = lanes.slots(warp)
        both_values = uint32(2 * values + SLOT_BYTES)
        registers, last = new_registers(), pages.last
        clear(registers.o, NUM_O)
        softmax.start(registers, query, options.slopes, g)

        # The longest dependency chain first: table entries of the first two steps, then the first keys.
        base, mine = uint32(first + warp_group * STEP), uint32(lane & (STEP - 1))
        block, position = lookup.find_token(pages, uint32(base + mine))
        k_offset = lanes.share(keys, lookup.row_offset(k, block, position))
        v_offset = lanes.share(values, lookup.row_offset(v, block, position))
        scales = lookup.scales_of(pages, block, position)
        block, position = lookup.find_token(pages, uint32(base + mine + TURN))
        caches.load_keys(int64(0), registers.words, int64(0), rows.k, k_offset, token, t)
        if CHUNKS > 1:
            caches.load_keys(int64(1), registers.words, int64(BUFFER), rows.k, k_offset, token, t)

        stage_query(q_shared, registers.factors, query, g, t, int64(warp), options.scale < float32(0))
        softmax.set_units(registers, options.scale)
        cuda.syncthreads()

        if CHUNKS == 1:
            caches.load_values(int64(0), registers.words, int64(BUFFER), rows.v, v_offset, rows.room, t)
        while uint32(base + TURN) <= last:
            clear(registers.raw, NUM_RAW)
            use_keys(registers, q_shared, rows, k_offset, v_offset)
            k_offset = lanes.share(keys, lookup.row_offset(k, block, position))
            values = uint32(both_values - values)  # the other slot: this step still reads from this one
            next_v = lanes.share(values, lookup.row_offset(v, block, position))
            if not BY_ROW:
                block, position = lookup.find_token(pages, uint32(base + mine + 2 * TURN))
            if CHUNKS == 1:
                caches.load_keys(int64(0), registers.words, int64(0), rows.k, k_offset, token, t)
            take_scales(registers, others, scales[0], t)
            softmax.logits(registers, options, uint32(base + (t << 2)))
            take_scales(registers, others, scales[1], t)
            softmax.update(registers, others, g, t)
            if BY_ROW:  # not before these scales have been used: two more would take a thread block
                scales = lookup.scales_of(pages, block, position)
                block, position = lookup.find_token(pages, uint32(base + mine + 2 * TURN))
            use_values(registers, rows, k_offset, v_offset, next_v, ALL, False)
            base, v_offset = uint32(base + TURN), next_v
        clear(registers.raw, NUM_RAW)
        use_keys(registers, q_shared, rows, k_offset, v_offset)
        valid = softmax.valid_tokens(base, last)
        take_scales(registers, others, scales[0], t)
        softmax.logits(registers, options, uint32(base + (t << 2)))
        if valid != ALL:
            softmax.mask(registers.s, uint32(valid >> uint32(t << 2)))
        take_scales(registers, others, scales[1], t)
        softmax.update(registers, others, g, t)
        use_values(registers, rows, k_offset, v_offset, v_offset, valid, True)
        # Compute these again: they would take registers in the loop.
        warp, g, t = uint32(thread >> 5), uint32(uint32(thread >> 2) & 7), uint32(thread & 3)
        warp_group, dims_part = divmod_32(warp, WARPS_FOR_DIMS)
        store_sums(shared, registers, uint32(0), g, t, warp_group, dims_part)

    return attend_split
