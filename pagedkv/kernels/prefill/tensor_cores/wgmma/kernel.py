"""Prefill attention on warpgroups (wgmma), after FlashAttention-3: 16-bit caches in NHD and HND, on 9.0 alone.

Rows, items and softmax are those of ../kernel.py. A thread block has 128 rows, 64 for each of two warpgroups, and goes
through tiles of 128 keys (80 with 256 dims, 64 with options). The products read their operands from shared memory and
run asynchronously: S = Q K^T of a tile and O += P V of the one before start together, and the second one runs while the
threads compute the softmax of the first. With three stages warpgroups take turns: the products of one run while the
other one computes exponentials (in_turns.py). Where only two have room they go in step (in_step.py).

Grid. As many thread blocks as run at once: each takes the item of its own number, and then the next one that nobody has
taken (items.py). Q and the first K of the next item are copied while the last product of an item runs and its rows are
stored. Who takes an item changes no bits.

Shared memory is cut into panels of 64 dims, as descriptors require: see shape.py. Before they arrive at a barrier,
threads fence what they have copied, so that products (the asynchronous proxy) see it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....device.cache_rows import Cache
from ....device.intrinsics.thread import address, bits_float, shared_address
from ....device.intrinsics.warp import any_lane, shuffle, thread_number
from ....device.intrinsics.warpgroup import GROUP
from ....device.language import cuda, float32, int64, uint32
from ....device.source import KernelSource, Steps, device_function
from ...arguments import INTS, TileLogitOptions, TilePages, TileQuery, signature
from ...config import TensorConfig
from ..prologue import make_prologue
from ..registers import make_registers, make_start, make_store_rows
from .in_step import make_attend_in_step
from .in_turns import make_attend_in_turns
from .items import Batch, Outputs, make_items
from .output import make_store_vectors
from .shape import WgmmaShape


class Arrays(NamedTuple):
    """The arguments of a launch that say where rows are, and how logits come of them."""

    q: Any  # TileQuery of all rows
    k: Any  # Cache, like the two of an item, but of all KV heads
    v: Any
    k_head_stride: Any
    v_head_stride: Any
    tables: Any
    table_stride: Any
    visible: Any
    scale: Any
    softcap: Any
    k_scale: Any
    k_number: Any


class Tiles(NamedTuple):
    """What the rows of an item read, and how: see the arguments of `attend_tiles` in ../loop.py."""

    query: Any
    k: Any
    v: Any
    pages: Any
    visible: Any
    options: Any
    span: Any
    unit: Any


def _make_attend(config: TensorConfig, shape: WgmmaShape) -> Steps:
    """The device functions ``begin``, ``attend`` and ``finish`` of the loop for which there are stages."""
    make = make_attend_in_turns if shape.stages == 3 else make_attend_in_step
    return make(config, shape)


def make_attend_tiles(config: TensorConfig, shape: WgmmaShape) -> Any:
    """The device function ``attend_tiles`` of ../loop.py, for an item beside which no other one begins or ends."""
    attend = _make_attend(config, shape)

    @device_function
    def attend_tiles(registers, shared, thread, lane, warp, item, query, k, v, pages, visible, options, span, unit):
        tiles = Tiles(query, k, v, pages, visible, options, span, unit)
        attend.begin(shared, lane, warp, item, tiles)
        attend.attend(registers, shared, shared, lane, warp, tiles)
        attend.finish(registers)

    return attend_tiles


def make_prefill_wgmma(config: TensorConfig) -> KernelSource:
    """The kernel of all rows of all sequences, which attend to the keys that they see."""
    shape, GROUP_SIZE, MODIFIED = WgmmaShape(config), config.group_size, config.modified
    prologue, items, registers_of = make_prologue(config, shape), make_items(config, shape), make_registers(shape)
    start, store_rows = make_start(config, shape), make_store_rows(config, shape, make_store_vectors(config, shape))
    STORED, STORED_BYTES, attend = shape.stored_start, shape.stored_bytes, _make_attend(config, shape)

    @device_function
    def tiles_of(arrays, item, kv_head):
        low, span = prologue.span_of(item, arrays.visible)
        factor, unit = prologue.factors_of(arrays.scale, arrays.k_scale, arrays.k_number, kv_head)
        q, k, v = arrays.q, arrays.k, arrays.v
        q_row = q.address + int64(item.start) * q.token_stride + int64(uint32(kv_head * GROUP_SIZE)) * q.head_stride
        table = arrays.tables + int64(item.seq) * arrays.table_stride
        return Tiles(
            TileQuery(q_row, q.token_stride, q.head_stride, not MODIFIED and factor < float32(0)),
            Cache(k.address + int64(kv_head) * arrays.k_head_stride, k.block_stride, k.token_stride),
            Cache(v.address + int64(kv_head) * arrays.v_head_stride, v.block_stride, v.token_stride),
            TilePages(table, low, span.last, None, None),
            arrays.visible,
            TileLogitOptions(factor, bits_float(uint32(arrays.softcap)), item.seq, uint32(item.seq_len - 1)),
            span,
            unit,
        )

    def prefill(
        out, lse, q, k_cache, v_cache, block_tables, seq_lens, query_starts, alibi_slopes, sinks, k_scale, v_scale,
        counter, num_seqs, num_tokens, num_kv_heads, num_heads, max_seq_len, visible, scale_strides,
        few_rows, table_stride, q_token_stride, q_head_stride, out_token_stride, out_head_stride, k_block_stride,
        k_token_stride, k_head_stride, v_block_stride, v_token_stride, v_head_stride,
        scale, softcap, k_number, v_number,
    ):  # fmt: skip
        shared = shared_address(cuda.shared.array(0, uint32, alignment=GROUP))
        # A volatile read: ptxas keeps in registers what follows from it, and does not compute it again in the loop.
        thread = thread_number()
        lane, warp = uint32(thread & 31), shuffle(uint32(thread >> 5), 0)
        batch = Batch(query_starts, seq_lens, num_seqs, num_tokens, num_kv_heads, max_seq_len, few_rows, counter)
        outputs = Outputs(out, (out_token_stride, out_head_stride), lse, sinks, v_scale, v_number, num_heads)
        arrays = Arrays(
            TileQuery(address(q), q_token_stride, q_head_stride, False),
            Cache(address(k_cache), k_block_stride, k_token_stride),
            Cache(address(v_cache), v_block_stride, v_token_stride),
            k_head_stride,
            v_head_stride,
            address(block_tables),
            table_stride,
            visible,
            scale,
            softcap,
            k_scale,
            k_number,
        )
        registers, first = registers_of(), uint32(cuda.blockIdx.x)
        number, slot = items.take(first, uint32(0), shared, thread, lane, warp, batch, outputs)
        item, kv_head = items.load(uint32(shared + slot), batch)
        if any_lane(item.num_rows != 0):
            attend.begin(shared, lane, warp, item, tiles_of(arrays, item, kv_head))
        while any_lane(item.num_rows != 0):
            where = uint32(shared + slot)
            start(registers, item, alibi_slopes, kv_head, warp, uint32(lane >> 2))
            attend.attend(registers, shared, where, lane, warp, tiles_of(arrays, item, kv_head))
            # `attend` needs the registers, so reload what the rest uses.
            item, kv_head = items.load(where, batch)
            number, slot = items.take(number, slot, shared, thread, lane, warp, batch, outputs)
            later, later_head = items.load(uint32(shared + slot), batch)
            if any_lane(later.num_rows != 0):
                attend.begin(shared, lane, warp, later, tiles_of(arrays, later, later_head))
            attend.finish(registers)
            output = items.output_of(outputs, item, kv_head)
            place = uint32(uint32(shared + STORED) + uint32(warp * STORED_BYTES))
            store_rows(registers, output, item, warp, uint32(lane >> 2), uint32(lane & 3), place)
            item, kv_head = later, later_head

    return KernelSource(prefill, signature(12, INTS), shape.num_threads, is_specific=True)
