"""What a device recorded becomes an exception, once."""

import numpy as np
import pytest

from pagedkv.cuda.bad_entries import raise_if_failed
from pagedkv.kernels.device.bad_entries import BLOCK_ID, NUM_BYTES, PAIR, POSITION, SEQ_LEN, SLOT


class Device:
    """A device with nothing but a report buffer, if it has one."""

    def __init__(self, *report):
        self.report = np.array(report or [0] * 5, np.int64)

    def take(self, name):
        assert name == "report"
        content = np.zeros(256, np.uint8)  # workspaces are larger than what was asked for
        content[:NUM_BYTES] = self.report.view(np.uint8)
        self.report[:] = 0
        return content


class Idle:
    """A device that nothing checked has run on."""

    def take(self, name):
        return None


@pytest.mark.parametrize(
    ("report", "error", "text"),
    [
        (
            (1, BLOCK_ID, 3, 7, -(2**31)),
            IndexError,
            "block_tables must hold block ids in 0..num_blocks-1, got -2147483648 for sequence 3, column 7",
        ),
        (
            (1, BLOCK_ID, -1, 2, 99),
            IndexError,
            "block_table must hold block ids in 0..num_blocks-1, got 99 at column 2",
        ),
        (
            (1, SEQ_LEN, 65536, 0, -5),
            ValueError,
            "seq_lens must be in 0..max_blocks * block_size and at most max_seq_len, got -5 for sequence 65536",
        ),
        ((1, SLOT, 12, 0, 2**40), IndexError, f"slots must be below num_blocks * block_size, got {2**40} for token 12"),
        (
            (1, PAIR, 4, 1, -2),
            IndexError,
            "pairs must hold block ids in 0..num_blocks-1, got destination -2 in pair 4",
        ),
        ((1, POSITION, 7, 0, -1), IndexError, "positions must be in 0..max_positions-1, got -1 for token 7"),
    ],
)
def test_an_entry_is_raised_once(report, error, text):
    device = Device(*report)
    with pytest.raises(error) as caught:
        raise_if_failed([device])
    assert str(caught.value) == text
    assert not device.report.any()
    raise_if_failed([device])


def test_devices_are_asked_in_order_until_one_has_failed():
    devices = [Device(), Idle(), Device(1, SLOT, 1, 0, 8), Device(1, SLOT, 2, 0, 9)]
    for token in (1, 2):
        with pytest.raises(IndexError, match=f"for token {token}$"):
            raise_if_failed(devices)
    raise_if_failed(devices)


def test_without_devices_nothing_has_failed():
    raise_if_failed([])
