"""The kernel that only reads reads every byte once, as an attention kernel could."""

import numpy as np
import pytest

from pagedkv.bench.gpu.device import read
from pagedkv.compiler.compile import compile_kernel
from pagedkv.compiler.occupancy import occupancy
from pagedkv.emulator import EmulatorDevice
from pagedkv.kernels.read import BLOCK_BYTES, NUM_THREADS, ReadConfig, make_read

from ...machine_code.sass import code_of, loads_of

SECTOR_BYTES = 32


def test_the_reader_sums_every_byte_once():
    num_bytes = 3 * BLOCK_BYTES
    memory = np.random.default_rng(0).integers(0, 2**32, num_bytes // 4 + 64, np.uint32)
    source = memory[-memory.ctypes.data % 256 // 4 :][: num_bytes // 4]
    sums = np.zeros(3, np.uint32)
    with EmulatorDevice(stats=True, global_race=True) as device:
        device.lineinfo = False  # as for a GPU
        read(device, device.address("source", source), device.address("sums", sums), num_bytes)
        (launch,) = device.launches
    np.testing.assert_array_equal(sums, source.reshape(3, -1).sum(axis=1, dtype=np.uint32))
    traffic = launch.buffers["source"]
    assert traffic.bytes_read == num_bytes
    assert traffic.sectors_read == traffic.distinct_sectors_read == num_bytes // SECTOR_BYTES
    assert launch.buffers["sums"].bytes_written == sums.nbytes


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_nothing_is_spilled_and_128_kib_are_in_flight(capability):
    kernel = compile_kernel(make_read, ReadConfig(), capability)
    resources = kernel.linked.resources()
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0)
    blocks = occupancy(capability, resources.registers, NUM_THREADS, resources.shared_bytes)
    (loads,) = loads_of(code_of(kernel.cubin, kernel.entry))
    assert blocks * NUM_THREADS * loads.in_flight >= 128 * 1024
