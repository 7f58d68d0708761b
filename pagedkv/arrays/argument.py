"""An array argument together with its framework and device, which are determined once.

Each other framework has a module in this folder with a subclass for its arrays on the host, on a device, or both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar, Literal

import numpy as np

from ..layouts import VECTOR_BYTES
from .shadow import Array, Metadata

# The address of an array, and everything else that validation looks at in a form that can be hashed.
Facts = tuple[int, Hashable]
Shape = tuple[int, ...]


class Argument(ABC):
    """An array of any framework.

    Parameters
    ----------
    name : str
        What the caller's argument is called, for messages.
    array : array
        The caller's own object.
    """

    __slots__ = ("array", "name")

    on_device: ClassVar[bool]

    def __init__(self, name: str, array: Any) -> None:
        self.name, self.array = name, array

    @abstractmethod
    def new(self, name: str, shape: Shape, dtype: np.dtype[Any], stream: int, remedy: str) -> tuple[Any, Array]:
        """Make an uninitialised array on the same device: in this framework for the caller, and as kernels see it.

        Raises
        ------
        ValueError
            pagedkv cannot allocate in this framework; `remedy` says what to do instead.
        """


class HostArgument(Argument):
    """An array on the host."""

    __slots__ = ()

    on_device: ClassVar[Literal[False]] = False

    @abstractmethod
    def view(self) -> Array:
        """View the array with NumPy, without a copy.

        Raises
        ------
        TypeError
            NumPy cannot show its memory or its dtype.
        """

    @abstractmethod
    def of_numpy(self, result: Array) -> Any:
        """Wrap a NumPy array as an array of this framework, without a copy."""

    def new(self, name: str, shape: Shape, dtype: np.dtype[Any], stream: int, remedy: str) -> tuple[Any, Array]:
        result = np.empty(shape, dtype)
        return self.of_numpy(result), result


class NumpyArray(HostArgument):
    """A NumPy array, possibly of a subclass."""

    __slots__ = ()

    def view(self) -> Array:
        return np.asarray(self.array)

    def of_numpy(self, result: Array) -> Any:
        return result


class DeviceArgument(Argument):
    """An array in the memory of a GPU."""

    __slots__ = ()

    on_device: ClassVar[Literal[True]] = True

    @staticmethod
    def facts(x: Any) -> Facts:
        """What to compare with an earlier call to repeat it; fast, since a repeated call looks at nothing else.

        Any exception means that the call has to be validated in full.
        """
        raise TypeError(f"a {type_name(x)} has no quick facts")

    @staticmethod
    def address(x: Any) -> int:
        """The address of element 0 of an array of this kind; any exception as from `facts`."""
        raise TypeError(f"the address of a {type_name(x)} is not quick to read")

    @abstractmethod
    def stream(self) -> int:
        """The framework's current stream on the array's device, as a pointer.

        0 is the legacy default stream.

        Raises
        ------
        TypeError
            The array names something else as its stream.
        """

    @abstractmethod
    def metadata(self, stream: int) -> Metadata:
        """The shadow of the array, and its device.

        Parameters
        ----------
        stream : int
            The stream of the call; a producer that only speaks DLPack orders its work before it.

        Raises
        ------
        TypeError
            Its interface is incomplete, or the array is masked or lazily negated.
        ValueError
            It has elements but no memory, or a shape or strides that no array can have.
        BackendUnavailableError
            It only speaks DLPack, and cuda-core, which reads it, is not installed.
        """

    def empty(self, name: str, shape: Shape, dtype: np.dtype[Any], remedy: str) -> Any:
        """An uninitialised array in this framework and on this device; see `new`."""
        raise ValueError(
            f"{name} can only be made for arrays of CuPy and torch, got a {type_name(self.array)}; {remedy}"
        )

    def new(self, name: str, shape: Shape, dtype: np.dtype[Any], stream: int, remedy: str) -> tuple[Any, Array]:
        array = self.empty(name, shape, dtype, remedy)
        return array, type(self)(name, array).metadata(stream).shadow


def low_bits(address: int) -> int:
    """The offset of an address within a 16-byte vector; -1 if there is no memory."""
    return address & (VECTOR_BYTES - 1) if address else -1


def type_name(x: object) -> str:
    """The type of x, as messages name it."""
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
