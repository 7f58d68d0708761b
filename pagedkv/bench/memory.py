"""Bench of the memory manager, beside one made of Python lists in the style of nano-vLLM."""

from __future__ import annotations

from argparse import ArgumentParser
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np

from ..memory import BlockPool, SequenceTable
from . import serving
from .contest import median, spread
from .report import Row

NUMS_SEQS, QUICK_NUMS_SEQS = (256, 1024), (16,)
BLOCK_SIZE = 16
NUM_TOKENS = 2048
DROPPED = 100
# pagedkv's operations, and what each is compared with.
OPERATIONS = {
    "decode step": "decode step",
    "decode step, array": "decode step",
    "add": "add",
    "fork": "fork",
    "truncate": "truncate",
    "free": "free",
}


class ListTable:
    """The baseline: a deque of free blocks, and a list of blocks for each sequence.

    Does the work of SequenceTable, without its checks, handles and copy-on-write.
    """

    def __init__(self, num_blocks: int) -> None:
        self.free_blocks = deque(range(num_blocks))
        self.ref_counts = [0] * num_blocks
        self.blocks: dict[int, list[int]] = {}
        self.lens: dict[int, int] = {}
        self.num_added = 0

    def _allocate(self) -> int:
        block = self.free_blocks.popleft()
        self.ref_counts[block] = 1
        return block

    def add(self, num_tokens: int) -> int:
        self.num_added += 1
        self.blocks[self.num_added] = [self._allocate() for _ in range(-(-num_tokens // BLOCK_SIZE))]
        self.lens[self.num_added] = num_tokens
        return self.num_added

    def append(self, seqs: list[int]) -> np.ndarray:
        slots = []
        for seq in seqs:
            offset = self.lens[seq] % BLOCK_SIZE
            if offset == 0:
                self.blocks[seq].append(self._allocate())
            slots.append(self.blocks[seq][-1] * BLOCK_SIZE + offset)
            self.lens[seq] += 1
        return np.array(slots, np.int64)

    def block_tables(self, seqs: list[int]) -> np.ndarray:
        width = max(len(self.blocks[seq]) for seq in seqs)
        return np.array([self.blocks[seq] + [-1] * (width - len(self.blocks[seq])) for seq in seqs], np.int32)

    def seq_lens(self, seqs: list[int]) -> np.ndarray:
        return np.array([self.lens[seq] for seq in seqs], np.int32)

    def fork(self, seqs: list[int]) -> list[int]:
        first = self.num_added + 1
        for seq in seqs:
            self.num_added += 1
            self.blocks[self.num_added] = self.blocks[seq].copy()
            self.lens[self.num_added] = self.lens[seq]
            for block in self.blocks[seq]:
                self.ref_counts[block] += 1
        return list(range(first, self.num_added + 1))

    def truncate(self, seqs: list[int], lengths: list[int]) -> None:
        for seq, length in zip(seqs, lengths, strict=True):
            self._release(self.blocks[seq], -(-length // BLOCK_SIZE))
            self.lens[seq] = length

    def free(self, seqs: list[int]) -> None:
        for seq in seqs:
            self._release(self.blocks.pop(seq), 0)
            del self.lens[seq]

    def _release(self, blocks: list[int], num_kept: int) -> None:
        for block in reversed(blocks[num_kept:]):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_blocks.append(block)
        del blocks[num_kept:]


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command line to those of all benches."""
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_NUMS_SEQS[0]} sequences, in a second")


def run(*, repeats: int = 9, progress: Callable[[str], Any] = print, quick: bool = False) -> list[Row]:
    """Time both managers in turns, on sequences of about 2048 tokens in blocks of 16.

    A decode step is append, block_tables and seq_lens of all sequences, one in 16 of which needs a new block; handles
    are in a list or in an int64 array. The other operations are on all sequences too: add one at a time, the others in
    one call.

    Parameters
    ----------
    repeats : int
        How often all sequences are added, run for 20 decode steps, and freed.
    progress : callable
        Called with what is being measured.
    quick : bool
        Few sequences, to see that everything runs.

    Returns
    -------
    list of dict
        Median microseconds of both managers, and interquartile range over the median; then those of `serving`.
    """
    rows: list[Row] = []
    for num_seqs in QUICK_NUMS_SEQS if quick else NUMS_SEQS:
        num_blocks = num_seqs * (NUM_TOKENS // BLOCK_SIZE + 1)
        table = SequenceTable(BlockPool(num_blocks), BLOCK_SIZE, 2 * num_seqs, NUM_TOKENS // BLOCK_SIZE + 1)
        times: dict[str, list[float]] = {}
        for repeat in range(repeats):
            progress(f"memory manager, {num_seqs} sequences, {repeat + 1} of {repeats}")
            lives = [_life(table, num_seqs, np.array), _life(ListTable(num_blocks), num_seqs)]
            for parts in zip(*lives, strict=True):
                for name, part in zip(("pagedkv", "lists"), parts, strict=True):
                    for operation, microseconds in part:
                        times.setdefault(f"{name} {operation}", []).append(microseconds)
        for operation, theirs in OPERATIONS.items():
            ours, lists = times[f"pagedkv {operation}"], times[f"lists {theirs}"]
            row = {"operation": operation, "num_seqs": num_seqs, "pagedkv_us": median(ours), "spread": spread(ours)}
            rows.append(row | {"lists_us": median(lists), "lists_spread": spread(lists)})
    progress("prompts, decode steps and the scheduler")
    nums_seqs, num_running, num_waiting = (QUICK_NUMS_SEQS, 20, 50) if quick else (NUMS_SEQS, 1000, 10_000)
    return rows + serving.run(nums_seqs, num_running, num_waiting, repeats)


def _life(
    table: Any, num_seqs: int, other_kind: Callable[[list[int]], Any] | None = None
) -> Iterator[list[tuple[str, float]]]:
    """Run one life of sequences: add, decode, fork, truncate and free.

    Yields times after each operation, so that managers can take turns. With `other_kind`, decode steps are timed with
    that kind of handles too.
    """
    lengths = [NUM_TOKENS - i % BLOCK_SIZE for i in range(num_seqs)]
    seqs: list[int] = []
    yield [("add", _time(lambda: seqs.extend(table.add(length) for length in lengths)))]
    kinds: dict[str, Any] = {"decode step": seqs}
    if other_kind:
        kinds["decode step, array"] = other_kind(seqs)
    for _ in range(20):
        part = []
        for operation, handles in kinds.items():
            part.append((operation, _time(partial(_decode_step, table, handles))))
            table.truncate(seqs, lengths)
        yield part
        kinds = dict(reversed(kinds.items()))  # the first one finds colder caches
    forks: list[int] = []
    yield [("fork", _time(lambda: forks.extend(table.fork(seqs))))]
    shorter = [length - DROPPED for length in lengths]
    yield [("truncate", _time(lambda: table.truncate(seqs, shorter)))]
    yield [("free", _time(lambda: table.free(seqs + forks)))]


def _decode_step(table: Any, handles: Any) -> None:
    table.append(handles)
    table.block_tables(handles)
    table.seq_lens(handles)


def _time(call: Callable[[], object]) -> float:
    """Measure the microseconds of a call."""
    start = perf_counter_ns()
    call()
    return (perf_counter_ns() - start) / 1000
