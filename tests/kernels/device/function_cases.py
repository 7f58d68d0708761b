"""Runs one device function in the emulator, a thread for each word."""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from pagedkv.cuda.compiler.compile import compile_kernel
from pagedkv.emulator import EmulatorDevice
from pagedkv.kernels.device.intrinsics import thread as device
from pagedkv.kernels.device.source import KernelSource

BYTES = types.CPointer(types.uint8)


class Case(NamedTuple):
    """A config that holds a function, so that its kernel is not kept on disk."""

    function: Any


def run(function, source, result, capability=(9, 0)):
    """`result` after one thread for each word of `source` has run ``function(source, result, i)``."""
    each = cuda.jit(device=True)(function)

    def kernel(source, result, count):
        i = cuda.blockIdx.x * 128 + cuda.threadIdx.x
        if i < count:
            each(device.address(source), device.address(result), i)

    def make_one(config):
        return KernelSource(kernel, types.void(BYTES, BYTES, types.int64), 128)

    count = source.nbytes // 4
    with EmulatorDevice() as emulator:
        compiled = compile_kernel(make_one, Case(function), capability)
        addresses = [emulator.address("source", source), emulator.address("result", result)]
        emulator.launch(compiled, (-(-count // 128), 1, 1), [*addresses, count])
    return result


def all_floats():
    """float32 of every sign, exponent and upper mantissa, at and beside the middles between shorter formats."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    anything = np.random.default_rng(0).integers(0, 2**32, 2**16, np.uint32)
    return np.concatenate([upper, upper + 1, upper + 0x7FFF, upper + 0x8000, upper + 0x8001, anything])
