"""Device memory: huge buffers that are hardly used, growth, and where an address points."""

import resource

import numpy as np
import pytest
from numba import cuda, types

from pagedkv.emulator import Device, EmulatorDevice, EmulatorError, MemoryFault
from pagedkv.emulator import device as emulator_device
from pagedkv.emulator.state.memory import GUARD

from ..ptx_harness import build

i64, u8 = types.int64, types.uint8
P = types.CPointer
GIB = 1 << 30


def copy_far(x, o, offset):
    i = cuda.grid(1)
    o[i + offset] = x[i + offset]


@pytest.fixture(scope="module")
def kernel():
    return build(copy_far, P(u8), P(u8), i64)


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_dynamic_checks_take_memory_only_where_something_is_touched(kernel):
    """Two buffers of 70 GiB, of which the last bytes are used, with everything on that keeps a record of bytes."""
    before = peak_mib()
    device = Device(150 * GIB)
    x, o = (device.alloc(70 * GIB, name=name, poison=False) for name in ("x", "o"))
    offset = 70 * GIB - 64
    x.view()[offset:] = np.arange(64)
    x.mark(True, np.s_[offset:])
    stats = device.launch(kernel, 2, 32, [x, o, offset], global_race=True, stats=True, footprint=True)
    assert (o.view()[offset:] == np.arange(64)).all()
    assert stats.buffers["x"].distinct_sectors_read == 2
    tail = stats.footprint._bytes("written", "o")[offset - 64 :]
    np.testing.assert_array_equal(tail[:, 0], np.arange(128) >= 64)
    with pytest.raises(MemoryFault, match="0 bytes past the end of x"):
        device.launch(kernel, 2, 32, [x, o, offset + 32], global_race=True)
    with pytest.raises(MemoryFault, match="uninitialised global load"):
        device.launch(kernel, 1, 32, [x, o, 1 << 32])
    assert peak_mib() - before < 150


def test_growing_keeps_everything(kernel, monkeypatch):
    """Where a system gives no address space for nothing, memory grows."""
    monkeypatch.setattr(emulator_device, "_large_device", lambda: Device(1 << 10))
    arrays = [np.full(3000 + i, i, np.uint8) for i in range(4)]
    out = np.zeros(3000, np.uint8)
    with EmulatorDevice() as device:
        addresses = [device.address(f"a{i}", array) for i, array in enumerate(arrays)]
        device.scratch("w", 1 << 20)
        where = device.address("out", out)
        assert len(device.memory.space) > 1 << 20
        device.memory.launch(kernel, 1, 32, [addresses[3], where, 64])
    np.testing.assert_array_equal(out, np.where((np.arange(3000) >= 64) & (np.arange(3000) < 96), 3, 0))


def test_no_address_space(monkeypatch):
    given = []

    def small(nbytes):
        given.append(nbytes)
        if nbytes > 1 << 30:
            raise MemoryError
        return Device(nbytes)

    monkeypatch.setattr(emulator_device, "Device", small)
    EmulatorDevice()
    assert given == [1 << 40, 1 << 20]


def test_where_an_address_points():
    device = Device(1 << 20)
    a = device.alloc((3, 4), "f4", "a")
    assert device.describe(a.address) == "byte 0 of 48 in a, at a[0, 0]"
    assert device.describe(a.address + 47) == "byte 47 of 48 in a, at a[2, 3]"
    assert device.describe(a.address + 48) == "0 bytes past the end of a"
    assert device.describe(a.address - 1) == "1 bytes before a"
    assert device.describe(a.address + (1 << 30)) == "far from every buffer"
    assert Device(1 << 20).describe(a.address) == "far from every buffer"
    b = device.alloc(8, "u1", "b", align=512)
    assert b.address % 512 == 0
    assert b.address - (a.address + 48) >= GUARD
    view = np.zeros((4, 6), np.float32)[::-1, :4]
    assert device.describe(device.mirror(view, "m").address) == "byte 72 of 88 in m"
    device.free(a)
    assert device.describe(a.address) == "byte 0 of 48 in freed a, at a[0, 0]"
    for use in (a.get, a.mark, a.initialised):
        with pytest.raises(EmulatorError, match="buffer 'a' was freed"):
            use(*([True] if use == a.mark else []))
