"""Managers, which give slots to sequences: contiguous reservation, a buddy allocator, and paging."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import OutOfBlocksError
from ..memory.arguments import MAX_INT32, as_int
from ..memory.groups import LayerGroups
from ..memory.pool import BlockPool
from ..memory.table import SequenceTable
from .buddy import BuddyAllocator
from .first_fit import FirstFit

Int64Array = npt.NDArray[np.int64]
Layers = tuple[int | None, ...]
CHUNK = 512  # tokens of a prompt that Paged adds at a time, if layers have windows


class Manager(Protocol):
    """The interface that `simulate` needs.

    Attributes
    ----------
    memory : int
        Slots in all.
    max_len : int
        Tokens that a sequence can have when it is alone.
    windows : tuple of int or None
        The window of each layer.
    """

    memory: int
    max_len: int
    windows: Layers

    def admit(self, num_tokens: int, seq_len: int) -> int | None:
        """Start a sequence with num_tokens tokens that will have seq_len; return a handle, or None if it must wait."""

    def append(self, seqs: Int64Array) -> bool:
        """Add a token to each sequence; if there is no room, change nothing and return False."""

    def free(self, seqs: Int64Array) -> None:
        """End sequences."""

    def room(self, seqs: Int64Array) -> Int64Array:
        """Tokens that each sequence has room for without getting more slots, (num_seqs,) int64."""

    def held(self, seqs: Int64Array) -> Int64Array:
        """Slots of a layer that each sequence holds in all layers together, (num_seqs,) int64."""


class Reserving:
    """Reserves a run of slots for each sequence from its start to its end.

    Parameters
    ----------
    allocator : FirstFit or BuddyAllocator
    reserve : int or None
        Slots for every sequence; None for as many as the sequence will need, which a server cannot know.
    windows : tuple of int or None
        The window of each layer. All layers keep all tokens in any case.
    """

    def __init__(self, allocator: FirstFit | BuddyAllocator, reserve: int | None, windows: Layers) -> None:
        self.allocator, self.windows = allocator, windows
        self.reserve = reserve
        self.memory = allocator.memory
        self.max_len = allocator.largest if reserve is None else reserve

    def admit(self, num_tokens: int, seq_len: int) -> int | None:
        return self.allocator.allocate(seq_len if self.reserve is None else self.reserve)

    def append(self, seqs: Int64Array) -> bool:
        return True

    def free(self, seqs: Int64Array) -> None:
        for start in seqs.tolist():
            self.allocator.free(start)

    def room(self, seqs: Int64Array) -> Int64Array:
        return np.array([self.allocator.sizes[start] for start in seqs.tolist()], np.int64)

    def held(self, seqs: Int64Array) -> Int64Array:
        return len(self.windows) * self.room(seqs)


class Contiguous(Reserving):
    """Reserves contiguous slots, first fit: the maximum length, or just as many as a sequence will need.

    The first is what serving did before paging (FasterTransformer; Orca (Max) in the vLLM paper). The second is the
    best that contiguous memory can do (Orca (Oracle)).

    Parameters
    ----------
    memory : int
        Slots, at least 1.
    max_len : int or None
        Slots for every sequence, from 1 to `memory`; None for as many as each will need (an oracle).
    windows : tuple of int or None
        The window of each layer, None for one that sees all tokens. It keeps them all in any case.

    Examples
    --------
    >>> from pagedkv import trace
    >>> requests = trace.Requests(prompt_lens=[5, 3], output_lens=[2, 4])
    >>> run = trace.simulate(requests, trace.Contiguous(memory=32, max_len=16))
    >>> run.internal  # slots that no token will ever fill
    array([18, 18,  9,  9])
    """

    def __init__(self, memory: int, max_len: int | None = None, windows: Layers = (None,)) -> None:
        memory = as_int("memory", memory, minimum=1)
        if max_len is not None:
            max_len = as_int("max_len", max_len, minimum=1, maximum=memory)
        super().__init__(FirstFit(memory), max_len, windows)


class Buddy(Reserving):
    """Reserves a power of two of slots from a buddy allocator, which knows how many will be needed (an oracle).

    Parameters
    ----------
    memory : int
        Slots, at least 1.
    windows : tuple of int or None
        As in `Contiguous`.

    Examples
    --------
    >>> from pagedkv import trace
    >>> requests = trace.Requests(prompt_lens=[5, 3], output_lens=[2, 4])
    >>> run = trace.simulate(requests, trace.Buddy(memory=32))
    >>> run.internal  # slots that no token will ever fill: 8 are taken for 7 tokens
    array([2, 2, 1, 1])
    """

    def __init__(self, memory: int, windows: Layers = (None,)) -> None:
        super().__init__(BuddyAllocator(as_int("memory", memory, minimum=1)), None, windows)


class Paged:
    """Allocates blocks as tokens come, with the package's own BlockPool and SequenceTable.

    Parameters
    ----------
    memory : int
        Slots; those beyond the last whole block are never used.
    block_size : int
        P, from 1 to `memory`.
    max_len : int or None
        Tokens that one sequence can have, rounded up to whole blocks; None for as many as the memory has. The block
        table takes max_seqs * max_len / P * 4 bytes.
    max_seqs : int
        Sequences that run at once.
    watermark : float
        Share of the blocks, from 0 to 1, that stays free when a sequence starts beside others, so that those can grow.
        Rule and default are those of vLLM's first block manager.
    windows : tuple of int or None
        The window of each layer, None for one that sees all tokens. Blocks that a window has passed come back. A prompt
        is added in chunks of 512 tokens then.

    Attributes
    ----------
    table : SequenceTable

    Examples
    --------
    >>> from pagedkv import trace
    >>> requests = trace.Requests(prompt_lens=[5, 3], output_lens=[2, 4])
    >>> run = trace.simulate(requests, trace.Paged(memory=32, block_size=4))
    >>> run.internal  # slots that no token will ever fill
    array([1, 2, 1, 1])
    """

    def __init__(
        self,
        memory: int,
        block_size: int,
        *,
        max_len: int | None = None,
        max_seqs: int = 256,
        watermark: float = 0.01,
        windows: Layers = (None,),
    ) -> None:
        self.memory = as_int("memory", memory, minimum=1, maximum=MAX_INT32)
        block_size = as_int("block_size", block_size, minimum=1, maximum=self.memory)
        if not 0 <= watermark <= 1:
            raise ValueError(f"watermark must be from 0 to 1, got {watermark}")
        self.windows = windows
        self.groups = LayerGroups.of(windows, len(windows), block_size)
        pool = BlockPool(self.memory * len(windows) // (block_size * self.groups.group_size))
        max_blocks = min(self.groups.longest(pool.num_blocks, CHUNK), MAX_INT32) // block_size
        if max_len is not None:
            max_blocks = min(max_blocks, -(-as_int("max_len", max_len, minimum=1) // block_size))
        self.table = SequenceTable(pool, block_size, max_seqs, max_blocks, groups=self.groups)
        self.max_len = self.table.max_seq_len
        self.kept_free = watermark * pool.num_blocks

    def admit(self, num_tokens: int, seq_len: int) -> int | None:
        table = self.table
        left = table.pool.num_free - self.groups.peak(num_tokens, CHUNK)
        if table.num_seqs == table.max_seqs or left < (self.kept_free if table.num_seqs else 0):
            return None
        if not self.groups.has_windows:
            return table.add(num_tokens)
        seq = table.add(0)
        for start in range(0, num_tokens - 1, CHUNK):
            table.append(seq, min(CHUNK, num_tokens - 1 - start))
        table.append(seq)
        return seq

    def append(self, seqs: Int64Array) -> bool:
        try:
            self.table.append(seqs)
        except OutOfBlocksError:
            return False
        return True

    def free(self, seqs: Int64Array) -> None:
        self.table.free(seqs)

    def room(self, seqs: Int64Array) -> Int64Array:
        block_size = self.table.block_size
        return -(-self.table.seq_lens(seqs).astype(np.int64) // block_size) * block_size

    def held(self, seqs: Int64Array) -> Int64Array:
        lens = self.table.seq_lens(seqs).astype(np.int64)
        return self.groups.held(lens) * (self.table.block_size * self.groups.group_size)
