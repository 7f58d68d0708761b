"""The kernel that only reads reads every byte once, as an attention kernel could."""

import numpy as np
import pytest

from pagedkv.bench.gpu.device import read
from pagedkv.compiler.compile import compile_kernel
from pagedkv.compiler.occupancy import occupancy
from pagedkv.emulator import EmulatorDevice
from pagedkv.kernels.read import NUM_THREADS, TURN_BYTES, ReadConfig, make_read

from ...machine_code.sass import code_of, loads_of

SECTOR_BYTES = 32


@pytest.mark.parametrize(("turns", "num_blocks"), [(1, 12), (4, 3)])
def test_the_reader_sums_every_byte_once(turns, num_blocks):
    num_bytes = 12 * TURN_BYTES
    memory = np.random.default_rng(0).integers(0, 2**32, num_bytes // 4 + 64, np.uint32)
    source = memory[-memory.ctypes.data % 256 // 4 :][: num_bytes // 4]
    sums = np.zeros(num_blocks, np.uint32)
    with EmulatorDevice(stats=True, global_race=True) as device:
        device.lineinfo = False  # as for a GPU
        read(device, device.address("source", source), device.address("sums", sums), num_bytes, turns)
        (launch,) = device.launches
    np.testing.assert_array_equal(sums, source.reshape(num_blocks, -1).sum(axis=1, dtype=np.uint32))
    traffic = launch.buffers["source"]
    assert traffic.bytes_read == num_bytes
    assert traffic.sectors_read == traffic.distinct_sectors_read == num_bytes // SECTOR_BYTES
    assert launch.buffers["sums"].bytes_written == sums.nbytes


def test_an_empty_launch_reads_nothing():
    sums = np.ones(1, np.uint32)
    with EmulatorDevice(stats=True) as device:
        device.lineinfo = False
        read(device, 0, device.address("sums", sums), 0)
        (launch,) = device.launches
    assert sums[0] == 0
    assert [traffic.bytes_read for traffic in launch.buffers.values()] == [0]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_nothing_is_spilled_and_128_kib_are_in_flight(capability):
    kernel = compile_kernel(make_read, ReadConfig(), capability)
    resources = kernel.linked.resources()
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0)
    blocks = occupancy(capability, resources.registers, NUM_THREADS, resources.shared_bytes)
    (loads,) = loads_of(code_of(kernel.cubin, kernel.entry))
    assert blocks * NUM_THREADS * loads.in_flight >= 128 * 1024
