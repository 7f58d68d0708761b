"""Steps of v1 and v2: the length of a sequence, the tokens of a thread block, and the blocks that hold them."""

from __future__ import annotations

from typing import Any

from ..device.bad_entries import BLOCK_ID, SEQ_LEN, record
from ..device.language import int32, int64, uint32
from ..device.source import device_function
from .config import AttentionConfig


def make_length_of(config: AttentionConfig) -> Any:
    """The device function (seq_lens, seq_idx, max_seq_len, report): a length; one out of range counts as 0.

    Shared memory and the grid end at max_seq_len, and the tables there or later.
    """
    CHECKED = config.checked

    @device_function
    def length_of(seq_lens, seq_idx, max_seq_len, report):
        seq_len = uint32(seq_lens[seq_idx])
        if int64(seq_len) > max_seq_len:
            if CHECKED:
                record(report, SEQ_LEN, seq_idx, 0, int64(int32(seq_len)))
            seq_len = uint32(0)
        return int64(seq_len)

    return length_of


def make_tokens_of(PARTITION_SIZE: int) -> Any:
    """The device function (seq_len, window, partition_idx): the first token of a thread block, and one past its last.

    With a PARTITION_SIZE of 0 it takes all tokens of the window.
    """

    @device_function
    def tokens_of(seq_len, window, partition_idx):
        first_token, last_token = max(seq_len - window, 0), seq_len
        if PARTITION_SIZE:
            start = (first_token // PARTITION_SIZE + partition_idx) * PARTITION_SIZE
            first_token, last_token = max(first_token, start), min(seq_len, start + PARTITION_SIZE)
        return first_token, last_token

    return tokens_of


def make_block_of(config: AttentionConfig) -> Any:
    """The device function (token_idx, block_tables, row, num_blocks, report, seq_idx): the block that holds a token.

    It is -1 for an entry of the table that check=True rejects; `row` is where the sequence's entries begin.
    """
    BLOCK_SIZE, CHECKED = config.block_size, config.checked

    @device_function
    def block_of(token_idx, block_tables, row, num_blocks, report, seq_idx):
        column = token_idx // BLOCK_SIZE
        block = int64(block_tables[row + column])
        if CHECKED and (block < 0 or block >= num_blocks):
            record(report, BLOCK_ID, seq_idx, column, block)
            block = int64(-1)
        return block

    return block_of
