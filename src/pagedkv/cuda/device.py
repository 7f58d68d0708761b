"""What planning code asks of a device: the CUDA driver (driver.py) or the emulator (emulator/device.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ..arrays import Array

if TYPE_CHECKING:
    from .compile import CompiledKernel


class Device(Protocol):
    """Memory and launches of one GPU and one stream, or of the emulator.

    Attributes
    ----------
    capability : tuple of int
        Compute capability, (9, 0) for an H100.
    max_shared_bytes : int
        Shared memory that one block can have when it opts in.
    """

    @property
    def capability(self) -> tuple[int, int]: ...

    @property
    def max_shared_bytes(self) -> int: ...

    def address(self, name: str, array: Array) -> int:
        """The device address of element 0 of an array.

        Parameters
        ----------
        name : str
            The caller's argument, for messages.
        array : numpy.ndarray
            The emulator: an array on the host. CUDA: an array that only has the address, shape, strides and dtype of
            the caller's device array, and is never read.

        Returns
        -------
        int
        """
        ...

    def scratch(self, name: str, nbytes: int) -> int:
        """The address of a workspace of at least `nbytes` bytes, one for each name, 256-byte aligned.

        Zero when it is first allocated and each time it grows; other contents stay as the last kernel left them.
        It belongs to this device and stream and only grows.

        Raises
        ------
        RuntimeError
            It would have to grow while the stream is being captured in a CUDA graph.
        """
        ...

    def launch(
        self,
        kernel: CompiledKernel,
        grid: tuple[int, int, int],
        args: Sequence[int | float],
        shared_bytes: int = 0,
    ) -> None:
        """Start a kernel on the stream and return at once.

        Parameters
        ----------
        kernel : CompiledKernel
            Of this device's capability.
        grid : tuple of int
            Blocks in x, y and z, each at least 1.
        args : sequence of int or float
            One for each parameter of the kernel: int for a pointer or an int64, float for a float64.
        shared_bytes : int
            Dynamic shared memory of a block, at most `max_shared_bytes`.
        """
        ...

    def staging(self, name: str, nbytes: int) -> Array:
        """Host memory that copies go through at full speed (pinned, on CUDA), one for each name; it only grows.

        Returns
        -------
        numpy.ndarray
            (nbytes,) uint8, contents unspecified. It is written and read by the host only between `synchronize` and
            the next copy that names it.
        """
        ...

    def copy_from_host(self, destination: int, source: Array) -> None:
        """Copy the bytes of a C-contiguous host array to a device address, in the order of the stream.

        A `staging` array must not change until `synchronize`; any other array may change when this returns.
        """
        ...

    def copy_to_host(self, destination: Array, source: int) -> None:
        """Fill a C-contiguous host array from a device address, in the order of the stream.

        The bytes are there after `synchronize`.
        """
        ...

    def synchronize(self) -> None:
        """Wait until everything on the stream is done."""
        ...
