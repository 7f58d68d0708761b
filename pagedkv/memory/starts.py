"""Starts: how a sequence gets its row of the table, the blocks that it finds, and new ones behind them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..commit import Write
from .append import pairs
from .ids import NO_BLOCKS, UNUSED, Int64Array
from .prefix.hit import NO_HIT, Hit
from .prefix.prompt import Prompt
from .rows import SequenceRows


class StartPlan(NamedTuple):
    """How a sequence starts: its handle, how many of its tokens are found, the copies to make, and what to store."""

    seq: int
    num_cached: int
    copies: Int64Array
    writes: list[Write]


def find(rows: SequenceRows, prompt: Prompt) -> Hit:
    """What can be shared of the beginning of a prompt; nothing without a prefix cache."""
    return NO_HIT if rows.chains is None else rows.chains.share(prompt)


def can_add(rows: SequenceRows, prompt: Prompt, reserve: int, chunk: int | None = None) -> bool:
    """Whether a sequence fits, appended in chunks if they are given, and leaves `reserve` blocks free."""
    needed = _num_taken(rows, prompt.num_tokens, find(rows, prompt), chunk) + reserve
    return prompt.num_tokens <= rows.max_len and needed <= rows.pool.num_free and rows.handles.num_free > 0


def plan_add(
    rows: SequenceRows,
    prompt: Prompt,
    reserve: int | None = None,
    chunk: int | None = None,
    *,
    preempted: bool = False,
    find_any: bool = True,
) -> StartPlan:
    """Start a sequence.

    With `reserve` it starts with the found tokens alone, if there is room for all, appended in chunks, and that many
    blocks to spare. A `preempted` request mostly finds its own tokens, so they are counted separately. Without
    `find_any` it finds none.
    """
    num_tokens, chains = prompt.num_tokens, rows.chains
    if num_tokens > rows.max_len:
        raise ValueError(f"num_tokens must be at most max_blocks * block_size = {rows.max_len}, got {num_tokens}")
    [row], [seq], writes = rows.handles.plan_issue(1)
    hit = find(rows, prompt) if find_any else NO_HIT
    if reserve is not None:
        rows.pool._require(_num_taken(rows, num_tokens, hit, chunk) + reserve, rows.pool.num_free)
        num_tokens = hit.num_tokens
    num_new = int(rows.num_blocks(num_tokens)) - hit.num_columns
    new_blocks, allocation = rows.pool._plan(rows.num_groups * num_new, gained=hit.blocks, num_seqs=1)
    by_group = new_blocks.reshape(rows.num_groups, num_new)
    writes += [*allocation, *_plan_row(rows, int(row), num_tokens, hit, by_group)]
    if chains is not None:
        tokens = prompt.tokens
        if tokens is not None:
            found = hit.num_columns * rows.block_size
            writes += chains.cache.plan_tokens(by_group[rows.groups.leader], tokens[found:num_tokens])
            writes += chains.cache.plan_count(prompt.num_tokens, hit.num_tokens, preempted=preempted)
            if rows.states is not None and not preempted:
                writes += rows.states.plan_count(hit.num_matched - hit.num_tokens)
        num_known = 0 if tokens is None else num_tokens
        writes += chains.plan_start(int(row), num_known, hit, prompt)
    return StartPlan(seq, hit.num_tokens, pairs(hit.copied, by_group[: len(hit.copied), :1].reshape(-1)), writes)


def plan_pin(rows: SequenceRows, prompt: Prompt) -> tuple[int, int, list[Write]]:
    """Plan a sequence of the blocks that a prompt finds, and no others: its handle, its length and the writes."""
    [row], [seq], writes = rows.handles.plan_issue(1)
    if rows.chains is None or prompt.tokens is None:
        raise ValueError("a pin keeps what can be found, and a cache with prefix_cache=False finds nothing")
    hit = rows.chains.full_blocks(prompt)
    if not hit.num_columns:
        behind = "" if rows.states is None else ", with a snapshot of the state behind it"
        raise ValueError(
            f"tokens must begin with a full block of {rows.block_size} that can be found{behind}: commit a sequence "
            f"with them first, got {len(prompt.tokens)} tokens"
        )
    writes += rows.pool._plan(gained=hit.blocks, num_seqs=1)[1]
    writes += _plan_row(rows, int(row), hit.num_tokens, hit, NO_BLOCKS.reshape(rows.num_groups, 0))
    writes += rows.chains.plan_start(int(row), hit.num_tokens, hit, prompt)
    return seq, hit.num_tokens, writes


def _num_taken(rows: SequenceRows, num_tokens: int, hit: Hit, chunk: int | None = None) -> int:
    """Free blocks that a sequence takes at the most: new ones, and found ones without references.

    With `chunk` at most so many tokens are appended at a time, and blocks come back in between: found ones too, but
    those that others use are not free then.
    """
    num_new, refs = int(rows.num_blocks(num_tokens)) - hit.num_columns, rows.pool._refs
    if chunk is None or rows.windows is None:
        return rows.num_groups * num_new + int(np.count_nonzero(refs[hit.blocks] == 0))
    found = hit.columns.reshape(rows.num_groups, -1)
    num_taken = num_new + np.count_nonzero((found != UNUSED) & (refs[found] == 0), axis=1)
    return int(np.minimum(num_taken, rows.groups.peaks(num_tokens, chunk, rows.keep)).sum())


def _plan_row(rows: SequenceRows, row: int, length: int, hit: Hit, new_blocks: Int64Array) -> list[Write]:
    """Give a free row its length, the blocks that are found, and new ones, (num_groups, n), behind them."""
    num_columns = hit.num_columns + new_blocks.shape[1]
    table, grown = rows.with_columns(num_columns)
    blocks = new_blocks if not hit.num_columns else np.concatenate([hit.columns, new_blocks], axis=1)
    blocks, entries = blocks.astype(np.int32).reshape(-1), np.arange(num_columns) + row * table.shape[1]
    if rows.num_groups > 1:
        lines = rows.lines_of(np.array([row]))
        entries = np.add.outer(lines * table.shape[1], np.arange(num_columns)).reshape(-1)
    writes = [*grown, (rows.lens, row, length), (table.reshape(-1), entries, blocks)]
    if rows.windows is not None and hit.num_columns:
        writes += rows.windows.plan(rows.lines_of(np.array([row])), hit.first)
    if rows.states is not None and hit.num_columns:
        writes += rows.states.plan_start(row, hit.columns[rows.groups.leader, -1:])
    return writes
