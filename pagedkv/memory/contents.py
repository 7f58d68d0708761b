"""What stores copy of a cache: its sequences, and the texts that prompts find in it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .ids import Int32Array, Int64Array
from .rows import SequenceRows
from .states import NO_SLOT, lost


class Contents(NamedTuple):
    """A sequence.

    Attributes
    ----------
    seq : int
        Its handle.
    slots : (num_groups, num_tokens) int64
        Where its tokens are; -1 where a window has passed one.
    tokens : (num_known,) int32
        Its first tokens, as far as their ids are known.
    num_committed : int
        How many of its first tokens are in blocks that can be found.
    num_clears : int
        As in `Chains`.
    root : bytes
        The digest of its salt; empty without a prefix cache.
    state_slot : int
        Where its state is, or NO_SLOT.
    num_computed : int
        How many of its tokens its state stands for, -1 if it is lost; all without states.
    """

    seq: int
    slots: Int64Array
    tokens: Int32Array
    num_committed: int
    num_clears: int
    root: bytes
    state_slot: int
    num_computed: int

    @classmethod
    def of(cls, rows: SequenceRows, row: int) -> Contents:
        chains, states, one, length = rows.chains, rows.states, np.array([row]), int(rows.lens[row])
        seq, slots = int(rows.handles.of(one)[0]), rows.slots(one, 0, length)
        state = (NO_SLOT, length) if states is None else (int(states.of_row[row]), int(states.lens_of(one)[0]))
        if chains is None:
            return cls(seq, slots, np.empty(0, np.int32), 0, 0, b"", *state)
        tokens = chains.cache.tokens[slots[rows.groups.leader, : chains.num_known[row]]]
        num_committed, num_clears = int(chains.num_found[row]) * rows.block_size, int(chains.num_clears[0])
        return cls(seq, slots, tokens, num_committed, num_clears, chains._roots[row].tobytes(), *state)

    @property
    def num_tokens(self) -> int:
        return self.slots.shape[1]

    def require_state(self) -> None:
        """Raise ValueError if the sequence has lost its state."""
        if self.num_computed < 0:
            raise lost(self.seq)


def found(rows: SequenceRows, ids: Int32Array, root: bytes) -> tuple[Int64Array, dict[int, int]]:
    """Where the first tokens of a text are that can be found in full blocks, and the snapshots among them.

    Returns
    -------
    (num_groups, num_tokens) int64
        Slots; negative where a group has no block.
    dict of int to int
        The slot of each snapshot, by how many tokens it stands for.
    """
    assert rows.chains is not None
    columns, size = rows.chains.cache.columns(rows.chains.cache.find(ids, root)), rows.block_size
    slots = (columns[:, :, None] * size + np.arange(size)).reshape(len(columns), -1)
    if rows.states is None:
        return slots, {}
    counts, of_states = rows.states.along(columns[rows.groups.leader])
    return slots, dict(zip((counts * size).tolist(), of_states.tolist(), strict=True))
