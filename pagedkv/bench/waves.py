"""How the thread blocks of kernel split fill an H100: a model, from the kernel's constants alone. Nothing is measured.

What it assumes:

* 132 multiprocessors. Memory gives 3.0 TB/s at most, and answers after 1 us; L2 answers after 0.25 us; a
  multiprocessor takes in 64 bytes in each clock of 1.7 GHz.
* As many thread blocks are on a multiprocessor as the kernel is compiled for (`TensorShape.min_blocks`). They are dealt
  evenly, and each of them has both of its buffers of rows on their way all the time: 4 warps of 32 lanes.
* The thread blocks that fit on all multiprocessors at once are a wave. Before the first one come two reads that wait
  for each other, of a length and of a table entry; beginnings and ends of the others hide behind their neighbours. A
  wave takes as long as its bytes at the least of three rates: that of memory; its bytes in flight in each latency; what
  its multiprocessors take in. The last row comes a latency after it was asked for.
* Several splits leave partial results, which are written at the rate of memory. The last thread block counts (two
  answers of L2), reads the states of all splits (one), and then their sums, with `MERGE_LOADS` reads of 16 bytes in
  flight for each thread that has dims to add.

Launches, instructions, thread blocks without work and blocks in random places cost nothing in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ..kernels.split.config import MERGE_LOADS, NUM_THREADS, SHORTEST_SPLIT, SplitConfig
from ..kernels.split.shape import TensorShape
from .report import Row

NUM_SMS = 132
BANDWIDTH = 3.0e12  # bytes per second
SM_BANDWIDTH = 64 * 1.7e9
LATENCY, L2_LATENCY = 1e-6, 0.25e-6  # seconds

HEAD_DIM, BLOCK_SIZE = 128, 16
KINDS = ("float16", "fp8_e4m3")
GROUP_SIZES = (1, 4, 8)
KV_HEADS = (1, 2, 4, 8)
BATCHES = tuple(2**i for i in range(8))
LENGTHS = tuple(n for i in range(9, 18) for n in (2**i - 1, 2**i, 2**i + 1, 3 * 2 ** (i - 1)) if n <= 2**17)


@dataclass(frozen=True, slots=True)
class Model:
    """A call of kernel split, and what is to be expected of it.

    Attributes
    ----------
    config : SplitConfig
        On tensor cores, of at most 16 query heads to a KV head, which one thread block takes.
    num_kv_heads, num_seqs, seq_len : int
        All sequences have this length.
    """

    config: SplitConfig
    num_kv_heads: int
    num_seqs: int
    seq_len: int

    @property
    def split(self) -> int:
        """Tokens of a split."""
        return self.config.split_size(self.seq_len, self.num_kv_heads)

    @property
    def num_splits(self) -> int:
        return -(-self.seq_len // self.split)

    @property
    def thread_blocks(self) -> int:
        """Thread blocks with work."""
        return self.num_seqs * self.num_kv_heads * self.num_splits

    @property
    def wave_size(self) -> int:
        """Thread blocks of a full wave."""
        return NUM_SMS * TensorShape(self.config).min_blocks

    @property
    def has_work(self) -> bool:
        """Splits of the shortest length would be on half of the multiprocessors."""
        return 2 * self.num_seqs * self.num_kv_heads * -(-self.seq_len // SHORTEST_SPLIT) >= NUM_SMS

    @property
    def is_idle(self) -> bool:
        """More than half of the multiprocessors have no thread block with work."""
        return 2 * self.thread_blocks < NUM_SMS

    @property
    def kv_bytes(self) -> int:
        return 2 * self.num_seqs * self.num_kv_heads * self.seq_len * self.config.row_bytes

    @property
    def partial_bytes(self) -> int:
        """Of partial results, written once and read once."""
        heads = self.num_seqs * self.num_kv_heads * self.config.group_size
        return 2 * 4 * heads * self.num_splits * (self.config.head_dim + 2) if self.num_splits > 1 else 0

    @property
    def block_in_flight(self) -> int:
        """Bytes that a thread block has asked for."""
        return NUM_THREADS * 2 * TensorShape(self.config).buffer * 4

    def bytes_of_last(self, thread_blocks: int) -> int:
        """K and V of so many thread blocks at the end of the grid, where those of last splits are."""
        short = min(thread_blocks, self.thread_blocks // self.num_splits)
        last_split = self.seq_len - (self.num_splits - 1) * self.split
        return 2 * self.config.row_bytes * (short * last_split + (thread_blocks - short) * self.split)

    def wave_seconds(self, nbytes: int, thread_blocks: int) -> float:
        """Of a number of bytes, by so many thread blocks at once."""
        rates = BANDWIDTH, thread_blocks * self.block_in_flight / LATENCY, min(thread_blocks, NUM_SMS) * SM_BANDWIDTH
        return nbytes / min(rates)

    @property
    def merge_seconds(self) -> float:
        """Of the thread block that adds the splits of one KV head."""
        if self.num_splits == 1:
            return 0.0
        quads = self.config.num_heads * self.config.head_dim // 4
        in_flight = min(quads * self.config.merge_shares, NUM_THREADS) * MERGE_LOADS * 16
        return 3 * L2_LATENCY + 16 * quads * self.num_splits / min(in_flight / L2_LATENCY, SM_BANDWIDTH)

    @property
    def seconds(self) -> float:
        last = self.thread_blocks % self.wave_size
        rest = self.bytes_of_last(last)
        waves = self.wave_seconds(self.kv_bytes - rest, self.wave_size) + (
            self.wave_seconds(rest, last) if last else 0.0
        )
        return 3 * LATENCY + waves + self.partial_bytes / 2 / BANDWIDTH + self.merge_seconds

    @property
    def share(self) -> float:
        """Of the bandwidth of memory, in bytes of K and V."""
        return self.kv_bytes / BANDWIDTH / self.seconds

    def row(self) -> Row:
        """One row of the report."""
        return {
            "kv": self.config.kv_kind,
            "G": self.config.group_size,
            "Hkv": self.num_kv_heads,
            "B": self.num_seqs,
            "L": self.seq_len,
            "split": self.split,
            "splits": self.num_splits,
            "thread blocks": self.thread_blocks,
            "waves": self.thread_blocks / self.wave_size,
            "in flight KiB/SM": min(self.thread_blocks, self.wave_size) * self.block_in_flight / NUM_SMS / 1024,
            "partials": self.partial_bytes / self.kv_bytes,
            "us": self.seconds * 1e6,
            "share": self.share,
        }


def models(*, quick: bool = False) -> Iterator[Model]:
    """One for each cell of the report; if quick, those of float16, G = 8, three batches and powers of two."""
    kinds, groups = (KINDS[:1], GROUP_SIZES[-1:]) if quick else (KINDS, GROUP_SIZES)
    batches = (1, 8, 64) if quick else BATCHES
    lengths = tuple(n for n in LENGTHS if n.bit_count() == 1) if quick else LENGTHS
    for kind, group_size in product(kinds, groups):
        config = SplitConfig(HEAD_DIM, group_size, BLOCK_SIZE, "float16", kind)
        for num_kv_heads, num_seqs, seq_len in product(KV_HEADS, batches, lengths):
            yield Model(config, num_kv_heads, num_seqs, seq_len)


def rows(*, quick: bool = False) -> list[Row]:
    """A row for each cell, and how many leave multiprocessors idle for which there would be work."""
    cells = list(models(quick=quick))
    idle = sum(model.is_idle for model in cells if model.has_work)
    target: Row = {"target": "work for half of the SMs, and more than half idle", "limit": 0, "cells": idle}
    return [*(model.row() for model in cells), target | {"of": len(cells)}]
