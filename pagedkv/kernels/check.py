"""The checks of check=True, in a kernel of their own before attention, which their branches would slow down.

A thread block checks a sequence. It stores the sequence's length, or -1 if it finds a bad entry: then the kernel of
attention reads nothing of that sequence, and its rows become zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

from .device.bad_entries import BLOCK_ID, QUERY_START, SEQ_LEN, record
from .device.intrinsics.thread import address
from .device.language import cuda, int32, int64, types, uint32
from .device.source import KernelSource
from .device.visible import VISIBLE, first_key

NUM_THREADS = 128
_INTS, _LONGS = types.CPointer(int32), types.CPointer(int64)
SIGNATURE = types.void(
    *(_INTS, _INTS, _INTS, _INTS, _INTS, _LONGS),  # checked_lens, block_tables, seq_lens, query_starts, leftpad, report
    *(*[int64] * 4, VISIBLE, int64),  # num_tokens, num_blocks, max_seq_len, block_size, visible, table_stride in bytes
)


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """The kernel has no compile-time constants; everything is an argument of the launch."""


def make_check_batch(config: CheckConfig) -> KernelSource:
    """The kernel that stores checked_lens[seq] = seq_lens[seq], or -1, and records bad entries.

    Blocks are checked from the first key on that a query sees: before it they may have been freed. Decode has no query
    starts, but one query for each sequence.
    """

    def check_batch(
        checked_lens, block_tables, seq_lens, query_starts, leftpad, report, num_tokens, num_blocks, max_seq_len,
        block_size, visible, table_stride,
    ):  # fmt: skip
        seq, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        start, stop, length = int64(0), int64(0), int64(seq_lens[seq])
        position = length - 1
        if address(query_starts) != 0:
            start, stop = int64(query_starts[seq]), int64(query_starts[seq + 1])
            position = length - (stop - start)
        first = int64(first_key(uint32(position), visible))
        if address(leftpad) != 0:
            padding = int64(leftpad[seq])
            first = max(first, padding if padding >= 0 else length)
        what, value = int64(0), int64(0)
        if length < 0 or length > max_seq_len:
            what, value = int64(SEQ_LEN), length
        elif seq == 0 and start != 0:
            what, value = int64(QUERY_START), start
        elif stop < start or stop > num_tokens or stop - start > length:
            what, value = int64(QUERY_START), stop
        column, end = first // block_size + thread, int64(0)
        if what == 0:
            end = (length + block_size - 1) // block_size
        row = seq * (table_stride // 4)
        while column < end:
            block = int64(block_tables[row + column])
            if block < 0 or block >= num_blocks:
                record(report, BLOCK_ID, seq, column, block)
                what, end = int64(BLOCK_ID), int64(0)
            column += NUM_THREADS
        is_bad = cuda.syncthreads_or(int32(what)) != 0
        if thread == 0:
            if what not in (0, BLOCK_ID):
                record(report, what, seq, 0, value)
            checked_lens[seq] = int32(-1) if is_bad else int32(length)

    return KernelSource(check_batch, SIGNATURE, NUM_THREADS)
