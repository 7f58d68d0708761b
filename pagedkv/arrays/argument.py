"""An array that a caller has given: its framework and its side, found out once and carried with it.

Each framework has a file beside this one with a subclass for its arrays on the host, on a device, or both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar, Literal

import numpy as np

from ..layouts import VECTOR_BYTES
from .shadow import Array, Metadata

# An address, and everything else that validation looks at, as a hashable.
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
        """An uninitialised array beside this one: for the caller in this framework, and as kernels see it.

        Raises
        ------
        ValueError
            On a device, of a framework of which only the interface is known; `remedy` says what to do instead.
        """


class HostArgument(Argument):
    """An array on the host."""

    __slots__ = ()

    on_device: ClassVar[Literal[False]] = False

    @abstractmethod
    def view(self) -> Array:
        """A NumPy view: the same memory, nothing copied.

        Raises
        ------
        TypeError
            NumPy cannot show its memory or its dtype.
        """

    @abstractmethod
    def of_numpy(self, result: Array) -> Any:
        """A NumPy array as one of this framework, in the same memory."""

    def new(self, name: str, shape: Shape, dtype: np.dtype[Any], stream: int, remedy: str) -> tuple[Any, Array]:
        result = np.empty(shape, dtype)
        return self.of_numpy(result), result


class DeviceArgument(Argument):
    """An array in the memory of a GPU."""

    __slots__ = ()

    on_device: ClassVar[Literal[True]] = True

    @staticmethod
    def facts(x: Any) -> Facts:
        """What a call that is like an earlier one has to be compared by; quick, for that is all such a call looks at.

        Any exception says that x is not known well enough.
        """
        raise TypeError(f"a {type_name(x)} has no quick facts")

    @abstractmethod
    def stream(self) -> int:
        """The stream that work on the array goes to, as a pointer: its framework's current one.

        0 is the legacy default stream.

        Raises
        ------
        TypeError
            The array names something else as its stream.
        """

    @abstractmethod
    def metadata(self, stream: int) -> Metadata:
        """The shadow and the device.

        Parameters
        ----------
        stream : int
            The stream of the call, behind which a producer that only speaks DLPack puts itself.

        Raises
        ------
        TypeError
            It does not say what it should, or is what an array here cannot be (masked, lazily negated).
        ValueError
            It has elements but no memory, or numbers that no array has.
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
    """Where in a vector an address is; -1 if there is no memory, which is not like any."""
    return address & (VECTOR_BYTES - 1) if address else -1


def type_name(x: object) -> str:
    """The type of x, as messages name it."""
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
