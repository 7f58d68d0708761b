"""v1 and v2: the length of a sequence, and the tokens of a thread block."""

from __future__ import annotations

from typing import Any

from ..device.language import int64, uint32
from ..device.source import device_function
from ..device.visible import first_key_of_last


@device_function
def length_of(seq_lens, seq_idx, max_seq_len):
    """The length of a sequence; one out of range counts as 0: shared memory, the grid and tables end at max_seq_len."""
    seq_len = int64(uint32(seq_lens[seq_idx]))
    return int64(0) if seq_len > max_seq_len else seq_len


def make_tokens_of(PARTITION_SIZE: int) -> Any:
    """The device function (seq_len, visible, partition_idx) -> a thread block's first token, and one past its last.

    With a PARTITION_SIZE of 0 it takes all tokens that are seen.
    """

    @device_function
    def tokens_of(seq_len, visible, partition_idx):
        first_token, last_token = int64(first_key_of_last(uint32(seq_len), visible)), seq_len
        if PARTITION_SIZE:
            start = (first_token // PARTITION_SIZE + partition_idx) * PARTITION_SIZE
            first_token, last_token = max(first_token, start), min(seq_len, start + PARTITION_SIZE)
        return first_token, last_token

    return tokens_of
