"""Validation of the values of arrays on the host; those on a device are only read by kernels with ``check=True``.

The arrays are private copies that kernels will read, since another thread may write to the caller's arrays at any time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..arrays import Array
from ..calls import mask_starts

_UINT32 = np.dtype(np.uint32)
_INFINITY_BITS = np.array(np.inf, np.float32).view(np.uint32)


def seq_lens(lengths: Array, max_seq_len: int, capacity: int) -> int:
    """Return the longest length, 0 if there is none, or raise ValueError unless all are in 0..max_seq_len.

    max_seq_len is at most the capacity of the tables.
    """
    longest = _largest(lengths)
    if longest <= max_seq_len:
        return longest
    seq = int((lengths.view(_UINT32) > max_seq_len).argmax())
    bound = "max_seq_len" if max_seq_len < capacity else "max_blocks * block_size"
    raise ValueError(f"seq_lens must be in 0..{bound} = 0..{max_seq_len}, got {lengths[seq]} for sequence {seq}")


def _largest(numbers: Array) -> int:
    """The largest of some int32 numbers, 0 if there are none; negative numbers count as larger than all others."""
    bits = numbers.view(_UINT32)
    return int(bits.item(bits.argmax())) if bits.size else 0  # half the time of max()


def block_tables(
    name: str, tables: Array, lengths: Array, block_size: int, num_blocks: int, first_keys: Callable[[], Array]
) -> None:
    """Raise IndexError if a used entry is not a block id; lengths are valid, and the longest uses all columns.

    Entries before the blocks of `first_keys` are not used.
    """
    # Most tables are valid even in their unused entries: then one pass without a mask is enough.
    if _largest(tables) < num_blocks or not tables.size:
        return
    used = tables.view(_UINT32)
    num_used = -(-lengths.astype(np.int64) // block_size)
    first = first_keys() // block_size
    columns = np.arange(used.shape[1])
    bad = (used >= num_blocks) & (columns < num_used[:, None]) & (columns >= first[:, None])
    if bad.any():
        seq, column = np.unravel_index(bad.argmax(), bad.shape)
        where = f"for sequence {seq}, column {column}" if name == "block_tables" else f"at column {column}"
        raise IndexError(
            f"{name} must hold block ids in 0..num_blocks-1 = 0..{num_blocks - 1}, got {tables[seq, column]} {where}"
        )


def query_starts(starts: Array, lengths: Array, num_tokens: int) -> None:
    """Raise ValueError unless the starts begin at 0, never decrease, and fit q and the lengths."""
    if starts[0] != 0:
        raise ValueError(f"query_starts must begin with 0, got {starts[0]}")
    query_lens = np.diff(starts.astype(np.int64))
    if len(query_lens) and query_lens.min() < 0:
        seq = int((query_lens < 0).argmax())
        raise ValueError(
            f"query_starts must never decrease, got {starts[seq]} and then {starts[seq + 1]} for sequence {seq}"
        )
    if starts[-1] > num_tokens:
        raise ValueError(f"query_starts must end at or before num_tokens = {num_tokens}, got {starts[-1]}")
    longer = query_lens > lengths
    if longer.any():
        seq = int(longer.argmax())
        raise ValueError(
            f"query_starts must give no sequence more tokens than its seq_len, "
            f"got {query_lens[seq]} tokens for sequence {seq} of length {lengths[seq]}"
        )


def leftpad(padding: Array, lengths: Array) -> None:
    """Raise ValueError unless no sequence has more padding than tokens."""
    bad = padding.view(_UINT32) > lengths.view(_UINT32)
    if bad.any():
        seq = int(bad.argmax())
        raise ValueError(
            f"leftpad must be in 0..seq_len, got {padding[seq]} for sequence {seq} of length {lengths[seq]}"
        )


def mask(flat: Array, starts: Array, lengths: Array) -> None:
    """Raise ValueError unless the mask has the keys of all rows, and no more."""
    size = int(mask_starts(flat, starts, lengths)[-1])
    if flat.size != size:
        what = "query_len * seq_len booleans" if flat.dtype == np.bool_ else "query_len * seq_len bits, in whole bytes,"
        raise ValueError(f"mask must have shape ({size},), {what} for each sequence, got {flat.shape}")


def scales(name: str, per_head: Array) -> None:
    """Raise ValueError unless every scale is positive and finite."""
    # Compare bits, since a thread that flushes denormals would take small scales for zeros.
    bad = per_head.view(np.uint32) - np.uint32(1) >= _INFINITY_BITS - np.uint32(1)
    if bad.any():
        head = int(bad.argmax())
        raise ValueError(f"{name} must be positive and finite, got {per_head[head]} for KV head {head}")


def slots(of_tokens: Array, num_slots: int) -> None:
    """Raise IndexError for a slot out of range, ValueError for one that is named twice; negative slots are skipped."""
    if not len(of_tokens):
        return
    if int(of_tokens.max()) >= num_slots:
        token = int((of_tokens >= num_slots).argmax())
        raise IndexError(
            f"slots must be below num_blocks * block_size = {num_slots}, got {of_tokens[token]} for token {token}"
        )
    if (of_tokens[1:] > of_tokens[:-1]).all():
        return
    ordered = np.sort(of_tokens)
    again = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if again.any():
        slot = ordered[1:][again][0]
        first, second = np.flatnonzero(of_tokens == slot)[:2]
        raise ValueError(f"slots must name a slot once, got {slot} for tokens {first} and {second}")


def positions(of_tokens: Array, max_positions: int, used: Array | None = None) -> None:
    """Raise IndexError if a used token has a position without a row in the tables."""
    bad = (of_tokens < 0) | (of_tokens >= max_positions)
    if used is not None:
        bad &= used
    if bad.any():
        token = int(bad.argmax())
        where = f"got {of_tokens[token]} for token {token}"
        raise IndexError(f"positions must be in 0..max_positions-1 = 0..{max_positions - 1}, {where}")


def pairs(blocks: Array, num_sources: int, num_destinations: int, *, one_pool: bool) -> None:
    """Raise unless pairs (n, 2) name existing blocks, and no destination is named twice or, in one pool, a source."""
    if not len(blocks):
        return
    for column, what, count in ((0, "source", num_sources), (1, "destination", num_destinations)):
        bad = blocks[:, column].view(np.uint64) >= count
        if bad.any():
            row = int(bad.argmax())
            raise IndexError(
                f"pairs must hold block ids in 0..num_blocks-1 = 0..{count - 1}, "
                f"got {what} {blocks[row, column]} in pair {row}"
            )
    written = np.sort(blocks[:, 1])
    again = written[1:] == written[:-1]
    if again.any():
        raise ValueError(f"pairs must name a destination once, got destination {written[1:][again][0]} twice")
    if one_pool:
        both = written.take(written.searchsorted(blocks[:, 0]), mode="clip") == blocks[:, 0]
        if both.any():
            raise ValueError(f"pairs must not use a destination as a source, got block {blocks[both, 0][0]} as both")
