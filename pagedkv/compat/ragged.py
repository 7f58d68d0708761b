"""Ragged and short keys, described in place by block tables, as several libraries take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def as_blocks(key: Any, value: Any, starts: Any, used: Any, name: str) -> tuple[Any, Any, Any, Any]:
    """View ragged keys and values as blocks; return them, the block tables, and the lengths of the sequences.

    A block is as long as the starts of the sequences allow: one token, or a whole slot where all slots are alike.
    `name` is what the caller calls the starts.
    """
    if starts is None:
        raise ValueError(f"{name} must say where each sequence begins where block_table is not given, got None")
    if key.dim() != 3 or value.dim() != 3:
        raise ValueError(
            "k and v must have shape (total_k, num_kv_heads, head_dim), or pages with a block_table, "
            f"got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    begin = starts.cpu().numpy()
    room = np.diff(begin)
    lens = room if used is None else used.cpu().numpy()
    num_tokens = min(len(key), len(value))
    require_starts(name, begin, num_tokens, "tokens of k and v")
    if lens.shape != room.shape or (lens > room).any():
        raise ValueError(f"seqused_k must be at most the tokens between {name}, {room.tolist()}, got {lens.tolist()}")
    if not begin[-1]:  # a block that no sequence reads
        key, value, begin = key.new_zeros(1, *key.shape[1:]), value.new_zeros(1, *value.shape[1:]), begin + 1
    block_size = int(np.gcd.reduce(begin))
    num_blocks = -(-int(lens.max(initial=0)) // block_size)
    tables = begin[:-1, None] // block_size + np.arange(num_blocks, dtype=np.int32)
    np.minimum(tables, begin[-1] // block_size - 1, out=tables)  # past the end of a sequence anything is fine
    blocks = (x[: begin[-1]].unflatten(0, (-1, block_size)) for x in (key, value))
    return *blocks, *(torch.from_numpy(x).to(key.device) for x in (tables, lens))


def never_decrease(starts: Any) -> bool:
    """Whether none of the starts, an array of NumPy, is below the one before; a difference of int32 may wrap."""
    return bool((starts[1:] >= starts[:-1]).all())


def require_starts(name: str, starts: Any, most: int, what: str) -> None:
    """Raise ValueError unless there are starts, in order, from at least 0 to at most the number of `what`."""
    if not len(starts) or starts[0] < 0 or not never_decrease(starts) or starts[-1] > most:
        raise ValueError(f"{name} must never decrease, in 0..{most}, the {what}, got {starts.tolist()}")


def behind_padding(
    tables: Any, lens: Any, query_lens: Any, num_tokens: int, block_size: int, name: str
) -> tuple[Any, Any, Any]:
    """Tables, lengths and padding of sequences that would have fewer keys than queries, which sit at their last keys.

    Blocks that nobody sees, in front of such a sequence, have room for its first queries. `name` is what the caller
    calls the lengths, which are checked here, since those that come out fit the tables that come out. More queries than
    `num_tokens`, the rows of q, get no room: the operation refuses them.
    """
    if not block_size:
        raise ValueError("block_size must be at least 1, got 0")
    room = tables.shape[1] * block_size
    if len(tables) != len(lens) or ((lens < 0) | (lens > room)).any():
        raise ValueError(
            f"{name} must be lengths in 0..{room}, the tokens of a row of block_table, one for each of its "
            f"{len(tables)} rows, got {lens.tolist()}"
        )
    in_front = -(-(query_lens.clip(0, num_tokens) - lens).clip(0) // block_size)
    width = int((in_front - (-lens // block_size)).max())
    columns = np.arange(1, width + 1) - in_front[:, None]
    behind_zeros = np.pad(tables, ((0, 0), (1, 0)))
    tables = np.take_along_axis(behind_zeros, columns.clip(0, tables.shape[1]), axis=1)
    return tables, lens + in_front * np.int32(block_size), in_front * np.int32(block_size)
