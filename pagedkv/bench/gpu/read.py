"""Launching a kernel that only reads: the bandwidth that attention is held against."""

from __future__ import annotations

from ...cuda import driver
from ...cuda.device import Device
from ...cuda.plans.plan import compile_for
from ...kernels.read import BLOCK_BYTES, ReadConfig, make_read


def num_sums(num_bytes: int) -> int:
    """Words that `read` writes.

    Raises
    ------
    ValueError
        `num_bytes` is no multiple of what a thread block reads.
    """
    if num_bytes % BLOCK_BYTES:
        raise ValueError(f"num_bytes must be a multiple of {BLOCK_BYTES}, got {num_bytes}")
    return num_bytes // BLOCK_BYTES


def read(device: Device, source: int, sums: int, num_bytes: int) -> None:
    """Read so many bytes at an address once, and write a word for each BLOCK_BYTES of them."""
    device.launch(compile_for(device, make_read, ReadConfig()), (num_sums(num_bytes), 1, 1), [source, sums])


def read_on(stream: int, source: int, sums: int, num_bytes: int) -> None:
    """`read` on a stream of the first GPU."""
    read(driver.cuda_device(0, stream), source, sums, num_bytes)
