"""Steps of the split kernel: from tokens to the addresses of their rows.

Each lane looks up one token of a step, two steps ahead, whatever the block size; a shuffle hands the offset of its
row (device/row_offsets.py, in vectors of 16 bytes, or 8 where rows are not multiples of 16) to the lanes that load it.
"""

from __future__ import annotations

from typing import Any

from ..device.bad_entries import BLOCK_ID, record
from ..device.intrinsics.thread import load_4
from ..device.language import cuda, int32, int64, uint32
from ..device.row_offsets import make_address_at, make_row_offset
from ..device.source import Steps, device_function
from .config import NUM_THREADS, SplitConfig


def make_pages(config: SplitConfig, fetch: Any) -> Steps:
    """The steps of a config; `fetch` is that of lanes.py."""
    BLOCK_SIZE, MASKS, CHECKS_SPLITS = config.block_size, config.masks_blocks, config.checks_splits
    WIDE, sizes = config.wide, (config.wide, config.vector_bytes)
    row_offset, address_at = make_row_offset(*sizes), make_address_at(*sizes)

    @device_function
    def find_token(pages, token):
        """The block and position of a token, and whether they are good.

        A token past the last one is looked up as the last one, so that every lane has a row to load. A block id that
        check=True refuses is replaced by block 0. If `check_split` does not run, it is recorded, and not good.
        """
        token = min(token, pages.last)
        column = uint32(token // uint32(BLOCK_SIZE))
        block = load_4(pages.table + int64(column) * 4)
        good = True
        if CHECKS_SPLITS:
            block = block if block < pages.num_blocks else uint32(0)
        if MASKS:
            good = block < pages.num_blocks
            if not good:
                record(pages.report, BLOCK_ID, pages.seq, column, int64(int32(block)))
                block = uint32(0)
        return block, uint32(token - uint32(column * uint32(BLOCK_SIZE))), good

    @device_function
    def check_split(thread, first, pages):
        """True if check=True refuses a block id of the split; every thread of the block calls it, and gets the same.

        The first bad id of a thread is recorded.
        """
        column, last = uint32(uint32(first // uint32(BLOCK_SIZE)) + thread), uint32(pages.last // uint32(BLOCK_SIZE))
        is_bad = int32(0)
        while column <= last and is_bad == 0:
            block = load_4(pages.table + int64(column) * 4)
            if not block < pages.num_blocks:
                record(pages.report, BLOCK_ID, pages.seq, column, int64(int32(block)))
                is_bad = int32(1)
            column = uint32(column + NUM_THREADS)
        return cuda.syncthreads_or(is_bad) != 0

    @device_function
    def row_address(base, offset, lane):
        """The row whose offset that lane offered."""
        if WIDE:
            return address_at(base, int64(fetch(offset, lane, 1)) << 32 | int64(fetch(offset, lane, 0)))
        return address_at(base, fetch(offset, lane, 0))

    return Steps(find_token, check_split, row_offset, address_at, row_address)
