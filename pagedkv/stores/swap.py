"""SwapSpace: sequences whose blocks wait in a store while others need the pool."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import to_host
from ..cache import PagedKVCache
from ..errors import OutOfBlocksError
from ..memory.contents import Contents
from ..memory.device.arrays import Arrays
from ..memory.sizing import bytes_of
from ..memory.states import NO_SLOT
from .blocks import CacheBlocks
from .host import HostStore
from .patient import PatientStore
from .state_records import StateRecords
from .store import BlockStore, require_room
from .wire import BLOCK_TOKENS, Name

_AT_ONCE = 2**24  # bytes that are put at a time
_DIGEST_BYTES = 16
_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class Swapped:
    """The copy of a sequence in a store, which drops it once nobody has this object any more.

    Attributes
    ----------
    num_tokens, num_committed : int
        Its length, and how many of its first tokens are in blocks that could be found.
    tokens : (num_known,) int32
        Its first tokens, as far as their ids are known.
    num_clears : int
        As in `Chains`: after a reset of the cache, nobody may find its blocks by their tokens.
    names : list of Name
        Its wire blocks, all KV heads of each.
    state : bytes
        The digest that names the record of its state; empty without states.
    shares : tuple of Swapped
        Copies that have some of these blocks, or this state, too.
    """

    num_tokens: int
    num_committed: int
    tokens: npt.NDArray[np.int32]
    num_clears: int
    names: list[Name]
    state: bytes = b""
    shares: tuple[Swapped, ...] = ()


class SwapSpace:
    """Takes sequences out of a cache, and puts them back.

    `swap_out` and `swap_in` are for sequences that you run yourself. Their handles stay valid: a sequence that is out
    has no blocks and the length 0, and `PagedKVCache.free` ends it as any other. A :class:`~pagedkv.Scheduler` takes a
    space as `swap`, and uses `copy_out` and `copy_in`. Blocks that the store loses or damages do not come back: the
    sequence is then shorter, and its caller computes the rest again.

    States of sequences go with their blocks, and a copy ends where its state does. Both come back, or nothing does.

    Parameters
    ----------
    cache : PagedKVCache
        Its layers have no windows.
    store : BlockStore, str, int or float
        Or how much host memory to take: "2GiB", bytes, or a share of what is free, such as 0.5.
    block_tokens : int
        Tokens of a wire block.
    timeout : float
        Seconds that a call waits for the store at most.

    Attributes
    ----------
    cache : PagedKVCache

    Raises
    ------
    TypeError, ValueError
        An argument is not as described here.

    Examples
    --------
    >>> from pagedkv import PagedKVCache
    >>> from pagedkv.stores import SwapSpace
    >>> cache = PagedKVCache(num_layers=1, num_blocks=4, block_size=16, num_kv_heads=2, head_dim=8)
    >>> space = SwapSpace(cache, "1MiB")
    >>> seq, _ = cache.add(40)
    >>> space.swap_out(seq)
    True
    >>> cache.num_free
    4
    >>> space.swap_in(seq)
    [40]
    >>> cache.seq_lens(seq)
    array([40], dtype=int32)

    For the requests that a scheduler preempts:

    >>> from pagedkv import Scheduler
    >>> scheduler = Scheduler(cache, swap=space)
    """

    def __init__(
        self,
        cache: PagedKVCache,
        store: BlockStore | str | int | float,
        *,
        block_tokens: int = BLOCK_TOKENS,
        timeout: float = 2.0,
    ) -> None:
        # No other space has this model: blocks are named by chance, and not by their tokens, which may be unknown.
        model = f"swapped by {os.urandom(16).hex()}"
        self._blocks = CacheBlocks(cache, model, block_tokens=block_tokens)
        block_bytes, num_blocks = self._blocks.wire.block_bytes, self._blocks.num_heads
        self._states = StateRecords(cache, model, block_bytes) if cache.states else None
        if self._states is not None:
            num_blocks += self._states.num_parts
        if isinstance(store, (str, int, float)):
            capacity, needed = bytes_of("store", store, Arrays("numpy")), num_blocks * block_bytes
            if capacity < needed:
                what = f"{block_tokens} tokens of all KV heads" + (" and a state" if cache.states else "")
                raise ValueError(
                    f"store must have room for {needed} bytes, {what}, got {capacity}: give it more, or pass a smaller "
                    "block_tokens"
                )
            store = HostStore(capacity, block_bytes)
        require_room(store, block_bytes, num_blocks)
        self.cache = cache
        self._patient = PatientStore(store, timeout, max_pending_bytes=0)
        self._out: dict[int, Swapped] = {}

    def swap_out(self, seqs: Any) -> bool:
        """Move sequences to the store. What several of them share is stored once.

        With states, tokens behind those that a state stands for are not computed, and do not come back.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.

        Returns
        -------
        bool
            Whether the store has taken them in time; nothing has changed if not.

        Raises
        ------
        ValueError
            A sequence is named twice, is out already, or has lost its state by an interrupt.
        KeyError
            A sequence was freed, or never existed.
        """
        contents = self.cache._contents(seqs)
        handles = [one.seq for one in contents]
        self._forget_freed()
        for one in contents:
            if one.seq in self._out and not one.num_tokens:  # an interrupted call may have left it here
                raise ValueError(f"seqs must be sequences that are in the cache, got {one.seq}, which is swapped out")
        if (copies := self._store(contents)) is None:
            return False
        self._out |= dict(zip(handles, copies, strict=True))
        try:
            self.cache.truncate(handles, 0)
        except BaseException:
            for seq in handles:
                if self.cache.seq_lens(seq)[0]:
                    del self._out[seq]
            raise
        return True

    def swap_in(self, seqs: Any) -> list[int]:
        """Move sequences back from the store.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.

        Returns
        -------
        list of int
            The length of each. One that is shorter than it was has lost blocks: append and compute the rest. With
            states it is 0 then.

        Raises
        ------
        ValueError
            A sequence is named twice, is not out, or has got tokens since it is.
        KeyError
            A sequence was freed, or never existed.
        OutOfBlocksError
            Too few blocks are free. Nothing has changed.
        """
        cache = self.cache
        contents = cache._contents(seqs)
        handles = [one.seq for one in contents]
        for one in contents:
            if one.seq not in self._out:
                raise ValueError(f"seqs must be sequences that are swapped out, got {one.seq}, which is not")
            if one.num_tokens:
                raise ValueError(
                    f"seqs must be as swap_out left them, got {one.seq}, which has got tokens since: truncate it to 0"
                )
        needed = sum(-(-self._out[seq].num_tokens // cache.block_size) for seq in handles)
        if needed > (free := cache.num_free):
            raise OutOfBlocksError(
                f"{needed} blocks asked for, {free} of {cache.pool.num_blocks} are free", needed, free
            )
        deadline, lens = self._patient.deadline(), []
        for seq in handles:
            lens.append(self._append(seq, self._out[seq], deadline))
            del self._out[seq]
        return lens

    def copy_out(self, seq: int) -> Swapped | None:
        """Copy a sequence to the store, and leave it as it is.

        Returns
        -------
        Swapped or None
            What `copy_in` takes; the store drops the copy when you let go of it. None if the store has not taken it in
            time.

        Raises
        ------
        ValueError
            `seq` names no sequence, or several; or it has lost its state by an interrupt.
        KeyError
            The sequence was freed, or never existed.
        """
        contents = self.cache._contents(seq)
        if len(contents) != 1:
            raise ValueError(f"seq must be the handle of one sequence, got {len(contents)}: call copy_out for each")
        copies = self._store(contents)
        return None if copies is None else copies[0]

    def copy_in(self, seq: int, copy: Swapped) -> int:
        """Append to a sequence what a copy has behind its tokens, as far as the store still has it.

        With states it appends nothing unless the store has all of it. If an interrupt or an error comes behind the
        blocks, the sequence goes back to its longest snapshot from before, or to 0.

        Parameters
        ----------
        seq : int
            A sequence that begins as the copy does, or is empty.
        copy : Swapped
            From `copy_out`.

        Returns
        -------
        int
            The length of the sequence.

        Raises
        ------
        TypeError
            `copy` is not from `copy_out`.
        KeyError
            The sequence was freed, or never existed.
        OutOfBlocksError
            Too few blocks are free. Nothing has changed.
        """
        if not isinstance(copy, Swapped):
            raise TypeError(
                f"copy must be what copy_out has returned, got {type(copy).__name__}: compute the sequence again if "
                "the store has not taken it"
            )
        return self._append(seq, copy, self._patient.deadline())

    def __enter__(self) -> SwapSpace:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the store, and of host memory taken for it; sequences that are out cannot come back."""
        self._out.clear()
        self._patient.close()

    def _store(self, contents: list[Contents]) -> list[Swapped] | None:
        """Copy sequences to the store; None if it has not taken all of them in time."""
        size, deadline = self._blocks.wire.block_tokens, self._patient.deadline()
        # For the slots of a wire block, and for a state slot: the digest, and whose it is.
        stored: dict[bytes | int, tuple[bytes, int]] = {}
        copies: list[Swapped] = []
        for one in contents:
            one.require_state()
        for one in contents:
            num_tokens, slot = one.num_computed, one.state_slot
            slots = one.slots[0, :num_tokens]
            parts = [slots[i : i + size] for i in range(0, num_tokens, size)]
            things: list[bytes | int] = [part.tobytes() for part in parts]
            if slot != NO_SLOT:
                things.append(slot)
            stored |= {thing: (os.urandom(_DIGEST_BYTES), len(copies)) for thing in things if thing not in stored}
            digests, owners = zip(*[stored[thing] for thing in things], strict=True) if things else ((), ())
            names = [name for digest in digests[: len(parts)] for name in self._blocks.names(digest)]
            state = digests[-1] if len(things) > len(parts) else b""
            shares = tuple(copies[i] for i in {*owners} if i < len(copies))
            known = one.num_committed, one.tokens[:num_tokens], one.num_clears
            copy = Swapped(num_tokens, *known, names, state, shares)
            are_new = [owner == len(copies) for owner in owners]
            new, of_new = [*compress(parts, are_new)], [*compress(digests[: len(parts)], are_new)]
            keys = [name.key for digest in of_new for name in self._blocks.names(digest)]
            record: tuple[list[bytes], list[bytes]] = ([], [])
            if self._states is not None and state and are_new[-1]:
                record = self._states.read(slot, num_tokens, state)
            self._patient.remove_with(copy, [*keys, *record[0]])
            copies.append(copy)
            # The state last, so that it is not there without its blocks.
            if not self._put(new, of_new, deadline) or (record[0] and not self._patient.put_now(*record, deadline)):
                return None
        return copies

    def _put(self, parts: list[npt.NDArray[np.int64]], digests: list[bytes], deadline: float) -> bool:
        """Put wire blocks whose slots are given, of which only the last may be partly full."""
        at_once = max(1, _AT_ONCE // self._blocks.bytes_of_all_heads)
        for i in range(0, len(parts), at_once):
            names, blocks = self._blocks.read(np.concatenate(parts[i : i + at_once]), digests[i : i + at_once])
            if not self._patient.put_now([name.key for name in names], blocks, deadline):
                return False
        return True

    def _append(self, seq: int, copy: Swapped, deadline: float) -> int:
        """Append to a sequence what comes of a copy by the deadline; returns its length."""
        cache, size, num_heads = self.cache, self._blocks.wire.block_tokens, self._blocks.num_heads
        [there] = cache._contents([seq])
        before = start = there.num_tokens
        if start >= copy.num_tokens:
            return start
        if copy.num_clears != there.num_clears:
            copy = replace(copy, num_committed=0, tokens=_NO_TOKENS)
        state = None
        if self._states is not None:
            state = self._states.open(copy.state, copy.num_tokens, self._patient, deadline)
            if state is None:
                return start
        first = start // size
        names = copy.names[first * num_heads :]
        opened = self._blocks.open(self._patient.wait(self._patient.ask([x.key for x in names]), deadline), names)
        stop = min(copy.num_tokens, (first + len(opened) // num_heads) * size)
        if state is not None and stop < copy.num_tokens:
            return start
        try:
            for end, commits in ((copy.num_committed, True), (len(copy.tokens), False), (stop, False)):
                count = min(end, stop) - start
                if count <= 0:
                    continue
                ids = copy.tokens[start : start + count] if end <= len(copy.tokens) else None
                slots = to_host(cache.append(seq, count, tokens=ids))
                self._blocks.write(slots, start - first * size, opened)
                start += count
                if commits and state is None:
                    cache.commit(seq)
            if state is not None:
                cache.write_states([seq], state)
                if copy.num_committed == len(copy.tokens) // cache.block_size * cache.block_size:
                    cache.commit(seq)  # which a state allows at its own length alone
        except BaseException:
            if state is not None:
                lens = cache.lens_with_state(seq)
                before = int(lens[lens <= before][-1])
            cache.truncate(seq, before)
            raise
        return start

    def _forget_freed(self) -> None:
        for seq in [*self._out]:
            try:
                self.cache.seq_lens(seq)
            except KeyError:
                del self._out[seq]
