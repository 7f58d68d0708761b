"""StateSlots: which slot holds the state of each sequence, and which slots are snapshots that prompts can find."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..commit import Write
from .groups import LayerGroups
from .ids import NO_BLOCKS, Int64Array, Tally, must_hold
from .prefix.cache import PrefixCache
from .prefix.hit import NO_HIT, Hit
from .prefix.index import NO_BLOCK

NO_SLOT = -1
_NO_ROW, _ENDED = -1, -2
_BEING_WRITTEN = -1  # a length


class WritePlan(NamedTuple):
    """Where the new states of sequences go.

    Attributes
    ----------
    slots : (num_seqs,) int64
    begin, end : list
        What to store before the states are written to these slots, and after it.
    """

    slots: Int64Array
    begin: list[Write]
    end: list[Write]


class StateSlots:
    """Slots for the states of sequences, which are managed as blocks are: shared, copied on write, found by tokens.

    A state is what layers without K and V keep of a sequence's tokens. Each row refers to one slot at most, and several
    may share one. A step reads the slots of its rows and writes each new state in place if nobody else needs the old
    one, otherwise to another slot.

    A snapshot is a slot whose state stands for full blocks. The block of the leading group that ends there names it,
    together with the number of that block's contents, so that it is gone when the block can be found no more. A
    snapshot that no row refers to gives way when another slot is needed. So one slot for each row is always enough.

    Methods called `plan_...` change nothing: they return what to store.

    Parameters
    ----------
    num_slots, max_seqs : int
        There are at least as many slots as rows.
    block_size : int
        P.
    prefix_cache : PrefixCache or None
        Without one there are no snapshots.

    Attributes
    ----------
    of_row : (max_seqs,) int64
        The slot of each row, or NO_SLOT.
    lens : (num_slots,) int64
        How many tokens the state in each slot stands for; -1 while it is being written, so that an interrupt shows.
    num_without_state : (1,) int64
        Tokens of prompts whose blocks were found, while no snapshot was.
    """

    def __init__(self, num_slots: int, max_seqs: int, block_size: int, prefix_cache: PrefixCache | None) -> None:
        self._cache, self._block_size, self._tally = prefix_cache, block_size, Tally(num_slots)
        self.of_row = np.full(max_seqs, NO_SLOT)
        self.lens = np.zeros(num_slots, np.int64)
        self._blocks, self._serials = np.full(num_slots, NO_BLOCK), np.zeros(num_slots, np.int64)
        # When a snapshot was taken or found, in snapshots that took no other's place, and whether it was ever found.
        self._used, self._was_found = np.zeros(num_slots, np.int64), np.zeros(num_slots, np.bool)
        self._clock, self.num_without_state = np.array([0]), np.array([0])
        # The row whose next snapshot takes the place of this one: _NO_ROW if none does, _ENDED if that row has ended.
        self._moves_with = np.full(num_slots, _NO_ROW)
        # The row that alone went on from what an ended one had left, as the next turn of a chat does: once that row
        # leaves a snapshot, this one gives way first.
        self._heirs = np.full(num_slots, _NO_ROW)

    @property
    def num_slots(self) -> int:
        """All slots."""
        return len(self.lens)

    @property
    def num_used(self) -> int:
        """Slots that a row refers to."""
        return int(np.count_nonzero(self._refs))

    @property
    def num_cached(self) -> int:
        """Snapshots that no row refers to."""
        return int(np.count_nonzero(self.are_snapshots & (self._refs == 0)))

    @property
    def are_snapshots(self) -> npt.NDArray[np.bool]:
        """Which slots prompts can find, (num_slots,) bool."""
        if self._cache is None:
            return np.zeros(self.num_slots, np.bool)
        return (self._blocks != NO_BLOCK) & (self._cache.serials(self._blocks) == self._serials)

    @property
    def _refs(self) -> Int64Array:
        """How many rows refer to each slot."""
        return np.bincount(self.of_row + 1, minlength=self.num_slots + 1)[1:]

    def lens_of(self, rows: Int64Array) -> Int64Array:
        """How many tokens the state of each row stands for, 0 if it has none, -1 if writing it was interrupted."""
        slots = self.of_row[rows]
        return np.where(slots == NO_SLOT, 0, self.lens[slots])

    def at(self, blocks: Int64Array) -> Int64Array:
        """The snapshot that each block of the leading group names, (n,) int64, or NO_SLOT."""
        slots = self.are_snapshots.nonzero()[0]
        same = np.ones((len(blocks), len(slots) + 1), np.bool)  # behind all others, NO_SLOT
        same[:, :-1] = self._blocks[slots] == blocks[:, None]
        return np.append(slots, NO_SLOT)[same.argmax(axis=1)]

    def along(self, chain: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The snapshots along a chain of blocks of the leading group: how many blocks, ascending, and the slots."""
        slots = self.are_snapshots.nonzero()[0]
        counts = self.lens[slots] // self._block_size
        reached = counts <= len(chain)
        slots, counts = slots[reached], counts[reached]
        there = chain[counts - 1] == self._blocks[slots]
        order = counts[there].argsort()
        return counts[there][order], slots[there][order]

    def longest(self, groups: LayerGroups, found: Int64Array) -> Hit:
        """The longest hit that ends at a snapshot, with `found`, (num_groups, n), as in `Hit.of`."""
        for num_columns in self.along(found[groups.leader])[0][::-1].tolist():
            num_tokens = num_columns * self._block_size
            if (hit := Hit.of(groups, found[:, :num_columns], num_tokens, NO_BLOCKS)) is not None:
                return hit
        return NO_HIT

    def plan_start(self, row: int, last: Int64Array) -> list[Write]:
        """Let a row begin with the snapshot that a block names, (1,) int64."""
        slot, clock = self.at(last), int(self._clock[0]) + 1
        inherits = bool(self._moves_with[slot[0]] == _ENDED and not self._was_found[slot[0]])
        return [
            (self.of_row, row, int(slot[0])),
            (self._heirs, slot, np.array([row if inherits else _NO_ROW])),
            (self._was_found, slot, np.ones(1, np.bool)),
            (self._used, slot, np.array([clock])),
            (self._clock, 0, clock),
        ]

    def plan_count(self, num_tokens: int) -> list[Write]:
        """Count tokens whose blocks were found, while no snapshot was."""
        return [(self.num_without_state, 0, int(self.num_without_state[0]) + num_tokens)]

    def plan_copy(self, rows: Int64Array, sources: Int64Array) -> list[Write]:
        """Let each row refer to the slot of another one."""
        return [(self.of_row, rows, self.of_row[sources])]

    def plan_end(self, rows: Int64Array) -> list[Write]:
        """Let the snapshots that rows leave behind stay."""
        slots, inherited = np.isin(self._moves_with, rows).nonzero()[0], np.isin(self._heirs, rows).nonzero()[0]
        return [
            (self._moves_with, slots, np.full(len(slots), _ENDED)),
            (self._heirs, inherited, np.full(len(inherited), _NO_ROW)),
        ]

    def plan_shorten(self, rows: Int64Array, lens: Int64Array, ends: Int64Array) -> list[Write]:
        """Cut each row down to `lens` tokens.

        Where its state stands for more or is lost, it goes back to the snapshot of these tokens that its block at the
        new end, `ends`, names; a lost one stays lost if there is none, as where an append is undone.
        """
        slots, stands_for = self.of_row[rows], self.lens_of(rows)
        back = (stands_for > lens) | (stands_for == _BEING_WRITTEN)
        if np.count_nonzero(back):
            found = self.at(ends[back])
            slots[back] = np.where(self.lens[found] == lens[back], found, slots[back])  # the block may have more tokens
        slots[lens == 0] = NO_SLOT
        return [(self.of_row, rows, slots)]

    def plan_write(self, rows: Int64Array, lens: Int64Array) -> WritePlan:
        """Choose the slots to which the states of distinct rows are written, which stand for `lens` tokens then.

        A slot that no row needs any more is written in place. Its snapshot moves out of the way, to say so: the row
        takes another slot, as long as there is one that is free or has an older snapshot.
        """
        slots, refs, snapshots = self.of_row[rows], self._refs, self.are_snapshots
        owned = (slots != NO_SLOT).nonzero()[0]
        last, counts = self._tally(slots[owned])
        in_place = np.zeros(len(rows), np.bool)
        # Of several owners the last one writes in place, if no other row refers to the slot.
        in_place[owned] = (counts[last] == refs[slots[owned]]) & (last == np.arange(len(owned)))
        unused = (refs == 0).nonzero()[0]
        # Found ones stay longer, as if taken a snapshot for each slot later: not for ever, or they would fill all.
        age = self._used[unused] + self._was_found[unused] * self.num_slots
        unused = unused[np.lexsort((age, snapshots[unused]))]
        kept = (in_place & snapshots[slots]).nonzero()[0]
        num_spare = len(unused) - np.count_nonzero(~in_place)
        in_place[kept[np.argsort(~self._was_found[slots[kept]], kind="stable")][:num_spare]] = False
        moving = (~in_place).nonzero()[0]
        slots[moving] = unused[: len(moving)]
        ends = [(self.lens, slots, lens), (self.of_row, rows, slots)]
        # Nobody must find a state that is half written.
        begin = [(self._blocks, slots, np.full(len(slots), NO_BLOCK)), (self.lens, slots, np.full(len(slots), -1))]
        if self._cache is not None:
            begin += self._cache.plan_tell_states(self._blocks[slots[snapshots[slots]]])
        return WritePlan(slots, begin, ends)

    def plan_snapshots(
        self,
        rows: Int64Array,
        blocks: Int64Array,
        above: Int64Array,
        salts: npt.NDArray[np.object_],
        lasting: npt.NDArray[np.bool],
    ) -> list[Write]:
        """Let prompts find the states of rows.

        Parameters
        ----------
        rows : (n,) int64
            Rows whose states stand for full blocks that can be found.
        blocks : (n,) int64
            The block of the leading group at the end of each.
        above : (n,) int64
            The block before that, negative at the beginning of a sequence.
        salts : (n,) object
            The salt of each row, for events.
        lasting : (n,) bool
            Whether the snapshot stays when the row leaves its next one; else only if a prompt has found it by then.
        """
        if self._cache is None or not len(rows):
            return []
        blocks, first, which = np.unique(blocks, return_index=True, return_inverse=True)
        slots = self.at(blocks)
        are_new = slots == NO_SLOT
        slots = np.where(are_new, self.of_row[rows[first]], slots)
        moves_with = np.where(are_new, rows[first], self._moves_with[slots])
        moves_with[np.bincount(which, lasting, len(blocks)) > 0] = _NO_ROW
        make_way = self.are_snapshots & np.isin(self._moves_with, rows) & ~self._was_found
        were_passed = np.isin(self._heirs, rows)
        make_way[slots] = were_passed[slots] = False
        gone, passed = make_way.nonzero()[0], were_passed.nonzero()[0]
        clock = int(self._clock[0]) + max(0, int(np.count_nonzero(are_new)) - len(gone))
        return [
            (self._used, passed, np.zeros_like(passed)),
            (self._was_found, passed, np.zeros(len(passed), np.bool)),
            (self._heirs, passed, np.full(len(passed), _NO_ROW)),
            (self._blocks, gone, np.full(len(gone), NO_BLOCK)),
            (self._blocks, slots, blocks),
            (self._serials, slots, self._cache.serials(blocks)),
            (self._used, slots, np.full(len(slots), clock)),
            (self._was_found, slots, self._was_found[slots] & ~are_new),
            (self._moves_with, slots, moves_with),
            (self._heirs, slots[are_new], np.full(np.count_nonzero(are_new), _NO_ROW)),
            (self._clock, 0, clock),
            *self._cache.plan_tell_states(
                self._blocks[gone], blocks[are_new], above[first[are_new]], salts[first[are_new]]
            ),
        ]

    def check(self, lens: Int64Array, live: npt.NDArray[np.bool]) -> None:
        """Raise AssertionError unless every invariant holds; rows have `lens` tokens, and those in use are `live`."""
        slots = self.of_row
        must_hold(((slots >= NO_SLOT) & (slots < self.num_slots)).all(), "a row has a state slot that does not exist")
        must_hold((slots[~live] == NO_SLOT).all(), "a row without a sequence has a state")
        must_hold(np.count_nonzero(live) <= self.num_slots, "there are more sequences than state slots")
        has_state = (slots != NO_SLOT).nonzero()[0]
        stands_for = self.lens[slots[has_state]]
        must_hold((stands_for >= _BEING_WRITTEN).all(), "a state has no length")
        must_hold((stands_for <= lens[has_state]).all(), "a state stands for more tokens than its sequence has")
        snapshots = self.are_snapshots.nonzero()[0]
        blocks, counts = self._blocks[snapshots], self.lens[snapshots]
        must_hold(len(np.unique(blocks)) == len(blocks), "a block names two snapshots")
        must_hold(((counts > 0) & (counts % self._block_size == 0)).all(), "a snapshot ends in the middle of a block")
        for of_row in (self._moves_with, self._heirs):
            must_hold(live[of_row[of_row >= 0]].all(), "a snapshot makes way for a sequence that has ended")
        if self._cache is not None:
            self._cache.check_ends(blocks, counts // self._block_size)


def lost(seq: int) -> ValueError:
    """The error for a sequence that has lost its state."""
    return ValueError(f"the state of sequence {seq} is lost, since write_states was interrupted: truncate it")
