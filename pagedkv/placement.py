"""Placement: the backend of a call, and on CUDA its device and stream, as its arrays and options choose them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

import numpy as np

from .arrays import Argument, Array, DeviceArgument, HostArgument, identify
from .typing import Backend

if TYPE_CHECKING:
    from .emulator import EmulatorDevice

Optional = TypeVar("Optional", Array, Array | None)
BACKENDS = get_args(Backend)


class Placement(NamedTuple):
    """The backend, device and stream of a call.

    Attributes
    ----------
    backend : str
        "cpu", "cuda" or "emulator".
    ordinal, stream : int
        On CUDA the device, and the stream as a pointer; 0 on the host.
    beside : Argument or None
        The first array of the call, if it has any: results belong to its framework, and are on its device.
    emulator : EmulatorDevice or None
        The emulator that the caller passed, with its own checks.
    """

    backend: str
    ordinal: int
    stream: int
    beside: Argument | None
    emulator: EmulatorDevice | None = None

    @property
    def on_host(self) -> bool:
        """Whether the arrays of the call are on the host, so that their values can be validated."""
        return self.backend != "cuda"

    def private_copy(self, x: Optional) -> Optional:
        """Copy a small array on the host, so that kernels read what was validated, whatever other threads do.

        Arrays on a device are returned as they are, since their values are not validated.
        """
        return x.copy() if x is not None and self.on_host else x

    def columns(self, x: Array, num_used: int) -> Array:
        """The columns of a block table that kernels get: on the CPU only the first `num_used`, elsewhere all.

        CUDA kernels, and so those of the emulator, are chosen by the width of the table.
        """
        return x[..., :num_used] if self.backend == "cpu" else x

    def new_array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], remedy: str) -> tuple[Any, Array]:
        """Make an uninitialised array for a result: in the caller's framework, and as kernels see it.

        Raises
        ------
        ValueError
            pagedkv cannot allocate in the caller's framework; `remedy` says what to do instead.
        """
        assert self.beside is not None
        return self.beside.new(name, shape, dtype, self.stream, remedy)


def place(backend: object, named: Sequence[tuple[str, Any]], *, across: bool = False) -> tuple[Placement, list[Array]]:
    """Choose the backend, device and stream of a call, and view its arrays for validation and kernels.

    Parameters
    ----------
    backend : str or EmulatorDevice
        "auto", "cpu", "cuda" or "emulator", or an emulator.
    named : sequence of (name, array)
        The arrays, by the names of their arguments. The first one on a device says which stream the call goes to.
    across : bool
        Whether the operation may have arrays on the host and on a device.

    Returns
    -------
    Placement
    list of numpy.ndarray
        Views of arrays on the host, shadows of arrays on a device, in the order of `named`.

    Raises
    ------
    TypeError
        Something is not an array.
    ValueError
        No such backend, arrays on the wrong side for it, on both sides, or on different devices.
    """
    emulator = None
    if not isinstance(backend, str):
        from .emulator import EmulatorDevice

        if isinstance(backend, EmulatorDevice):
            emulator, backend = backend, "emulator"
    if not (isinstance(backend, str) and backend in BACKENDS):
        raise ValueError(f'backend must be "auto", "cpu", "cuda" or "emulator", got {backend!r}')
    views: list[Array] = []
    for name, x in named:
        if type(x) is not np.ndarray:
            argument = identify(name, x)
            if argument.on_device:
                return _place_on_device(backend, argument, [identify(*one) for one in named], across)
            x = argument.view()
        views.append(x)
    if backend == "cuda":
        raise ValueError(
            'backend "cuda" needs arrays on a CUDA device, got host arrays; move them or use backend "cpu"'
        )
    beside = identify(*named[0]) if named else None
    return Placement("emulator" if backend == "emulator" else "cpu", 0, 0, beside, emulator), views


def _place_on_device(
    backend: str, first: DeviceArgument, arguments: list[HostArgument | DeviceArgument], across: bool
) -> tuple[Placement, list[Array]]:
    """`place` for a call with arrays on a device; `first` is the first of them."""
    other = next((argument for argument in arguments if not argument.on_device), None)
    if other is not None and not across:
        raise ValueError(
            f"all arrays of a call must be on one side, got {first.name} on a device and {other.name} on the host"
        )
    if backend in ("cpu", "emulator"):
        raise ValueError(f'backend "{backend}" needs arrays on the host, got {first.name} on a device')
    stream = first.stream()
    views: list[Array] = []
    ordinal_of_first = None
    for argument in arguments:
        if isinstance(argument, HostArgument):
            views.append(argument.view())
            continue
        shadow, ordinal = argument.metadata(stream)
        if ordinal_of_first is None:
            ordinal_of_first = ordinal
        elif ordinal not in (None, ordinal_of_first):
            raise ValueError(
                f"all arrays of a call must be on one device, "
                f"got {first.name} on device {ordinal_of_first} and {argument.name} on device {ordinal}"
            )
        views.append(shadow)
    return Placement("cuda", ordinal_of_first or 0, stream, arguments[0]), views
