"""A small kernel, made as those of the CPU backend are: the tests of their disk cache say in which process."""

from unittest import mock

import numpy as np
from numba import float64

from pagedkv.cpu import compile as kernels


def make() -> str:
    """Make the kernel, from disk or not, and call it; returns which of the two it was."""

    def double(values):
        for i in range(values.size):
            values[i] *= 2
        return np.zeros(values.size).size

    with mock.patch.object(kernels, "_load", wraps=kernels._load) as load:
        kernel = kernels.compile_kernel(double, (float64[::1],), ("config", 1), keep=True)
    values = np.arange(3.0)
    assert kernel(values) == 3
    assert values.tolist() == [0, 2, 4]
    return "loaded" if load.called else "compiled"
