"""What plans need of a device, which is the CUDA driver (driver.py) or the emulator (emulator/device.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ..arrays import Array

if TYPE_CHECKING:
    from ..compiler.compile import CompiledKernel

# The most thread blocks of a launch in x, and in each of y and z.
LARGEST_GRID_X, LARGEST_GRID_Y = 2**31 - 1, 65535
FIRST_WITH_FP8 = (8, 9)  # the first compute capability with instructions for fp8
REPORT = "report"  # the workspace in which checked kernels record the first bad entry


class Device(Protocol):
    """Memory and launches: of a GPU and a stream, of the graphs that are captured there, or of the emulator.

    Attributes
    ----------
    capability : tuple of int
        Compute capability, (9, 0) for an H100.
    max_shared_bytes : int
        Shared memory that one block can have when it opts in.
    lineinfo : bool
        Whether kernels are compiled with the lines of their source.
    """

    @property
    def capability(self) -> tuple[int, int]: ...

    @property
    def max_shared_bytes(self) -> int: ...

    @property
    def lineinfo(self) -> bool: ...

    def address(self, name: str, array: Array) -> int:
        """The device address of element 0 of an array.

        Parameters
        ----------
        name : str
            The caller's argument, for messages.
        array : numpy.ndarray
            For the emulator an array on the host. For CUDA an array that only has the address, shape, strides and dtype
            of the caller's device array, and that is never read.

        Returns
        -------
        int
        """
        ...

    def scratch(self, name: str, nbytes: int) -> int:
        """The address of a workspace of at least `nbytes` bytes, one for each name, 256-byte aligned.

        It is zero when it is first allocated and whenever it grows; otherwise it is as the last kernel left it. It
        belongs to this device and stream. Another call for the same name may free it, once the stream is done.
        """
        ...

    def blocks_at_once(self, kernel: CompiledKernel, shared_bytes: int) -> int:
        """How many thread blocks of a kernel, with this much dynamic shared memory each, run at the same time."""
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
            Compiled for this device's capability.
        grid : tuple of int
            Blocks in x, y and z, each at least 1.
        args : sequence of int or float
            One for each parameter of the kernel: int for a pointer or an int64, float for a float64.
        shared_bytes : int
            Dynamic shared memory of a block, at most `max_shared_bytes`.
        """
        ...

    def copy_from_host(self, parts: Sequence[tuple[int, Array]]) -> None:
        """Copy arrays of the host to the device, in the order of the stream.

        Parameters
        ----------
        parts : sequence of (int, numpy.ndarray)
            Where each array goes, C-contiguous. An array in pinned memory must not change before the stream has copied
            it; any other array may change when this returns.

        Raises
        ------
        RuntimeError
            The stream is being captured in a CUDA graph.
        """
        ...

    def copy_to_host(self, parts: Sequence[tuple[Array, int]]) -> None:
        """Fill arrays of the host from the device, in the order of the stream.

        Parameters
        ----------
        parts : sequence of (numpy.ndarray, int)
            Each array, C-contiguous, and where its bytes are. An array in pinned memory is filled when the stream comes
            to it; any other array is filled when this returns.

        Raises
        ------
        RuntimeError
            The stream is being captured in a CUDA graph.
        """
        ...

    def take(self, name: str) -> npt.NDArray[np.uint8] | None:
        """Wait until the GPU is done, return the bytes of a workspace, and zero them.

        None if `scratch` has not made it.
        """
        ...
