"""Statistics of a pool, as numbers and as a map."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ..drawing.pool_map import PoolMap
from .sequences import Sequences


@dataclass(frozen=True, slots=True)
class Stats:
    """How the blocks of a PagedKVCache are used.

    Attributes
    ----------
    num_blocks : int
        N, all blocks.
    used, free : int
        Blocks that sequences hold, and blocks that can be handed out.
    shared : int
        Used blocks with more than one reference.
    cached : int
        Free blocks whose contents can still be found by their tokens.
    used_by_group : tuple of int
        Blocks that sequences hold in each of `PagedKVCache.groups`.
    num_tokens : int
        The lengths of all sequences together; a shared token counts once for each.
    wasted_slots : int
        Slots of used blocks that hold no token of any sequence.
    contiguous_blocks : int
        Blocks that it would take to reserve the maximum length for every sequence, in all groups: contiguous memory
        keeps what windows have passed.
    queried_tokens, hit_tokens : int
        Tokens that `add` got so far, and those of them that the cache had already. A Scheduler starts a prompt with all
        its tokens, in however many chunks it computes them; tokens of `append` do not count.
    preempted_tokens, preempted_hit_tokens : int
        The same for requests that a Scheduler started again after a preemption, which mostly find their own tokens.
    num_bytes, used_bytes : int
        Bytes of all blocks, and of the used ones; where groups differ in size, with the room that some leave unused.
    num_states, used_states, cached_states : int
        Slots for states, those that sequences have, and those of other snapshots, which can be found.
    state_bytes : int
        Bytes of all states.
    tokens_without_state : int
        Of `queried_tokens` those whose blocks were found, while no snapshot was: they are computed again.
    passed_blocks : int
        Entries of block tables that windows have passed: without windows sequences would hold blocks there, too.
    """

    num_blocks: int
    used: int
    free: int
    shared: int
    cached: int
    used_by_group: tuple[int, ...]
    num_tokens: int
    wasted_slots: int
    contiguous_blocks: int
    queried_tokens: int
    hit_tokens: int
    preempted_tokens: int
    preempted_hit_tokens: int
    num_bytes: int
    used_bytes: int
    num_states: int = 0
    used_states: int = 0
    cached_states: int = 0
    state_bytes: int = 0
    tokens_without_state: int = 0
    passed_blocks: int = 0

    @classmethod
    def of(cls, sequences: Sequences, block_bytes: int, slot_bytes: int = 0) -> Stats:
        """Collect the statistics of sequences and their pool; a block has `block_bytes` bytes, a state `slot_bytes`."""
        pool, found = sequences.pool, sequences.pool._prefix_cache
        queried, hit = ([0, 0], [0, 0]) if found is None else (found.num_queried.tolist(), found.num_hit.tolist())
        used, states = pool.num_blocks - pool.num_free, sequences._rows.states
        of_states = {}
        if states is not None:
            of_states = {
                "num_states": states.num_slots,
                "used_states": states.num_used,
                "cached_states": states.num_cached,
                "state_bytes": states.num_slots * slot_bytes,
                "tokens_without_state": int(states.num_without_state[0]),
            }
        return cls(
            num_blocks=pool.num_blocks,
            used=used,
            free=pool.num_free,
            shared=pool.num_shared,
            cached=pool.num_cached,
            used_by_group=_used_by_group(sequences, used),
            num_tokens=sequences.num_tokens,
            wasted_slots=_wasted_slots(sequences),
            contiguous_blocks=len(sequences.groups) * sequences.num_seqs * sequences.max_blocks,
            queried_tokens=queried[0],
            hit_tokens=hit[0],
            preempted_tokens=queried[1],
            preempted_hit_tokens=hit[1],
            num_bytes=pool.num_blocks * block_bytes,
            used_bytes=used * block_bytes,
            passed_blocks=_passed_blocks(sequences),
            **of_states,
        )

    def to_html(self) -> str:
        """Format the numbers as an HTML table."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["used_by_group"] = " + ".join(map(str, self.used_by_group))
        return (
            f"<table>{''.join(f'<tr><th>{name}</th><td>{value}</td></tr>' for name, value in values.items())}</table>"
        )


def pool_map(sequences: Sequences) -> PoolMap:
    """The map of the pool of sequences."""
    ref_counts, found = sequences.pool.ref_counts, sequences.pool._prefix_cache
    cached = None if found is None else (ref_counts == 0) & found.is_findable(np.arange(sequences.pool.num_blocks))
    windows = tuple(group.window for group in sequences.groups)
    groups = sequences.block_groups() if len(windows) > 1 else None
    fills, block_size, slots, states = sequences.block_fills(), sequences.block_size, sequences._rows.states, ""
    if slots is not None:
        num_free = slots.num_slots - slots.num_used - slots.num_cached
        states = f"states: {slots.num_used} of sequences, {slots.num_cached} other snapshots, {num_free} free"
    return PoolMap(sequences.block_owners(), ref_counts, fills, block_size, cached, groups, windows, states)


def _passed_blocks(sequences: Sequences) -> int:
    """Entries of block tables that windows have passed."""
    rows = sequences._rows
    return 0 if rows.windows is None else rows.num_groups * int(rows.num_blocks(rows.lens).sum()) - len(rows.held()[0])


def _used_by_group(sequences: Sequences, used: int) -> tuple[int, ...]:
    """Blocks that sequences hold in each group, `used` in all."""
    num_groups = len(sequences.groups)
    if num_groups == 1:
        return (used,)
    groups = sequences.block_groups()
    return tuple(np.bincount(groups[groups >= 0], minlength=num_groups).tolist())


def _wasted_slots(sequences: Sequences) -> int:
    """Slots of used blocks that hold no token of any sequence."""
    rows, refs, block_size = sequences._rows, sequences.pool.ref_counts, sequences.block_size
    full = rows.lens // block_size
    fills = rows.lens - full * block_size
    partial = fills.nonzero()[0]  # only the last block of a sequence is partly full
    last = rows.of_lines(full.take(partial))
    blocks, fills = rows.blocks[rows.lines_of(partial), last], rows.of_lines(fills.take(partial))
    alone = refs.take(blocks) == 1
    wasted = int(np.count_nonzero(alone)) * block_size - int(fills[alone].sum())
    if not alone.all():
        # A shared block wastes the slots past its longest owner's end, unless one of its owners fills it.
        blocks, owners = np.unique(blocks[~alone], return_inverse=True)
        longest = np.zeros(len(blocks), np.int64)
        np.maximum.at(longest, owners, fills[~alone])
        all_partial = np.bincount(owners, minlength=len(blocks)) == refs[blocks]
        wasted += int((block_size - longest)[all_partial].sum())
    return wasted
