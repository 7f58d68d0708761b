"""Devices for tests of kernels: the emulator, and a GPU in its place, to which NumPy arrays go and come back."""

import ctypes
from types import SimpleNamespace

import numpy as np

from pagedkv.emulator import EmulatorDevice
from pagedkv.emulator.state.memory import extent

GUARD = 256
FILL = 0xA5


def emulator(**checks: bool | int) -> EmulatorDevice:
    """An emulator that runs the kernels a GPU gets: they name no lines, and each is compiled once for all tests."""
    device = EmulatorDevice(**checks)
    device.lineinfo = False
    return device


def with_capability(device, capability):
    """The device; an emulator is said to have this compute capability, and a GPU has its own."""
    if isinstance(device, EmulatorDevice):
        device.capability = capability
    return device


class CopyingDevice:
    """Runs kernels of another Device on copies of NumPy arrays, as EmulatorDevice does.

    Each array is copied with what lies between its elements, at an address of the array's own alignment, between bytes
    that nobody may write. When the ``with`` statement ends without an exception, elements that a kernel has written are
    copied back, and a byte written anywhere else is an AssertionError.
    """

    def __init__(self, device):
        self._device = device
        self.capability, self.max_shared_bytes = device.capability, device.max_shared_bytes
        self.lineinfo = device.lineinfo
        self.launches = []
        self._arrays = {}

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if kind is None:
            for copy in self._arrays.values():
                self._copy_back(copy)

    def address(self, name, array):
        host = array.__array_interface__["data"][0]
        low, high = extent(array.shape, array.strides, array.itemsize)
        key = host, array.shape, array.strides, array.dtype
        copy = self._arrays.get(key)
        if copy is None:
            first = GUARD + (host + low) % GUARD
            sent = np.full(first + high - low + GUARD, FILL, np.uint8)
            sent[first : first + high - low] = _bytes_at(host + low, high - low)
            address = self._device.scratch(f"array {len(self._arrays)}", sent.nbytes)
            self._device.copy_from_host([(address, sent)])
            copy = SimpleNamespace(array=array, name=name, address=address, sent=sent, element_0=first - low)
            self._arrays[key] = copy
        elif array.flags.writeable:  # of two views of one array, one may be written
            copy.array = array
        return copy.address + copy.element_0

    def _copy_back(self, copy):
        received = np.empty_like(copy.sent)
        self._device.copy_to_host([(received, copy.address)])
        is_element = np.zeros(len(received), bool)
        _elements(is_element, copy)[...] = copy.array.flags.writeable
        strays = np.flatnonzero((received != copy.sent) & ~is_element)
        assert not strays.size, f"{strays.size} bytes beside {copy.name} were written, first {strays[0]}"
        new, old = (np.ascontiguousarray(_elements(x, copy)) for x in (received, copy.sent))
        changed = (new != old).any(axis=-1)
        if changed.any():
            copy.array[changed] = new.view(copy.array.dtype)[..., 0][changed]

    def scratch(self, name, nbytes):
        return self._device.scratch(name, nbytes)

    def blocks_at_once(self, *kernel):
        return self._device.blocks_at_once(*kernel)

    def launch(self, *launch):
        self._device.launch(*launch)
        # Waits, so that an error is that of this launch.
        self._device.copy_to_host([(np.empty(1, np.uint8), self._device.scratch("waited for", 1))])
        self.launches.append(SimpleNamespace(kernel=launch[0].name, footprint=None))

    def copy_from_host(self, parts):
        self._device.copy_from_host(parts)

    def copy_to_host(self, parts):
        self._device.copy_to_host(parts)

    def take(self, name):
        return self._device.take(name)


def few_at_once(open_device, count):
    """Opens devices that run so many thread blocks at once; a GPU runs as many as it can."""

    def opened(**checks):
        device = open_device(**checks)
        device.num_blocks_at_once = count
        return device

    return opened


class OneMemory(EmulatorDevice):
    """An emulator that knows workspaces alone, as a GPU does."""

    def address(self, name, array):
        raise AssertionError("an array of the host is nothing to a GPU")


def _bytes_at(address, nbytes):
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def _elements(buffer, copy):
    """A view of the bytes in a copy of what was sent: the axes of the array, and the bytes of an element."""
    array = copy.array
    return np.lib.stride_tricks.as_strided(
        buffer[copy.element_0 :], (*array.shape, array.itemsize), (*array.strides, 1)
    )
