"""Exceptions for the bad entries that checked kernels have recorded."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..kernels.device.bad_entries import BLOCK_ID, NUM_BYTES, PAIR, POSITION, QUERY_START, SEQ_LEN
from .device import REPORT, Device


def raise_if_failed(devices: Iterable[Device]) -> None:
    """Wait for the devices, raise the first bad entry that a kernel on them skipped, and forget it.

    Parameters
    ----------
    devices : iterable of Device
        The first one with an entry raises it; one call raises one entry.

    Raises
    ------
    IndexError
        A block id outside 0..num_blocks-1, a slot at or past num_blocks * block_size, or a position outside
        0..max_positions-1.
    ValueError
        A sequence length below 0, or beyond the table's capacity or max_seq_len; query_starts that are out of order or
        out of range.
    """
    for device in devices:
        content = device.take(REPORT)
        if content is not None and content.any():
            raise exception(*map(int, content[8:NUM_BYTES].view(np.int64)))


def exception(what: int, sequence: int, column: int, value: int) -> IndexError | ValueError:
    """The exception for an entry of the report buffer (see kernels/device/bad_entries.py)."""
    if what == BLOCK_ID:
        name = "block_tables" if sequence >= 0 else "block_table"
        where = f"for sequence {sequence}, column {column}" if sequence >= 0 else f"at column {column}"
        return IndexError(f"{name} must hold block ids in 0..num_blocks-1, got {value} {where}")
    if what == SEQ_LEN:
        where = f"got {value} for sequence {sequence}"
        return ValueError(f"seq_lens must be in 0..max_blocks * block_size and at most max_seq_len, {where}")
    if what == QUERY_START:
        return ValueError(
            "query_starts must begin with 0, never decrease, end at or before num_tokens, and give no sequence more "
            f"tokens than its seq_len, got {value} for sequence {sequence}"
        )
    if what == PAIR:
        side = "destination" if column else "source"
        return IndexError(f"pairs must hold block ids in 0..num_blocks-1, got {side} {value} in pair {sequence}")
    if what == POSITION:
        return IndexError(f"positions must be in 0..max_positions-1, got {value} for token {sequence}")
    return IndexError(f"slots must be below num_blocks * block_size, got {value} for token {sequence}")
