"""How thread blocks share the items of a launch: each takes the next one that nobody has taken.

The counter is 0 again after every launch and every replay of a CUDA graph: each number below that of all items is drawn
for once, and the counter counts to the last of them and begins again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....device.intrinsics.thread import address, divmod_32
from ....device.intrinsics.warp import any_lane, count_up, load_shared_word, shuffle, store_shared_word
from ....device.language import cuda, uint32
from ....device.source import Steps, device_function
from ...config import TensorConfig
from ...items import is_split, make_find_item, make_item_store
from ...output import make_store_nothing
from ..prologue import make_prologue
from .shape import NUMBER_AT, SLOT_BYTES, WgmmaShape


class Batch(NamedTuple):
    """The arguments of a launch that say which items there are."""

    query_starts: Any
    seq_lens: Any
    num_seqs: Any
    num_tokens: Any
    num_kv_heads: Any
    max_seq_len: Any
    few_rows: Any
    counter: Any  # of the items that were drawn


class Outputs(NamedTuple):
    """The arguments of a launch that say where the rows of items go."""

    out: Any
    strides: Any
    lse: Any
    sinks: Any
    v_scale: Any
    v_number: Any
    num_heads: Any


def make_items(config: TensorConfig, shape: WgmmaShape) -> Steps:
    """The device functions ``take``, ``load`` and ``output_of``.

    ``take(number, slot, shared, thread, lane, warp, batch, outputs)`` looks at the item `number`, which thread 0 knows,
    and at those that it draws then, until one attends to keys; rows of others that have none become zeros. It returns
    the number that is drawn next, and the slot of the item, which has 0 rows if there is none any more. All threads
    call it, and ``load(where, batch)``, which returns the item of a slot and its KV head.
    ``output_of(outputs, item, kv_head)`` is where its rows go.
    """
    ROWS, GROUP_SIZE, NUMBER = shape.rows, config.group_size, shape.item_start + NUMBER_AT
    find_item, (store_item, load_item) = make_find_item(shape.rows), make_item_store(shape.item_start)
    store_nothing = make_store_nothing(shape.rows, config.head_dim // 2, shape.num_threads)
    prologue = make_prologue(config, shape)

    @device_function
    def output_of(outputs, item, kv_head):
        x = outputs
        return prologue.output_of(x.out, x.strides, x.lse, x.sinks, x.v_scale, x.v_number, item, kv_head, x.num_heads)

    @device_function
    def load(where, batch):
        _, kv_head = divmod_32(load_shared_word(uint32(where + NUMBER)), uint32(batch.num_kv_heads))
        return load_item(where), kv_head

    @device_function
    def take(number, slot, shared, thread, lane, warp, batch, outputs):
        num_tiles = uint32(uint32(uint32(batch.num_tokens * GROUP_SIZE) // uint32(ROWS)) + batch.num_seqs)
        num_items = uint32(num_tiles * batch.num_kv_heads)
        while True:
            slot = uint32(slot ^ SLOT_BYTES)
            where = uint32(shared + slot)
            if warp == 0:
                number = shuffle(number, uint32(0))
                tile, _ = divmod_32(number, uint32(batch.num_kv_heads))
                lengths, num_seqs, num_tokens = (batch.query_starts, batch.seq_lens), batch.num_seqs, batch.num_tokens
                group_size = uint32(GROUP_SIZE)
                found = find_item(lane, tile, group_size, lengths, num_seqs, num_tokens, batch.max_seq_len)
                if thread == 0:
                    store_item(where, found)
                    store_shared_word(uint32(where + NUMBER), number)
                    if number < num_items:
                        drawn = count_up(address(batch.counter), uint32(num_items - 1))
                        number = uint32(uint32(cuda.gridDim.x) + drawn)
            cuda.syncthreads()
            item, kv_head = load(where, batch)
            is_over = load_shared_word(uint32(where + NUMBER)) >= num_items
            has_keys = item.num_rows != 0 and item.seq_len != 0 and not is_split(item, batch.few_rows)
            if any_lane(is_over or has_keys):
                return number, slot
            if item.seq_len == 0:
                store_nothing(output_of(outputs, item, kv_head), item, uint32(GROUP_SIZE), thread)

    return Steps(take, load, output_of)
