"""Copies through pinned memory, on a GPU that does nothing before somebody waits for it."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.cuda import copies as module
from pagedkv.cuda.copies import StreamCopies

STREAM = 5
HALF_BYTES = 64


class LazyGpu:
    """A stream that runs as far as an event that is waited for, and memory of its own.

    Copies that are not to or from pinned memory are refused: the GPU would not do them behind the host's back.
    """

    def __init__(self, num_bytes):
        self.driver = self
        self.CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
        self.memory = np.zeros(num_bytes, np.uint8)
        self.pinned_arrays, self.queue, self.num_waits = [], [], 0

    def call(self, function, *args):
        return function(*args)

    def pinned(self, nbytes):
        self.pinned_arrays.append(np.full(nbytes, 0xEE, np.uint8))
        return self.pinned_arrays[-1]

    def is_pinned(self, address):
        return any(x.ctypes.data <= address < x.ctypes.data + x.nbytes for x in self.pinned_arrays)

    def _host(self, address, nbytes):
        assert self.is_pinned(address), "the GPU was told to copy pageable memory"
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)

    def cuMemcpyHtoDAsync(self, destination, source, nbytes, stream):
        assert stream == STREAM
        self.queue.append((self.memory[destination : destination + nbytes], self._host(source, nbytes)))

    def cuMemcpyDtoHAsync(self, destination, source, nbytes, stream):
        assert stream == STREAM
        self.queue.append((self._host(destination, nbytes), self.memory[source : source + nbytes]))

    def cuEventCreate(self, flags):
        assert flags == 2
        return object()

    def cuEventRecord(self, event, stream):
        assert stream == STREAM
        self.queue.append(event)

    def cuEventSynchronize(self, event):
        self.num_waits += 1
        if event in [x for x in self.queue if not isinstance(x, tuple)]:
            while self.run_one() is not event:
                pass

    def run_one(self):
        step = self.queue.pop(0)
        if isinstance(step, tuple):
            step[0][:] = step[1]
        return step

    def finish(self):
        while self.queue:
            self.run_one()


@pytest.fixture(autouse=True, scope="module")
def small_halves():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "HALF_BYTES", HALF_BYTES)
        yield


SIZES = st.lists(st.lists(st.integers(0, 3 * HALF_BYTES), max_size=8), min_size=1, max_size=4)


def places(sizes):
    ends = np.cumsum([0, *sizes])
    return [int(x) for x in ends[:-1]], int(ends[-1])


@given(calls=SIZES, pinned=st.sets(st.integers(0, 7)), seed=st.integers(0, 100))
def test_what_is_sent_is_what_was_there_at_the_call(calls, pinned, seed):
    rng = np.random.default_rng(seed)
    addresses, num_bytes = places([size for sizes in calls for size in sizes])
    gpu = LazyGpu(num_bytes)
    copies = StreamCopies(gpu, STREAM)
    expected, addresses = [], iter(addresses)
    for sizes in calls:
        sources = [rng.integers(0, 256, size, np.uint8) for size in sizes]
        expected += [x.copy() for x in sources]
        gpu.pinned_arrays += [x for i, x in enumerate(sources) if i in pinned]
        copies.to_device([(next(addresses), x) for x in sources])
        for i, x in enumerate(sources):
            if i not in pinned:
                x[:] = 0xDD
    gpu.finish()
    np.testing.assert_array_equal(gpu.memory, np.concatenate([*expected, np.zeros(0, np.uint8)]))


@given(calls=SIZES, pinned=st.sets(st.integers(0, 7)), seed=st.integers(0, 100))
def test_pageable_memory_is_filled_when_the_call_returns(calls, pinned, seed):
    rng = np.random.default_rng(seed)
    addresses, num_bytes = places([size for sizes in calls for size in sizes])
    gpu = LazyGpu(num_bytes)
    gpu.memory[:] = rng.integers(0, 256, num_bytes, np.uint8)
    copies, addresses = StreamCopies(gpu, STREAM), iter(addresses)
    later = []
    for sizes in calls:
        parts = [(np.full(size, 0xDD, np.uint8), next(addresses)) for size in sizes]
        gpu.pinned_arrays += [x for i, (x, _) in enumerate(parts) if i in pinned]
        copies.to_host(parts)
        for i, (x, address) in enumerate(parts):
            if i in pinned:
                later.append((x, address))
            else:
                np.testing.assert_array_equal(x, gpu.memory[address : address + len(x)])
    gpu.finish()
    for x, address in later:
        np.testing.assert_array_equal(x, gpu.memory[address : address + len(x)])


def test_pinned_memory_is_not_waited_for():
    gpu = LazyGpu(1000)
    array = gpu.pinned(400)
    copies = StreamCopies(gpu, STREAM)
    copies.to_device([(0, array), (500, array)])
    copies.to_host([(array, 100)])
    assert (gpu.num_waits, len(gpu.pinned_arrays), len(gpu.queue)) == (0, 1, 3)


def test_a_little_to_the_device_is_not_waited_for():
    gpu = LazyGpu(1000)
    copies = StreamCopies(gpu, STREAM)
    for _ in range(4):
        copies.to_device([(0, np.zeros(HALF_BYTES // 4, np.uint8))])
    assert gpu.num_waits == 0
    assert len(gpu.pinned_arrays) == 2


def test_a_failed_copy_leaves_nothing_for_the_next_one():
    gpu = LazyGpu(1000)
    gpu.memory[:] = 7
    copies = StreamCopies(gpu, STREAM)
    first, second, third = (np.zeros(8, np.uint8) for _ in range(3))
    fetch, fails = gpu.cuMemcpyDtoHAsync, iter([False, True])
    gpu.cuMemcpyDtoHAsync = lambda *args: 1 / 0 if next(fails) else fetch(*args)
    with pytest.raises(ZeroDivisionError):
        copies.to_host([(first, 0), (second, 8)])
    gpu.cuMemcpyDtoHAsync = fetch
    copies.to_host([(third, 0)])
    assert (first.any(), second.any(), third.tolist()) == (False, False, [7] * 8)


@pytest.mark.parametrize("dtype", [np.float16, np.int64])
def test_any_shape_and_dtype(dtype):
    gpu = LazyGpu(1000)
    copies = StreamCopies(gpu, STREAM)
    source = np.arange(24, dtype=dtype).reshape(2, 3, 4)
    destination = np.zeros_like(source)
    copies.to_device([(16, source)])
    copies.to_host([(destination, 16)])
    np.testing.assert_array_equal(destination, source)
