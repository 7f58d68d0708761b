"""Where a call runs: the backend that its arrays and its options choose, and on CUDA the device and the stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .arrays import Array, as_kind_of, host_view, on_device
from .device_arrays import current_stream, empty, metadata

if TYPE_CHECKING:
    from .cuda.device import Device

BACKENDS = ("auto", "cpu", "cuda", "emulator")


class Side(NamedTuple):
    """Where a call runs.

    Attributes
    ----------
    backend : str
        "cpu", "cuda" or "emulator".
    ordinal, stream : int
        On CUDA the device, and the stream as a pointer; 0 on the host.
    """

    backend: str
    ordinal: int = 0
    stream: int = 0

    @property
    def on_host(self) -> bool:
        """True if the arrays of the call are on the host, so that their values can be checked."""
        return self.backend != "cuda"

    @contextmanager
    def device(self) -> Iterator[Device]:
        """What launches the kernels of a call that does not run on the CPU; imported when it is first needed.

        On CUDA no other thread launches on the stream until the ``with`` statement ends.

        Raises
        ------
        BackendUnavailableError
            There is no driver or no GPU, or a package is missing.
        """
        if self.backend == "emulator":
            from .emulator.device import EmulatorDevice

            with EmulatorDevice() as device:
                yield device
        else:
            from .cuda.driver import cuda_device

            gpu = cuda_device(self.ordinal, self.stream)
            with gpu.lock:
                yield gpu

    def new_array(
        self, name: str, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any], remedy: str
    ) -> tuple[Any, Array]:
        """An uninitialised array for a result, for the caller in the framework of `like`, and as kernels see it.

        Raises
        ------
        ValueError
            On CUDA: nothing is known of the framework of `like` but its interface; `remedy` says what to do instead.
        """
        if self.on_host:
            result = np.empty(shape, dtype)
            return as_kind_of(like, result), result
        array = empty(name, like, shape, dtype, remedy)
        return array, metadata(name, array, self.stream).shadow


_CPU, _EMULATOR = Side("cpu"), Side("emulator")


def place(backend: object, named: Sequence[tuple[str, Any]], *, across: bool = False) -> tuple[Side, list[Array]]:
    """Where the call runs that has these arrays, and the arrays for everyone who checks and computes.

    Parameters
    ----------
    backend : str
        "auto", "cpu", "cuda" or "emulator".
    named : sequence of (name, array)
        The arrays, by the names of their arguments. The first one on a device says which stream the call goes to.
    across : bool
        The operation may go from the host to a device and back.

    Returns
    -------
    Side
    list of numpy.ndarray
        Views of arrays on the host, shadows of arrays on a device, in the order of `named`.

    Raises
    ------
    TypeError
        Something is not an array.
    ValueError
        No such backend, arrays on the wrong side for it, on both sides, or on different devices.
    """
    if not (isinstance(backend, str) and backend in BACKENDS):
        raise ValueError(f'backend must be "auto", "cpu", "cuda" or "emulator", got {backend!r}')
    views: list[Array] = []
    for name, x in named:
        if type(x) is np.ndarray:
            views.append(x)
        elif on_device(name, x):
            return _place_on_device(backend, name, x, named, across)
        else:
            views.append(host_view(name, x))
    if backend == "cuda":
        raise ValueError(
            'backend "cuda" needs arrays on a CUDA device, got host arrays; move them or use backend "cpu"'
        )
    return _EMULATOR if backend == "emulator" else _CPU, views


def _place_on_device(
    backend: str, first: str, like: Any, named: Sequence[tuple[str, Any]], across: bool
) -> tuple[Side, list[Array]]:
    """`place`, where `first` is the name of the first array that is on a device."""
    on_devices = [on_device(name, x) for name, x in named]
    if not across and not all(on_devices):
        other = named[on_devices.index(False)][0]
        raise ValueError(f"all arrays of a call must be on one side, got {first} on a device and {other} on the host")
    if backend in ("cpu", "emulator"):
        raise ValueError(f'backend "{backend}" needs arrays on the host, got {first} on a device')
    stream = current_stream(like, first)
    views: list[Array] = []
    place_of_first = None
    for (name, x), device in zip(named, on_devices, strict=True):
        if not device:
            views.append(host_view(name, x))
            continue
        shadow, ordinal = metadata(name, x, stream)
        if place_of_first is None:
            place_of_first = ordinal
        elif ordinal not in (None, place_of_first):
            raise ValueError(
                f"all arrays of a call must be on one device, "
                f"got {first} on device {place_of_first} and {name} on device {ordinal}"
            )
        views.append(shadow)
    return Side("cuda", place_of_first or 0, stream), views
