"""Which rows a thread block has: items of ragged batches, which the device finds.

Sequence i owns the tiles of ROWS rows from ``query_starts[i] * group_size // ROWS + i`` on. These numbers rise with i
and give each sequence as many tiles as it needs. So a tile finds its sequence by a search, and a grid of
``num_tokens * group_size // ROWS + num_seqs`` tiles is enough: it takes no prefix sum, and the host need not know the
lengths.
"""

from __future__ import annotations

from typing import Any

from ..device.intrinsics.thread import address, load_4
from ..device.intrinsics.warp import ballot, load_shared_word, store_shared_word
from ..device.language import cuda, int64, uint32
from ..device.sizes import WARP_SIZE
from ..device.source import device_function
from .arguments import Item
from .config import PART


def num_tiles(num_tokens: int, num_seqs: int, group_size: int, rows: int) -> int:
    """The tiles of `rows` rows that are enough for any batch of this size."""
    return num_tokens * group_size // rows + num_seqs


@device_function
def start_of(query_starts, seq):
    """The first row of a sequence in q."""
    return load_4(address(query_starts) + int64(seq) * 4)


@device_function
def item_of(seq, first_row, group_size, lengths, num_tokens, max_seq_len):
    """The item of a sequence's rows from first_row on; `lengths` are (query_starts, seq_lens).

    It has 0 rows if the sequence's query starts are out of range. A length out of range counts as 0.
    """
    query_starts, seq_lens = lengths
    start, stop = start_of(query_starts, seq), start_of(query_starts, uint32(seq + 1))
    num_rows = uint32(0)
    if start <= stop and stop <= uint32(num_tokens):
        num_rows = uint32(uint32(stop - start) * group_size)
    length, query_len = load_4(address(seq_lens) + int64(seq) * 4), uint32(stop - start)
    is_valid = length <= uint32(max_seq_len) and query_len <= length
    seq_len = length if is_valid else uint32(0)
    return Item(seq, first_row, num_rows, start, uint32(seq_len - query_len), seq_len)


@device_function
def is_split(item, few_rows):
    """Whether the kernel that splits keys (tensor_cores/parts/) takes the sequence, for its few rows and many keys."""
    return item.num_rows <= uint32(few_rows) and item.seq_len > uint32(PART)


def make_find_item(rows: int) -> Any:
    """The device function ``find_item(lane, tile, group_size, lengths, num_seqs, num_tokens, max_seq_len)``.

    lengths are (query_starts, seq_lens). The Item has 0 rows if the tile is past the sequence's rows or its query
    starts are out of range, and a seq_len of 0 if its length is out of range. The whole warp calls it.
    """
    ROWS = rows

    @device_function
    def first_tile(query_starts, seq, group_size):
        return uint32(uint32(uint32(start_of(query_starts, seq) * group_size) // uint32(ROWS)) + seq)

    @device_function
    def find_sequence(lane, tile, group_size, query_starts, num_seqs):
        """The last sequence whose first tile is at or before this one; each lane tests one of 32 candidates."""
        seq, left = uint32(0), uint32(num_seqs)
        while left > 1:
            step = uint32(uint32(left + (WARP_SIZE - 1)) // uint32(WARP_SIZE))
            mine = uint32(lane * step)
            is_before = mine < left and first_tile(query_starts, uint32(seq + min(mine, left - 1)), group_size) <= tile
            passed = max(uint32(WARP_SIZE - uint32(cuda.clz(ballot(is_before)))), uint32(1))
            skipped = uint32(uint32(passed - 1) * step)
            seq = uint32(seq + skipped)
            left = min(step, uint32(left - skipped))
        return seq

    @device_function
    def find_item(lane, tile, group_size, lengths, num_seqs, num_tokens, max_seq_len):
        seq = find_sequence(lane, tile, group_size, lengths[0], num_seqs)
        item = item_of(seq, uint32(0), group_size, lengths, num_tokens, max_seq_len)
        tiles = uint32(uint32(item.num_rows + (ROWS - 1)) // uint32(ROWS))
        mine = uint32(tile - first_tile(lengths[0], seq, group_size))
        is_mine = mine < tiles
        # The last rows go first: with a causal mask they take longest.
        first_row = uint32(uint32(tiles - 1 - mine) * uint32(ROWS)) if is_mine else uint32(0)
        num_rows = item.num_rows if is_mine else uint32(0)
        return Item(seq, first_row, num_rows, item.start, item.context, item.seq_len)

    return find_item


def make_item_store(item_start: int) -> tuple[Any, Any]:
    """The device functions ``store_item(shared, item)``, for one thread, and ``load_item(shared)``, after a barrier.

    The item lies in shared memory, item_start bytes on. All threads load it, and do so again where registers are
    scarce.
    """
    START = item_start

    @device_function
    def store_item(shared, item):
        where = uint32(shared + START)
        store_shared_word(where, item.seq)
        store_shared_word(uint32(where + 4), item.first_row)
        store_shared_word(uint32(where + 8), item.num_rows)
        store_shared_word(uint32(where + 12), item.start)
        store_shared_word(uint32(where + 16), item.context)
        store_shared_word(uint32(where + 20), item.seq_len)

    @device_function
    def load_item(shared):
        where = uint32(shared + START)
        return Item(
            load_shared_word(where),
            load_shared_word(uint32(where + 4)),
            load_shared_word(uint32(where + 8)),
            load_shared_word(uint32(where + 12)),
            load_shared_word(uint32(where + 16)),
            load_shared_word(uint32(where + 20)),
        )

    return store_item, load_item
