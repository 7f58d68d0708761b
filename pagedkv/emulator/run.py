"""Run a user's kernel on NumPy arrays, in one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .device import EmulatorDevice
from .errors import EmulatorError
from .machine.launch import dims
from .state.stats import LaunchStats
from .state.warp_trace import Warp, require_warp


class _Kernel(NamedTuple):
    name: str
    entry: str
    ptx: str
    num_threads: int | Sequence[int]


def run(
    kernel: Callable[..., Any],
    grid: int | Sequence[int],
    threads: int | Sequence[int],
    *args: Any,
    shared_bytes: int = 0,
    capability: tuple[int, int] = (9, 0),
    device: EmulatorDevice | None = None,
    trace: Warp | None = None,
) -> LaunchStats:
    """Compile a kernel for numba.cuda, run it on NumPy arrays without a GPU, and check every access.

    ``run(kernel, grid, threads, *args)`` is what ``kernel[grid, threads](*args)`` is on a GPU. When it returns, the
    arrays hold what the kernel wrote; after a fault they are as before.

    Parameters
    ----------
    kernel : callable
        A function for ``numba.cuda.jit``, decorated or not.
    grid, threads : int or sequence of up to three int
        Sizes of the grid and of a thread block.
    *args : numpy.ndarray or number
        Arrays of any strides. Each is copied by itself, as to a GPU, so arrays that overlap do not see each other's
        writes. A Python int is an int64, a float a float64; a NumPy scalar has its own type.
    shared_bytes : int
        Dynamic shared memory of a thread block, for ``cuda.shared.array(0, ...)``.
    capability : tuple of int
        Compute capability to compile for.
    device : EmulatorDevice, optional
        A device with other checks and counts. By default one that looks for races on global memory, too. Its
        `launches` get the result.
    trace : Warp, optional
        Record each instruction of this warp, as the `trace` of the result or of the fault.

    Returns
    -------
    LaunchStats

    Raises
    ------
    EmulatorError
        Hardware would refuse the launch, or it does not have the warp to trace. The kernel's fault is a subclass,
        which names the Python line.
    TypeError
        There are too few arguments or too many, one is neither an array nor a number, `device` is no EmulatorDevice, or
        `trace` is no Warp.
    BackendUnavailableError
        numba-cuda is not installed.

    Notes
    -----
    If numba cannot compile the kernel, its own exception is raised.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> from pagedkv import emulator
    >>> def double(x):
    ...     x[cuda.threadIdx.x] *= 2
    >>> x = np.arange(32, dtype=np.float32)
    >>> stats = emulator.run(double, 1, 32, x)
    >>> x[:4]
    array([0., 2., 4., 6.], dtype=float32)
    """
    if device is not None and not isinstance(device, EmulatorDevice):
        raise TypeError(f"device must be an EmulatorDevice, such as EmulatorDevice(seed=1), or None, got {device!r}")
    require_warp(trace)
    if trace is not None and not trace.is_in(dims(grid, "grid"), dims(threads, "threads")):
        raise EmulatorError(f"a grid of {grid} thread blocks of {threads} threads does not have {trace}")
    from ..compiler.own_kernels import compile_own  # needs numba-cuda, and nothing else here does

    python = getattr(kernel, "py_func", kernel)
    names = [*inspect.signature(python).parameters]
    if len(args) != len(names):
        raise TypeError(f"kernel {python.__name__} takes {len(names)} arguments ({', '.join(names)}), got {len(args)}")
    own = compile_own(kernel, args, capability)
    settings = device or EmulatorDevice(global_race=True)
    with settings.again(trace) as fresh:
        values: list[int | float] = []
        for name, arg in zip(names, args, strict=True):
            if not isinstance(arg, np.ndarray):
                values.append(arg)
                continue
            # The parameters of one array argument of numba-cuda: no owner, its size, and where its elements are.
            # They are aligned like numba's own copies on a GPU, since counts would depend on where NumPy puts arrays.
            values += [0, 0, arg.size, arg.itemsize, fresh.address(name, arg, aligned=True), *arg.shape, *arg.strides]
        fresh.launch(_Kernel(own.name, "", own.ptx, threads), grid, values, shared_bytes)
    return fresh.launches[-1]
