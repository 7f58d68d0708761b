"""Pools sized by bytes, or by a share of the memory that is free."""

import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from pagedkv import PagedKVCache
from pagedkv.memory.device.arrays import Arrays
from pagedkv.memory.pool import BlockPool

LAYERS, P, HEADS, DIM = 3, 8, 2, 16
BLOCK_BYTES = 2 * LAYERS * P * HEADS * DIM * 4


@pytest.mark.parametrize(
    ("memory", "num_blocks"),
    [
        (BLOCK_BYTES, 1),
        (10 * BLOCK_BYTES - 1, 9),
        (np.int64(10 * BLOCK_BYTES), 10),
        (np.float32(0.5), 5),
        ("240KiB", 240 * 1024 // BLOCK_BYTES),
        (" 1.5 MB ", 1_500_000 // BLOCK_BYTES),
        (0.5, 5),
    ],
)
def test_blocks_in_an_amount_of_memory(monkeypatch, memory, num_blocks):
    monkeypatch.setattr(Arrays, "free_bytes", lambda self: 10 * BLOCK_BYTES)
    cache = PagedKVCache(LAYERS, None, P, HEADS, DIM, memory=memory)
    assert cache.pool.num_blocks == len(cache.k_caches[0]) == num_blocks
    assert cache.stats().num_bytes == num_blocks * BLOCK_BYTES


@pytest.mark.parametrize(
    ("num_blocks", "memory", "error", "message"),
    [
        (None, None, ValueError, r"^either num_blocks or memory must be given, and not both$"),
        (4, "2GiB", ValueError, r"^either num_blocks or memory must be given, and not both$"),
        (None, "2 gigs", ValueError, r"^memory must be a number and a unit of B, .*, such as 2GiB, got '2 gigs'$"),
        (None, "2kib", ValueError, r"^memory must be a number and a unit"),
        (None, 1.5, ValueError, r"^memory must be a share above 0.0 and at most 1.0, or bytes as an int, got 1.5$"),
        (None, True, TypeError, r"^memory must be a str, an int or a float, got bool$"),
        (None, f"{'9' * 400}TiB", ValueError, r"^num_blocks must be at most 2147483647, got "),
        (
            None,
            "1.001kB",
            ValueError,
            rf"^memory must be at least {BLOCK_BYTES} bytes, one block in all layers, got 1001$",
        ),
        (None, BLOCK_BYTES - 1, ValueError, rf"^memory must be at least {BLOCK_BYTES} bytes, one block in all layers"),
    ],
)
def test_wrong_amounts_of_memory_are_refused(num_blocks, memory, error, message):
    with pytest.raises(error, match=message):
        PagedKVCache(LAYERS, num_blocks, P, HEADS, DIM, memory=memory)


@pytest.mark.parametrize("array_module", ["numpy", "torch"])
def test_more_than_the_system_has_is_refused_at_once(monkeypatch, array_module):
    def never(self, num_blocks):
        raise AssertionError("the pool's arrays come first, and take minutes to fill")

    monkeypatch.setattr(BlockPool, "__init__", never)
    message = (
        r"^num_blocks must fit into the [\d,]+ bytes .* got 2,147,483,647 blocks, which take 4,503,599,625,273,344 "
    )
    with pytest.raises(MemoryError, match=message):
        PagedKVCache(1024, 2**31 - 1, P, HEADS, DIM, array_module=array_module)


def test_free_memory_of_the_host(monkeypatch):
    assert 0 < Arrays("numpy").free_bytes() < 2**60
    monkeypatch.setattr(Path, "read_text", mock.Mock(side_effect=OSError))  # macOS has no such file
    monkeypatch.setattr(os, "sysconf", mock.Mock(side_effect=ValueError))
    with pytest.raises(ValueError, match=r"^memory must be bytes, 2GiB say, .* got 0.5$"):
        PagedKVCache(LAYERS, None, P, HEADS, DIM, memory=0.5)
