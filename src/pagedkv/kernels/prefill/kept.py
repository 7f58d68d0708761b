"""What all threads of a block are told through shared memory, and read again where registers are scarce."""

from __future__ import annotations

from typing import Any

from numba import uint32

from ..device.source import device_function
from ..device.tensor_intrinsics import load_shared_word, store_shared_word
from .arguments import Item
from .tile import TileShape


def make_keep(shape: TileShape) -> tuple[Any, Any]:
    """The device functions ``keep(shared, item)``, for one thread, and ``kept(shared) -> item``, behind a barrier."""
    KEPT = shape.kept_start

    @device_function
    def keep(shared, item):
        where = uint32(shared + KEPT)
        store_shared_word(where, item.seq)
        store_shared_word(uint32(where + 4), item.first_row)
        store_shared_word(uint32(where + 8), item.num_rows)
        store_shared_word(uint32(where + 12), item.start)
        store_shared_word(uint32(where + 16), item.context)
        store_shared_word(uint32(where + 20), item.seq_len)

    @device_function
    def kept(shared):
        where = uint32(shared + KEPT)
        return Item(
            load_shared_word(where),
            load_shared_word(uint32(where + 4)),
            load_shared_word(uint32(where + 8)),
            load_shared_word(uint32(where + 12)),
            load_shared_word(uint32(where + 16)),
            load_shared_word(uint32(where + 20)),
        )

    return keep, kept
