"""A kernel to compile, and its config."""

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int32, types

from pagedkv.kernels.device.source import KernelSource


@dataclass(frozen=True, slots=True)
class Config:
    factor: int
    score_mod: Callable | None = None


@cuda.jit(device=True)
def shared_by_all_kernels(x):
    return x + float32(1)


def make_scale(config):
    """values[i] = (values[i] + 1) * factor, and score_mod of it."""
    factor = float32(config.factor)
    score_mod = getattr(config, "score_mod", None)
    user = None if score_mod is None else cuda.jit(device=True)(getattr(score_mod, "py_func", score_mod))

    @cuda.jit(device=True)
    def scale(x):
        return shared_by_all_kernels(x) * factor

    def kernel(values, count):
        i = cuda.grid(1)
        if i < count:
            value = scale(values[i])
            if user is not None:
                value = float32(user(value, int32(i), int32(i), int32(0), int32(0)))
            values[i] = value

    return KernelSource(kernel, types.void(types.CPointer(float32), types.int64), 64)
