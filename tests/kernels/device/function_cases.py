"""Runs one device function, a thread for each word, in the emulator or on a GPU."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from numba import cuda, types

from pagedkv.compiler.compile import compile_kernel
from pagedkv.kernels.device.intrinsics import thread as device
from pagedkv.kernels.device.source import KernelSource

from ...support.devices import with_capability

BYTES = types.CPointer(types.uint8)


class Case(NamedTuple):
    """A config that holds a function, so that its kernel is not kept on disk."""

    function: Any


def run(open_device, function, source, result, capability=(9, 0), least=(8, 0)):
    """`result` after one thread for each word of `source` has run ``function(source, result, i)``.

    Compiled for a compute capability, or for that of the GPU if it has `least`.
    """
    each = cuda.jit(device=True)(function)

    def kernel(source, result, count):
        i = cuda.blockIdx.x * 128 + cuda.threadIdx.x
        if i < count:
            each(device.address(source), device.address(result), i)

    source_of_kernel = KernelSource(kernel, types.void(BYTES, BYTES, types.int64), 128)
    count = source.nbytes // 4
    grid = (-(-count // 128), 1, 1)
    launch(open_device, source_of_kernel, grid, [source, result, count], capability=capability, least=least)
    return result


def launch(open_device, source, grid, args, shared_bytes=0, *, capability=(9, 0), least=(8, 0)):
    """Launch a kernel with arrays and ints; the arrays are as it left them afterwards."""

    def make_one(config):
        return source

    with with_capability(open_device(), capability) as opened:
        if opened.capability < least or (source.is_specific and opened.capability != least):
            pytest.skip(f"needs compute capability {least[0]}.{least[1]}")
        compiled = compile_kernel(make_one, Case(source.function), opened.capability)
        assert compiled.cubin  # of what only the emulator runs, too: it is what a GPU would get
        addresses = [opened.address(f"argument {i}", x) if isinstance(x, np.ndarray) else x for i, x in enumerate(args)]
        opened.launch(compiled, grid, addresses, shared_bytes)


def all_floats():
    """float32 of every sign, exponent and upper mantissa, at and beside the middles between shorter formats."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    anything = np.random.default_rng(0).integers(0, 2**32, 2**16, np.uint32)
    return np.concatenate([upper, upper + 1, upper + 0x7FFF, upper + 0x8000, upper + 0x8001, anything])
