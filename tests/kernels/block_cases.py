"""What the tests of the kernels on blocks and states share: arrays with gaps, sparse memory, code for every GPU."""

import math

import numpy as np
import pytest

from pagedkv.calls import CopyCall, SwapCall
from pagedkv.compiler.compile import compile_kernel
from pagedkv.compiler.link import link
from pagedkv.cuda.backend import KernelBackend
from pagedkv.emulator import EmulatorDevice
from pagedkv.placement import Placement

from ..support.strategies import long

ON_HOST = Placement("emulator", 0, 0, None)
STRIDES = ["own", "halves", "padded"]


def without_device():
    """The backend of the kernels for calls that need no device: asking for one is a failure."""
    return KernelBackend(lambda placement: pytest.fail("a device was asked for"))


def copying(caches, pairs, *, checked=False):
    """A call of copy_blocks, its arguments taken for valid."""
    return CopyCall(ON_HOST, caches, pairs, checked)


def swapping(copies, pairs):
    """A call of swap_blocks, its arguments taken for valid."""
    return SwapCall(ON_HOST, copies, pairs, checked=False)


def random_bits(rng, shape, dtype):
    """An array of random bytes: any value, NaN too."""
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


def pair_of(parts, strides, rng):
    """Two arrays of random bytes: apart, interleaved blocks of one array, or with gaps on every axis."""
    if strides == "halves":
        shape, dtype = parts[0]
        both = random_bits(rng, (shape[0], 2, math.prod(shape[1:])), dtype)
        return [both[:, i].reshape(shape) for i, (shape, _) in enumerate(parts)]
    pair = [random_bits(rng, *part) for part in parts]
    return pair if strides == "own" else [with_gaps(x, gap) for gap, x in enumerate(pair, 1)]


def with_gaps(array, gap):
    """The same elements in a larger array, rows at multiples of 16 bytes."""
    per_vector = 16 // array.itemsize
    row = -(-array.shape[-1] // per_vector) * per_vector + gap * per_vector
    inside = (*(slice(gap, None) for _ in array.shape[:-1]), slice(per_vector, per_vector + array.shape[-1]))
    large = np.zeros((*(n + gap for n in array.shape[:-1]), row + per_vector), array.dtype)
    large[inside] = array
    return large[inside]


class SparseDevice(EmulatorDevice):
    """An emulator on which arrays past 4 GiB are memory that nothing has touched; what they become is in `large`."""

    lineinfo = False

    def __init__(self):
        super().__init__()
        self.large = {}

    def address(self, name, array):
        if array.nbytes < 2**32:
            return super().address(name, array)
        if name not in self.large:
            self.memory.reserve(array.nbytes + 1024)
            self.large[name] = self.memory.alloc(array.shape, array.dtype, name, poison=False)
        return self.large[name].address


# Without instructions for fp8, and with them.
BOTH_FP8 = pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids="cc{0[0]}.{0[1]}".format)


def every_third_for_all(configs):
    """(config, capability): each config for 9.0, which the emulator runs anyway, and some for the other two by turns.

    For both in a long run.
    """
    others = [(config, (capability, 0)) for config in configs[::3] for capability in (8, 10)]
    turns = [others[2 * i + i % 2] for i in range(len(others) // 2)]
    return [*((config, (9, 0)) for config in configs), *turns, *long(case for case in others if case not in turns)]


def assert_links(make, config, capability, max_registers=64):
    """The kernel is whole, has everything in registers, and leaves room for half of the threads that there can be."""
    kernel = compile_kernel(make, config, capability)
    assert ".extern" not in kernel.ptx
    assert ".local" not in kernel.ptx
    resources = link(kernel.ptx, capability).resources()
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0)
    assert resources.registers <= max_registers
