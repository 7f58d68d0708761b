"""The inner loop of the split kernel on tensor cores for many query heads: warps share rows in shared memory.

A warp has registers for the sums of 16 query heads. With more, all warps take the same tokens, each with heads of its
own, from rows that the thread block copies to shared memory (stages.py). Both products, the softmax and the sums are
those of few_heads.py; only rows come from shared memory instead of global memory.

Each turn of the loop waits for the oldest stage, synchronises the thread block, starts to copy the youngest stage over
the one that the last turn read, looks up the tokens of the stage after it, and uses the oldest. All warps make the same
number of turns; tokens past the end are zeros, and masked.
"""

from __future__ import annotations

from typing import Any

from ...device.cache_rows import Cache
from ...device.intrinsics.thread import clear, divmod_32, local_arrays, unrolled
from ...device.intrinsics.warp import end_group, or_of_warp, wait_but
from ...device.language import cuda, float32, int64, uint32
from ...device.source import Steps, device_function
from ..arguments import SplitQuery
from ..config import SplitConfig
from ..lanes import make_lanes, make_row_lookup
from ..shape import TensorShape
from ..sums import make_store_sums
from .fragments import make_products
from .query import make_stage_query
from .registers import make_registers
from .softmax import make_softmax
from .stages import FoundRows, StageShape, make_stages


def make_attend_with_many_heads(config: SplitConfig, sums: Steps) -> Any:
    """The device function ``attend_split(...)``, as that of few_heads.py."""
    shape, stage = TensorShape(config), StageShape(config)
    NUM_HEADS = config.heads_of_warp
    VECTOR_BYTES, LANES = config.vector_bytes, stage.lanes
    TOKENS, ROWS, AHEAD = stage.tokens, stage.rows_of_lane, stage.num_stages - 1
    STAGE_BYTES, RING_BYTES, Q_BYTES = stage.stage_bytes, stage.ring_bytes, shape.q_bytes
    NUM_RAW, NUM_O, ALL = shape.num_raw, shape.num_o, uint32(0xFFFFFFFF)
    BY_ROW, SCALES = config.by_row, stage.scales_start
    lanes, new_registers, of_rows = make_lanes(config), make_registers(shape, 1), (ROWS * AHEAD, uint32)
    new_found = local_arrays(FoundRows, blocks=of_rows, positions=of_rows)
    lookup = make_row_lookup(config, lanes.fetch)
    stages, products = make_stages(stage, lookup), make_products(shape)
    stage_query, wait_for_oldest, wait_for_all = make_stage_query(shape), wait_but(AHEAD - 1), wait_but(0)
    softmax, store_sums = make_softmax(shape, lanes), make_store_sums(shape, sums)

    @unrolled(shape.num_chunks)
    def use_keys(i, registers, q_shared, where):
        stages.read_keys(i, registers.words, where)
        products.multiply_keys(i, registers, int64(0), q_shared)

    @unrolled(shape.num_chunks)
    def use_values(i, registers, where):
        stages.read_values(i, registers.words, where)
        products.multiply_values(i, registers, int64(0))

    @unrolled(AHEAD)
    def find_stages(i, found, pages, token):
        stages.find_rows(found, ROWS * i, pages, uint32(token + TOKENS * i))

    @unrolled(AHEAD)
    def copy_stages(i, ring, found, token, pages, k, v, row, piece):
        token = uint32(token + TOKENS * i)
        stages.copy_rows(uint32(ring + STAGE_BYTES * i), found, ROWS * i, token, pages, k, v, row, piece)
        end_group()

    @device_function
    def attend_split(thread, first, query, k, v, pages, options, shared):
        lane = uint32(thread & 31)
        # Broadcast, as in few_heads.py, so that ptxas knows it to be warp-uniform.
        warp = or_of_warp(uint32(thread >> 5))
        g, t = uint32(lane >> 2), uint32(lane & 3)
        # The last warps of the last tile may have no heads; their sums are never read.
        first_head = min(uint32(warp * NUM_HEADS), query.num_heads)
        num_heads = min(uint32(NUM_HEADS), uint32(query.num_heads - first_head))
        first_head = first_head if num_heads > 0 else uint32(0)
        q = query.address + int64(first_head) * query.head_stride
        query = SplitQuery(q, query.head_stride, num_heads, uint32(query.head + first_head))
        ring, ring_end = shared.address, uint32(shared.address + RING_BYTES)
        q_shared = uint32(ring_end + warp * Q_BYTES + (lane << 4))
        others, registers, found = lanes.slots(warp)[2], new_registers(), new_found()
        clear(registers.o, NUM_O)
        softmax.start(registers, query, options.slopes, g)

        # The longest dependency chain first: table entries of the first stages, then their rows.
        row, piece = divmod_32(thread, LANES)
        k = Cache(k.address + int64(piece) * VECTOR_BYTES, k.block_stride, k.token_stride)
        v = Cache(v.address + int64(piece) * VECTOR_BYTES, v.block_stride, v.token_stride)
        token, last = uint32(first + row), pages.last
        find_stages(found, pages, token)
        stages.zero_ring(ring, thread)
        copy_stages(ring, found, token, pages, k, v, row, piece)
        token = uint32(token + AHEAD * TOKENS)
        stages.find_rows(found, int64(0), pages, token)

        stage_query(q_shared, registers.factors, query, g, t, int64(0), options.scale < float32(0))
        softmax.set_units(registers, options.scale)

        k_from, v_from = stages.fragment_offsets(g, t)
        oldest, youngest = ring, uint32(ring + AHEAD * STAGE_BYTES)
        while first <= last:
            wait_for_oldest()
            cuda.syncthreads()
            stages.copy_rows(youngest, found, int64(0), token, pages, k, v, row, piece)
            end_group()
            token = uint32(token + TOKENS)
            stages.find_rows(found, int64(0), pages, token)

            clear(registers.raw, NUM_RAW)
            use_keys(registers, q_shared, uint32(oldest + k_from))
            if BY_ROW:
                stages.read_scales(registers.scales, uint32(oldest + SCALES), t)
            softmax.logits(registers, options, uint32(first + (t << 2)))
            valid = softmax.valid_tokens(first, last)
            if valid != ALL:
                softmax.mask(registers.s, uint32(valid >> uint32(t << 2)))
            if BY_ROW:
                stages.read_scales(registers.scales, uint32(oldest + (SCALES + 4 * TOKENS)), t)
            softmax.update(registers, others, g, t)
            use_values(registers, uint32(oldest + v_from))
            youngest, oldest = oldest, uint32(oldest + STAGE_BYTES)
            oldest = ring if oldest == ring_end else oldest
            first = uint32(first + TOKENS)
        wait_for_all()
        cuda.syncthreads()  # the sums replace rows and Q
        store_sums(shared, registers, uint32(warp * NUM_HEADS), g, t, uint32(0), uint32(0))

    return attend_split
