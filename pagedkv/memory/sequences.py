"""Sequences: those that share the blocks of one pool, and find them again by their tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import between_graphs
from .arguments import as_int
from .device.arrays import Arrays
from .guard import Guarded, consistent, exclusive
from .prefix.prompt import Added, Prompt, ids_of, known_prompt, prompt_of
from .stats import Stats, pool_map
from .table import SequenceTable


class Sequences(Guarded, ABC):
    """What `PagedKVCache` does to its sequences, wherever K and V are: which blocks are theirs, shared and found.

    Parameters
    ----------
    table : SequenceTable
    arrays : Arrays
        Makes the arrays that callers get.
    block_bytes : int
        What a block takes in all layers.
    """

    def __init__(self, table: SequenceTable, arrays: Arrays, block_bytes: int) -> None:
        self.pool, self.table = table.pool, table
        self._arrays, self._block_bytes = arrays, block_bytes
        self._pins: dict[str, int] = {}
        self._guard = table._guard

    @abstractmethod
    def _copy(self, copies: npt.NDArray[np.int64]) -> None:
        """Copy blocks in all layers, before the commit: until then nobody reads the destinations."""

    @abstractmethod
    def _read(self, copies: npt.NDArray[np.int64]) -> None:
        """Raise what `_copy` would raise before it writes anything: too little memory, or a stream under capture."""

    @property
    def block_size(self) -> int:
        """P, tokens per block."""
        return self.table.block_size

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, the cached ones included."""
        return self.pool.num_free

    def seq_lens(self, seqs: Any) -> npt.NDArray[np.int32]:
        """The lengths of sequences, (num_seqs,) int32, on the host: `SequenceTable.seq_lens`."""
        return self.table.seq_lens(seqs)

    @exclusive
    def add(self, tokens: int | Sequence[int], salt: str | bytes | None = None) -> Added:
        """Start a sequence, sharing the blocks that hold its first tokens already, or copying part of the last one.

        Parameters
        ----------
        tokens : int, or (num_tokens,) ints
            How many tokens it begins with, or which: ids from 0 to 2**31 - 1.
        salt : str, bytes or None
            Only blocks of sequences with the same salt are shared. Whatever else K and V depend on, such as an adapter
            or an image, belongs into it.

        Returns
        -------
        Added
            The handle, and how many of the tokens are in the cache. Write the K and V of the others to
            ``slots(seq, num_cached, num_tokens)``: those of the last one in any case, since its output is needed.

        Raises
        ------
        TypeError
            `salt` is neither a str nor bytes nor None.
        ValueError
            More than max_seq_len tokens, or an id that is out of range.
        CapacityError
            max_seqs sequences are alive.
        OutOfBlocksError
            Too few blocks are free.
        """
        return self._start(prompt_of(tokens, salt))

    @between_graphs
    @exclusive
    def append(self, seqs: Any, n: Any = 1, tokens: Any = None) -> Any:
        """Add n tokens to the end of each sequence, after copying shared blocks that it would write to.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.
        n : int, or (num_seqs,) ints
            New tokens of every sequence, or of each; at least 0.
        tokens : (num_new_tokens,) ints, or None
            Which tokens, in the order of the sequences. Without them, other sequences will never find the blocks that
            they are in, nor any later block of these sequences.

        Returns
        -------
        (num_new_tokens,) int64
            Their slots, in the order of the sequences.

        Raises
        ------
        ValueError
            A sequence would be longer than max_seq_len, or is named twice; not as many tokens, or an id out of range.
        OutOfBlocksError
            Too few blocks are free.
        KeyError
            A sequence that was freed or never was.
        RuntimeError
            On a device, while its current stream is being captured in a CUDA graph.
        """
        rows, ids = self.table._rows, None if tokens is None else ids_of(tokens)
        new_slots, copies, writes = rows.to_copy(self._read, rows.plan_append, seqs, n, ids)
        self._copy(copies)
        slots = self._arrays.asarray(new_slots)
        self.pool._commit(writes, undo=lambda: rows.plan_take_back(seqs, n))
        return slots

    @between_graphs
    @exclusive
    def commit(self, seqs: Any) -> None:
        """Say that the K and V of all tokens added and appended so far are written, in all layers.

        From now on sequences that are added find the full blocks of these, as far as their tokens are known. Where
        another sequence has committed a block with the same tokens before, these share that one and release their own.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.

        Raises
        ------
        ValueError
            A sequence is named twice.
        KeyError
            A sequence that was freed or never was.
        """
        self.pool._commit(self.table._rows.plan_commit(seqs))

    @consistent
    def find(self, tokens: Sequence[int], salt: str | bytes | None = None) -> int:
        """How many of the first tokens `add`, with these token ids, would find in the cache; it takes nothing."""
        return self.table._rows.num_cached(known_prompt(tokens, salt))

    @consistent
    def can_add(self, tokens: int | Sequence[int], salt: str | bytes | None = None, *, reserve: int = 0) -> bool:
        """Whether `add`, with these arguments, has room, and `reserve` blocks stay free besides.

        Reserve one for each running sequence, say, so that all can go on decoding. Found blocks in use need no room.
        """
        return self.table._rows.can_add(prompt_of(tokens, salt), as_int("reserve", reserve))

    @exclusive
    def pin(self, name: str, tokens: Sequence[int], salt: str | bytes | None = None) -> int:
        """Keep the full blocks that tokens begin with, as far as they can be found now, until `unpin` or `reset`.

        A pin counts as a sequence: it takes one of max_seqs, and its blocks are in use.

        Parameters
        ----------
        name : str
            A new name.
        tokens, salt
            As in `add`.

        Returns
        -------
        int
            How many tokens are kept.

        Raises
        ------
        ValueError, CapacityError
            There is a pin of this name; max_seqs sequences are alive.
        TypeError
            `name` is no str, or `tokens` are no ids.
        """
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, got {type(name).__name__}")
        if name in self._pins:
            raise ValueError(f"name must be a new one, got {name!r}, which is pinned: unpin it first")
        seq, length, writes = self.table._rows.plan_hold(known_prompt(tokens, salt))
        self.pool._commit([*writes, (vars(self), "_pins", self._pins | {name: seq})])
        return length

    @exclusive
    def unpin(self, name: str) -> None:
        """Let go of what `pin` keeps; it can be found until its blocks are needed.

        Raises
        ------
        KeyError
            No pin has this name.
        """
        if not isinstance(name, str) or name not in self._pins:
            raise KeyError(f"no pin is called {name!r}")
        left = self._pins.copy()
        del left[name]
        self.pool._commit([*self.table._rows.plan_free(self._pins[name]), (vars(self), "_pins", left)])

    @exclusive
    def reset(self) -> None:
        """Forget what can be found, the pins too: after a change of the model's weights, say.

        Sequences go on, but no block that they have now will ever be found.
        """
        pins: dict[str, int] = {}
        self.pool._commit([*self.table._rows.plan_reset([*self._pins.values()]), (vars(self), "_pins", pins)])

    def fork(self, seqs: Any, n: int = 1) -> list[int]:
        """Start n sequences that share the tokens of each of some: `SequenceTable.fork`."""
        return self.table.fork(seqs, n)

    def reorder(self, seqs: Any, parents: Any) -> None:
        """Let each sequence go on with the tokens of another: `SequenceTable.reorder`."""
        self.table.reorder(seqs, parents)

    def truncate(self, seqs: Any, length: Any) -> None:
        """Shorten sequences to their first `length` tokens: `SequenceTable.truncate`."""
        self.table.truncate(seqs, length)

    def free(self, seqs: Any) -> None:
        """End sequences and release their blocks: `SequenceTable.free`."""
        self.table.free(seqs)

    @between_graphs
    def slots(self, seq: int, start: int, stop: int) -> Any:
        """Slots of the tokens start..stop-1 of a sequence, (stop - start,) int64: `SequenceTable.slots`."""
        return self._arrays.asarray(self.table.slots(seq, start, stop))

    @consistent
    def stats(self) -> Stats:
        """How full the pool is, at one instant: it waits for another thread's call."""
        return Stats.of(self.table, self._block_bytes)

    def check(self) -> None:
        """Raise AssertionError unless every invariant of the pool and the table holds."""
        self.table.check()

    @consistent
    def plot(self, width: int = 64) -> str:
        """A map of the pool in characters, `width` to a line: which sequence has which block, and which are shared."""
        return pool_map(self.table).to_text(as_int("width", width, minimum=1))

    @consistent
    def _repr_html_(self) -> str:
        return f"{self.stats().to_html()}{pool_map(self.table).to_html()}"

    def _start(
        self, prompt: Prompt, reserve: int | None = None, last: list[int] | None = None, *, again: bool = False
    ) -> Added:
        """Start a sequence with a prompt, or, with `reserve`, with what is found of it: `Rows.plan_add`.

        ``last[0]`` gets the handle together with the rest: an interrupt may come before the caller has it.
        """
        rows = self.table._rows
        seq, num_cached, copies, writes = rows.to_copy(self._read, rows.plan_add, prompt, reserve, again=again)
        added = Added(seq, num_cached)
        if last is not None:
            writes.append((last, 0, seq))
        self._copy(copies)
        self.pool._commit(writes, undo=lambda: rows.plan_free(seq))
        return added
