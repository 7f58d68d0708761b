"""Steps of the split kernel: from tokens to the addresses of their rows.

Each lane looks up one token of a step, two steps ahead, whatever the block size; a shuffle hands the offset of its
row (device/row_offsets.py, in vectors of 16 bytes, or 8 where rows are not multiples of 16) to the lanes that load it.
"""

from __future__ import annotations

from typing import Any

from ..device.intrinsics.thread import load_4
from ..device.language import int64, uint32
from ..device.row_offsets import make_address_at, make_row_offset
from ..device.source import Steps, device_function
from .config import SplitConfig


def make_pages(config: SplitConfig, fetch: Any) -> Steps:
    """The steps of a config; `fetch` is that of lanes.py."""
    BLOCK_SIZE, WIDE, sizes = config.block_size, config.wide, (config.wide, config.vector_bytes)
    row_offset, address_at = make_row_offset(*sizes), make_address_at(*sizes)

    @device_function
    def find_token(pages, token):
        """The block and position of a token; one past the last is looked up as the last one, so that every lane has a
        row to load."""
        token = min(token, pages.last)
        column = uint32(token // uint32(BLOCK_SIZE))
        return load_4(pages.table + int64(column) * 4), uint32(token - uint32(column * uint32(BLOCK_SIZE)))

    @device_function
    def row_address(base, offset, lane):
        """The row whose offset that lane offered."""
        if WIDE:
            return address_at(base, int64(fetch(offset, lane, 1)) << 32 | int64(fetch(offset, lane, 0)))
        return address_at(base, fetch(offset, lane, 0))

    return Steps(find_token, row_offset, address_at, row_address)
