"""PrefixCache: which blocks can be found by their tokens, and by those before them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import islice
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...commit import Write
from ..arguments import require_callable
from ..groups import LayerGroups
from ..ids import NO_BLOCKS, Int64Array, joined, must_hold
from .digests import Digests, Hash, blake2b_128, checked_hash, hash_chain, hash_each, pack
from .events import AllBlocksCleared, Event, Listener
from .eviction import LRU, Eviction
from .holders import Held, Holders
from .index import NO_BLOCK, HashIndex
from .outbox import Outbox

MOST_TOKENS = np.iinfo(np.int32).max // np.dtype(np.int32).itemsize  # per block, whose ids NumPy views as one element
_NEGATIVE = np.int64(np.iinfo(np.int64).min)
_FEW = 16
_FASTER = 16  # a search grows its next batch by this factor as long as it finds all blocks


class StoredBlocks(NamedTuple):
    """The blocks that a commit makes findable.

    Attributes
    ----------
    kept : (n,) int64
        For each block of the commit: itself, another one with the same tokens in it and before it, or NO_BLOCK.
    blocks, serials, parents : (m,) int64
        The blocks to store, and the numbers of their contents and of the contents before them.
    above : (m,) int64
        The block before each of them, or NO_BLOCK.
    digests : (m,) DIGEST
    places : (m,) int64
        Their slots in the index.
    forgotten : (k,) int64
        Unused blocks with one of these digests but other contents, which become unfindable.
    held : Held or None
        The blocks of all groups of layers; None if there is one group.
    events : list of BlockStored
    """

    kept: Int64Array
    blocks: Int64Array
    serials: Int64Array
    parents: Int64Array
    above: Int64Array
    digests: Digests
    places: Int64Array
    forgotten: Int64Array
    held: Held | None
    events: list[Event]


class PrefixCache:
    """The tokens of all blocks, and an index of the full ones that can be found.

    With several groups of layers the blocks of one, the leader, are in the index; `Holders` has those of the others.

    The key of a block is a digest of its tokens, chained to the digest of the block before. Digests may collide: a
    block counts as found only if it holds the same token ids, and was stored behind the very block found before it, or
    behind the same root.

    Parameters
    ----------
    num_blocks, block_size : int
        N and P.
    groups : LayerGroups
    eviction : callable
        Makes the `Eviction` for num_blocks blocks.
    hash_of : callable
        Bytes to a digest of 16 bytes.
    listener : callable or None
        Called with each event, after the change that it reports.
    medium : str
        The medium that events name: where the caches are.
    has_states : bool
        Whether sequences have states, of which events tell, too.

    Attributes
    ----------
    outbox : Outbox or None
        Events that are yet to be delivered; None without a listener.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: LayerGroups,
        *,
        eviction: Callable[[int], Eviction] = LRU,
        hash_of: Hash = blake2b_128,
        listener: Listener | None = None,
        medium: str = "CPU",
        has_states: bool = False,
    ) -> None:
        require_callable("eviction", eviction, "a class such as LRU, or a function of num_blocks")
        require_callable("hash_of", hash_of, "a function of bytes")
        if listener is not None:
            require_callable("events", listener, "a function of an event, or None")
        require_block_size(block_size)
        self.block_size = block_size
        self.eviction = eviction(num_blocks)
        self.tokens = np.zeros(num_blocks * block_size, np.int32)
        self._contents = self.tokens.view(f"V{block_size * self.tokens.itemsize}")
        # Two counts each: for prompts, and for requests that start again after a preemption.
        self.num_queried, self.num_hit = np.zeros((2, 2), np.int64)
        self._index = HashIndex(num_blocks)
        # Stored contents are numbered from 1; blocks that cannot be found have 0. The parent of a first block is
        # a negative number made of its root digest.
        self._serials, self._parents = np.zeros(num_blocks, np.int64), np.zeros(num_blocks, np.int64)
        self._last_serial = np.array([0])
        # The block last stored behind each block; by now it may hold something else. The last entry is NO_BLOCK's.
        self._last_child = np.full(num_blocks + 1, NO_BLOCK)
        # 1 once a sequence has held a findable block without the one before it; see `plan_adopted`.
        self._are_adopted = np.array([0])
        self._hash_of = hash_of if hash_of is blake2b_128 else checked_hash(hash_of)
        self.outbox = None
        if listener is not None:
            self.outbox = Outbox(listener, medium, groups, block_size, has_states=has_states)
        # The number that the contents of each block had when its snapshot was told; there is no other content 0.
        self._told_states = np.zeros(num_blocks if has_states else 0, np.int64)
        self._groups = groups
        self._holders = Holders(groups, num_blocks) if len(groups.groups) > 1 else None
        # A window passes most blocks of a long prompt, and few prompts find one again: those that none has found are
        # evicted before all others, else each long prompt would push out the beginnings that others share. The order of
        # a caller's eviction is the caller's alone.
        self._evicted_first = LRU(num_blocks) if groups.has_windows and type(self.eviction) is LRU else None
        # Which blocks a second sequence has found.
        self._found_again = np.zeros(0 if self._evicted_first is None else num_blocks, np.bool)

    def is_findable(self, blocks: Int64Array) -> npt.NDArray[np.bool]:
        """Which blocks can be found, (n,) bool."""
        return self._serials.take(blocks) != 0

    def serials(self, blocks: Int64Array) -> Int64Array:
        """The numbers of the contents of blocks, (n,) int64; 0 for those that cannot be found."""
        return self._serials.take(blocks)

    def descendants(self, blocks: Int64Array) -> Int64Array:
        """The other blocks that can only be found behind some of these, or with them, in O(N log N); (n,) int64."""
        leaders = blocks if self._holders is None else blocks[self._holders.are_leaders(blocks)]
        behind = self._behind(leaders)
        return joined(behind, self.holding_with(joined(blocks, behind)))

    def lost_with(self, evicted: Int64Array) -> Int64Array:
        """The other blocks that can no longer be found when LRU evicts some, (n,) int64.

        It evicts the last blocks of a text first, so that there are none behind them but adopted ones.
        """
        return self.descendants(evicted) if self._are_adopted[0] else self.holding_with(evicted)

    def plan_adopted(self) -> list[Write]:
        """Note that sequences hold a findable block that another one has stored behind a block that they do not hold.

        A fork that commits may take another block in place of one, and store those behind it, which its siblings have,
        too. These do not keep the block that it took.
        """
        return [(self._are_adopted, 0, 1)]

    def holding_with(self, blocks: Int64Array) -> Int64Array:
        """The other blocks that can only be found with those of the leading group among these, (n,) int64."""
        if self._holders is None:
            return NO_BLOCKS
        columns = self.columns(blocks[self._holders.are_leaders(blocks)])
        others = columns[columns != NO_BLOCK]
        return others[~np.isin(others, blocks)]

    def _behind(self, blocks: Int64Array) -> Int64Array:
        """The other blocks of the leading group that can only be found behind some of its blocks."""
        if not self._groups.leader_is_full:
            return NO_BLOCKS  # sequences that have passed blocks go on: what is behind a gap is just not found
        # Mostly there are none, and for a few blocks that is quick to see.
        if len(blocks) <= _FEW and not any(np.count_nonzero(self._parents == x) for x in self._serials[blocks]):
            return NO_BLOCKS
        given = np.zeros(len(self._serials), np.bool)
        given[blocks] = True
        findable = self._leaders()
        findable = findable[self._serials[findable].argsort()]
        places, parents, lost = np.arange(len(findable)), self._parents[findable], given[findable]
        above = np.where(parents > 0, self._serials[findable].searchsorted(parents), places)
        while True:  # pointer doubling: each turn looks twice as far up
            lost |= lost[above]
            if np.array_equal(above, above[above]):
                return findable[lost & ~given[findable]]
            above = above[above]

    def columns(self, blocks: Int64Array) -> Int64Array:
        """Add the blocks of the other groups to blocks of the leader, (num_groups, n); NO_BLOCK where there is none."""
        return blocks[None] if self._holders is None else self._holders.of(blocks, self._serials)

    def plan_found(self, blocks: Int64Array) -> list[Write]:
        """Note that another sequence has found blocks: once windows pass them, they wait longer for their eviction."""
        return [] if self._evicted_first is None else [(self._found_again, blocks, np.ones(len(blocks), np.bool))]

    def plan_enter(self, blocks: Int64Array, passed: bool) -> list[Write]:
        """Let findable blocks without references wait for their eviction; `passed` ones are those of a window."""
        if not passed or self._evicted_first is None:
            return self.eviction.plan_enter(self._tails_first(blocks))
        again = self._found_again[blocks]
        others = self.eviction.plan_enter(self._tails_first(blocks[again])) if np.count_nonzero(again) else []
        return [*others, *self._evicted_first.plan_enter(blocks[~again])]

    def plan_leave(self, blocks: Int64Array, num_evicted: int) -> tuple[Int64Array, list[Write]]:
        """Let blocks that are used again wait no longer, and evict others."""
        if self._evicted_first is None:
            return self.eviction.plan_leave(blocks, num_evicted)
        first, writes = self._evicted_first.plan_leave(blocks, num_evicted)
        others, more = self.eviction.plan_leave(blocks, num_evicted - len(first))
        return joined(first, others), [*writes, *more]

    def _tails_first(self, blocks: Int64Array) -> Int64Array:
        """Sort findable blocks so that those of a sequence come from its last one to its first."""
        return blocks[np.argsort(-self._serials[blocks], kind="stable")]

    def find(self, tokens: npt.NDArray[np.int32], root: bytes) -> Int64Array:
        """Find the blocks that hold the first tokens of a sequence, as far as they are cached; (n,) int64.

        Parameters
        ----------
        tokens : (num_tokens,) int32
        root : bytes
            The digest of its salt.
        """
        num_full = len(tokens) // self.block_size
        if not num_full:
            return NO_BLOCKS
        rows = tokens[: num_full * self.block_size].reshape(num_full, self.block_size)
        block = self._index.find_one(self._hash_of(root + rows[0].tobytes()))
        if block == NO_BLOCK:
            return NO_BLOCKS
        blocks, above, more = NO_BLOCKS, _root_numbers(pack([root])), _FASTER
        while block != NO_BLOCK:
            run = self._last_descendants(block, min(more, num_full - len(blocks)))
            matching = self._until_mismatch(run, above, rows[len(blocks) :])
            blocks = np.concatenate([blocks, matching])
            if len(matching) < len(run) or len(blocks) == num_full:
                break
            block, above, more = int(self._last_child[blocks[-1]]), self._serials.take(blocks[-1:]), more * _FASTER
        more = 1
        while 0 < len(blocks) < num_full:
            above, behind = blocks[-1:], rows[len(blocks) : len(blocks) + more]
            contents = behind.view(self._contents.dtype).reshape(-1).tolist()
            digests = hash_chain(self._hash_of, self._index.digests(above).tobytes(), contents)
            found, _ = self._index.find(pack(digests))
            matching = self._until_mismatch(found, self._serials.take(above), behind)
            blocks = np.concatenate([blocks, matching])
            if len(matching) < len(found):
                break
            more *= _FASTER
        return blocks

    def _last_descendants(self, block: int, most: int) -> Int64Array:
        """A block and the chain of blocks last stored behind it, which covers all of a repeated text."""
        run, behind = array("q", [block]), self._last_child.data
        while len(run) < most and (block := behind[block]) != NO_BLOCK:
            run.append(block)
        return np.frombuffer(run, np.int64)

    def _until_mismatch(self, blocks: Int64Array, parent: Int64Array, rows: npt.NDArray[np.int32]) -> Int64Array:
        """Cut blocks off at the first that cannot be found, does not follow the one before, or holds other tokens."""
        serials, rows = self._serials.take(blocks), rows[: len(blocks)]
        follows = self._parents.take(blocks) == np.concatenate([parent, serials[:-1]])
        follows &= (serials != 0) & (blocks != NO_BLOCK)
        same = self._rows().take(blocks, axis=0) == rows
        if np.count_nonzero(same) == same.size and np.count_nonzero(follows) == len(blocks):
            return blocks
        return blocks[: int(np.append(follows & same.all(axis=1), False).argmin())]

    def find_part(self, block: int, tokens: npt.NDArray[np.int32]) -> tuple[int, int]:
        """Find a block behind another one that begins with some of these tokens: the block, and how many it has.

        Only the block stored last is looked at: where many texts share a beginning, every block behind it holds the
        rest of that beginning.
        """
        behind = int(self._last_child[block])
        if behind == NO_BLOCK or not self._serials[behind] or self._parents[behind] != self._serials[block]:
            return NO_BLOCK, 0
        most = min(len(tokens), self.block_size - 1)
        same = self._rows()[behind, :most] == tokens[:most]
        return behind, most if same.all() else int(same.argmin())

    def to_store(
        self,
        blocks: Int64Array,
        counts: Int64Array | None,
        above: Int64Array,
        roots: Digests | None,
        salts: npt.NDArray[np.object_] | None,
        refs: npt.NDArray[np.int32],
        own: Int64Array | None = None,
    ) -> StoredBlocks:
        """Decide what to store so that full blocks of some sequences can be found.

        Parameters
        ----------
        blocks : (n,) int64
            The blocks of the first sequence in order, then those of the next.
        counts : (num_seqs,) int64, or None
            How many each sequence has, at least 1; None for one each.
        above : (num_seqs,) int64
            The block before the first of them, which can be found, or NO_BLOCK.
        roots : (num_seqs,) DIGEST, or None
            The root digest of each sequence; None if all have a block before.
        salts : (num_seqs,) object, or None
            The salt of each sequence, for events; None with `roots`.
        refs : (N,) int32
            References to each block.
        own : (num_groups, n) int64, or None
            The blocks of all groups, if there are several; negative where a window has passed them.
        """
        last = int(self._last_serial[0])
        heads, parents_above = self._index.digests(above), self._serials.take(above)
        if roots is not None:
            is_first = above == NO_BLOCK
            np.copyto(heads, roots, where=is_first)
            np.copyto(parents_above, _root_numbers(roots), where=is_first)
        contents, digests = self._contents.take(blocks).tolist(), []
        if counts is None:
            digests = hash_each(self._hash_of, map(add, heads.tolist(), contents))
            firsts, parents, blocks_above = np.arange(len(blocks)), parents_above, above
        else:
            firsts, behind = counts.cumsum() - counts, iter(contents)
            for head, count in zip(heads.tolist(), counts.tolist(), strict=True):
                digests += hash_chain(self._hash_of, head, islice(behind, count))
            parents, blocks_above = np.arange(last, last + len(blocks)), np.concatenate([above[:1], blocks[:-1]])
            parents[firsts], blocks_above[firsts] = parents_above, above
        serials = kept_serials = np.arange(last + 1, last + 1 + len(blocks))
        keys, chosen, kept, forgotten = pack(digests), None, blocks, NO_BLOCKS
        found, places = self._index.find(keys)
        are_distinct = self._index.are_distinct(places)  # implies that the digests differ, too
        if found[found.argmax()] != NO_BLOCK or not (are_distinct or len({*digests}) == len(digests)):
            heads_of = zip(above.tolist(), parents_above.tolist(), strict=True)
            of_first = dict(zip(firsts.tolist(), heads_of, strict=True))
            chosen, kept, kept_serials, parents, blocks_above, forgotten = self._resolve(
                blocks, of_first, digests, found.tolist(), contents, refs
            )
            serials, are_distinct = serials[: len(chosen)], False
        held = None
        if self._holders is not None and own is not None:
            held = self._holders.hold(own, kept, kept_serials, keys, self._serials, chosen is None)
        events: list[Event] = []
        if self.outbox is not None:
            by_group = {self._groups.leader: np.arange(len(blocks)) if chosen is None else chosen}
            if held is not None:
                by_group |= {g: is_new.nonzero()[0] for g, is_new in enumerate(held.is_new) if is_new.any()}
            digests_above = [None if x == NO_BLOCK else head for x, head in zip(above, heads.tolist(), strict=True)]
            tokens = self._rows()[blocks]
            events = self.outbox.stored(by_group, tokens, digests, firsts.tolist(), digests_above, salts)
        to_store = blocks
        if chosen is not None:
            to_store, keys, places = blocks.take(chosen), keys.take(chosen), places.take(chosen)
        if not are_distinct:  # after _resolve: forks that share a block may outnumber the slots, but have one digest
            places = self._index.distinct_slots(places)
        return StoredBlocks(kept, to_store, serials, parents, blocks_above, keys, places, forgotten, held, events)

    def _resolve(
        self,
        blocks: Int64Array,
        firsts: dict[int, tuple[int, int]],
        digests: list[bytes],
        found: list[int],
        contents: list[bytes],
        refs: npt.NDArray[np.int32],
    ) -> tuple[Int64Array, ...]:
        """Decide block by block where another block may have the same digest.

        `firsts` has the block before the first one of each sequence, and its parent. Returns the indices of the blocks
        to store, `kept` of `StoredBlocks` and the serials of these, and its `parents`, `above` and `forgotten`.
        """
        kept, kept_serials = [NO_BLOCK] * len(found), [0] * len(found)
        chosen, parents, blocks_above, forgotten = [], [], [], []
        owners: dict[bytes, tuple[int, int, int]] = {}  # of each digest: a block, its parent and serial
        serial, above, parent, stopped = int(self._last_serial[0]), NO_BLOCK, 0, False
        for i, block in enumerate(blocks.tolist()):
            if i in firsts:
                (above, parent), stopped = firsts[i], False
            if stopped:
                continue
            owner, content = owners.get(digests[i]), contents[i]
            if owner is None and found[i] != NO_BLOCK:
                other = found[i]
                owner = other, int(self._parents[other]), int(self._serials[other])
                if not refs[other] and not self._has(owner, parent, content):
                    forgotten.append(other)
                    owner = None
            if owner is None:
                serial += 1
                owner = block, parent, serial
                chosen.append(i)
                parents.append(parent)
                blocks_above.append(above)
            # If the digest belongs to other contents that are in use, nothing further of this sequence can be found.
            stopped = not self._has(owner, parent, content)
            if not stopped:
                owners[digests[i]] = owner
                above, _, parent = owner
                kept[i], kept_serials[i] = above, parent
        return tuple(np.array(x, np.int64) for x in (chosen, kept, kept_serials, parents, blocks_above, forgotten))

    def plan(self, removed: Int64Array, stored: StoredBlocks | None = None) -> list[Write]:
        """Make the blocks `removed`, each named once, unfindable, and those of `stored` findable."""
        events: list[Event] = []
        if self.outbox is not None and len(removed):
            if len(self._told_states):
                events += self._states_removed(removed[self._told_states[removed] == self._serials[removed]])
            groups = np.zeros_like(removed) if self._holders is None else self._holders.group_of[removed]
            events += self.outbox.removed(self._index.digests(removed), groups)
        writes: list[Write] = [(self._serials, removed, np.zeros(len(removed), np.int64))] if len(removed) else []
        if self._holders is not None:
            removed = removed[self._holders.are_leaders(removed)]
        if stored is None:
            writes += self._index.plan(removed, removed[:0])
        else:
            events += stored.events
            last = int(self._last_serial[0]) + len(stored.blocks)
            writes += [
                *self._index.plan(removed, stored.blocks, stored.digests, stored.places),
                (self._serials, stored.blocks, stored.serials),
                (self._parents, stored.blocks, stored.parents),
                (self._last_child, stored.above, stored.blocks),
                (self._last_serial, 0, last),
            ]
            findable = stored.blocks
            if self._holders is not None and (held := stored.held) is not None:
                leading = np.full(len(findable), self._groups.leader)
                others, i = held.blocks[held.is_new], held.is_new.nonzero()[1]
                writes += [
                    (self._holders.group_of, findable, leading),
                    *self._holders.plan(held),
                    *self._index.plan_name(others, held.digests.take(i)),
                    (self._serials, others, held.serials[i]),
                    (self._parents, others, np.zeros(len(others), np.int64)),  # nobody finds it behind what it followed
                ]
                findable = np.concatenate([findable, others])
            if self._evicted_first is not None:
                writes.append((self._found_again, findable, np.zeros(len(findable), np.bool)))
        return writes if self.outbox is None or not events else [*writes, *self.outbox.plan(events)]

    def plan_tell_states(
        self,
        lost: Int64Array,
        blocks: Int64Array = NO_BLOCKS,
        above: Int64Array = NO_BLOCKS,
        salts: npt.NDArray[np.object_] | None = None,
    ) -> list[Write]:
        """Tell which snapshots can be found no more, and which from now on, each by its block of the leading group.

        `above` has the block before each of `blocks`, negative at the beginning of a sequence, and `salts` the salt.
        """
        if self.outbox is None or not len(lost) + len(blocks):
            return []
        heads = [None if x < 0 else head for x, head in zip(above, self._index.digests(above).tolist(), strict=True)]
        by_group, digests = {self.outbox.group_of_states: np.arange(len(blocks))}, self._index.digests(blocks).tolist()
        events = self._states_removed(lost)
        events += self.outbox.stored(by_group, self._rows()[blocks], digests, [*range(len(blocks))], heads, salts)
        return [
            (self._told_states, lost, np.zeros_like(lost)),
            (self._told_states, blocks, self._serials[blocks]),
            *self.outbox.plan(events),
        ]

    def _states_removed(self, blocks: Int64Array) -> list[Event]:
        assert self.outbox is not None
        return self.outbox.removed(self._index.digests(blocks), np.full(len(blocks), self.outbox.group_of_states))

    def plan_cleared(self) -> list[Write]:
        """Replace the events of earlier writes, which remove all blocks, by one AllBlocksCleared."""
        return [] if self.outbox is None else self.outbox.plan([AllBlocksCleared()])

    def findable(self) -> Int64Array:
        """The blocks that can be found, ascending, (n,) int64."""
        return np.flatnonzero(self._serials)

    def _leaders(self) -> Int64Array:
        """Those of them that lead."""
        findable = self.findable()
        return findable if self._holders is None else findable[self._holders.are_leaders(findable)]

    def plan_copy(self, copies: Int64Array) -> list[Write]:
        """Copy the tokens of blocks to others: (m, 2) int64, source and destination."""
        sources, destinations = copies.T.copy()
        return [(self._contents, destinations, self._contents.take(sources))]

    def plan_tokens(self, blocks: Int64Array, tokens: npt.NDArray[np.int32]) -> list[Write]:
        """Put tokens into new blocks, which they fill except perhaps the last."""
        room = len(blocks) * self.block_size - len(tokens)
        if room:
            tokens = np.concatenate([tokens, np.zeros(room, np.int32)])
        return [(self._contents, blocks, tokens.view(self._contents.dtype))]

    def plan_count(self, num_queried: int, num_hit: int, *, preempted: bool) -> list[Write]:
        """Count tokens that `add` looked for and found; those of preempted requests separately."""
        return [
            (self.num_queried, int(preempted), int(self.num_queried[int(preempted)]) + num_queried),
            (self.num_hit, int(preempted), int(self.num_hit[int(preempted)]) + num_hit),
        ]

    def check(self, refs: npt.NDArray[np.int32]) -> None:
        """Raise AssertionError unless every invariant holds; `refs` are the reference counts of all blocks."""
        findable = self.findable()
        waiting = findable[refs[findable] == 0]
        if self._evicted_first is not None:
            first = np.sort(self._evicted_first.waiting())
            self._evicted_first.check(first)
            waiting = np.setdiff1d(waiting, first)
        self.eviction.check(waiting)
        others, findable = findable, self._leaders()
        self._index.check(findable)
        serials = self._serials[findable]
        must_hold(len(np.unique(serials)) == len(serials), "two contents have one number")
        must_hold((serials <= self._last_serial[0]).all(), "a content has a number that was not given out yet")
        parents = self._parents[findable]
        must_hold((parents < serials).all(), "a content is older than the one before it")
        lost = (parents >= 0) & ~np.isin(parents, serials)
        if not self._groups.leader_is_full:
            lost &= parents == 0  # others may be gone since a window has passed them
        must_hold(not lost.any(), "a block can be found, and the one before it cannot")
        columns = self.columns(findable)
        must_hold(
            np.array_equal(np.sort(columns[columns != NO_BLOCK]), others),
            "a block waits to be found that no block of the leading group leads to",
        )

    def check_ends(self, blocks: Int64Array, counts: Int64Array) -> None:
        """Raise AssertionError unless each of these blocks leads, and is as far from the first one as `counts` says."""
        must_hold(self._holders is None or self._holders.are_leaders(blocks).all(), "a snapshot is of another group")
        if not self._groups.leader_is_full:
            return  # the way to a block may have gaps
        leaders = self._leaders()
        above = dict(zip(self._serials[leaders].tolist(), self._parents[leaders].tolist(), strict=True))
        for block, count in zip(blocks.tolist(), counts.tolist(), strict=True):
            serial = int(self._serials[block])
            for _ in range(count):
                must_hold(serial > 0, "a snapshot stands for more tokens than its block")
                serial = above[serial]
            must_hold(serial < 0, "a snapshot stands for fewer tokens than its block")

    def follows(self, columns: Int64Array, root: bytes) -> bool:
        """Whether the first columns of a sequence can be found one behind another, and all groups have the same tokens.

        Parameters
        ----------
        columns : (num_groups, num_columns) int64
            Its blocks; NO_BLOCK where a window has passed them.
        root : bytes
            The digest of its salt. What it has passed is followed up to there as far as that can still be found.
        """
        leaders = columns[self._groups.leader]
        num_above = int(np.count_nonzero(leaders == NO_BLOCK))
        leaders, columns = leaders[num_above:], columns[:, num_above:]
        serials, parents = self._serials[leaders], self._parents[leaders]
        held, same = columns != NO_BLOCK, self._serials[columns] == serials
        if self._holders is not None:
            same &= self._holders.group_of[columns] == np.arange(len(columns))[:, None]
        if not (serials.all() and same[held].all() and (parents[1:] == serials[:-1]).all()):
            return False
        if not len(leaders):
            return True
        parent, others = int(parents[0]), self._leaders() if num_above else NO_BLOCKS
        parent_of = dict(zip(self._serials[others].tolist(), self._parents[others].tolist(), strict=True))
        while num_above and parent in parent_of:
            parent, num_above = parent_of[parent], num_above - 1
        return parent > 0 if num_above else parent == int(_root_numbers(pack([root]))[0])

    def _rows(self) -> npt.NDArray[np.int32]:
        return self.tokens.reshape(-1, self.block_size)

    def _has(self, owner: tuple[int, int, int], parent: int, content: bytes) -> bool:
        block, its_parent, _ = owner
        return its_parent == parent and self._rows()[block].tobytes() == content


def require_block_size(block_size: int) -> None:
    """Raise ValueError for blocks whose tokens cannot be compared."""
    if block_size > MOST_TOKENS:
        raise ValueError(f"block_size must be at most {MOST_TOKENS} with a prefix cache, got {block_size}")


def _root_numbers(roots: Digests) -> Int64Array:
    """A negative number for each root digest, (n,) int64."""
    return np.asarray(roots.view(np.int64)[::2] | _NEGATIVE)
