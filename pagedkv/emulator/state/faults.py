"""Faults: what a running kernel did that hardware does not define."""

from __future__ import annotations

from ..errors import Coordinates, EmulatorError, SourceLine
from .warp_trace import WarpTrace


class KernelFault(EmulatorError):
    """A running kernel did something illegal.

    Attributes
    ----------
    what : str
        A short description of the fault.
    kernel : str
        Name of the kernel.
    source : SourceLine or None
        The Python line of the instruction; None if the PTX has no line information.
    callers : tuple of SourceLine
        The calling lines, innermost first, if it was inlined from a device function.
    line, text : int and str
        Line number and text of the PTX instruction.
    thread_block, thread : tuple of int, or None
        Coordinates (x, y, z) of the thread, if it is a single one.
    address : int or None
        The offending address.
    place : str
        The array at that address, and the byte or element in it.
    trace : WarpTrace or None
        The steps of the traced warp up to the fault, with ``trace=``.
    """

    def __init__(
        self,
        what: str,
        *,
        kernel: str,
        line: int,
        text: str,
        source: tuple[SourceLine, ...] = (),
        thread_block: Coordinates | None = None,
        thread: Coordinates | None = None,
        address: int | None = None,
        place: str = "",
    ) -> None:
        self.what, self.kernel, self.line, self.text = what, kernel, line, text
        self.source: SourceLine | None = source[0] if source else None
        self.callers = source[1:]
        self.thread_block, self.thread, self.address, self.place = thread_block, thread, address, place
        self.trace: WarpTrace | None = None
        parts = [what]
        if address is not None:
            parts.append(f"address {address:#x} ({place})")
        if thread_block is not None:
            parts.append(f"thread block {thread_block}, thread {thread}")
        parts.append(f"kernel {kernel}")
        if source:
            parts.append(f"at {source[0]}" + "".join(f", called from {caller}" for caller in self.callers))
        parts.append(f"PTX line {line}: {text}")
        super().__init__("; ".join(parts))


class MemoryFault(KernelFault):
    """An access out of bounds, misaligned, or to freed or uninitialised bytes, or a store to a read-only array."""


class RaceFault(KernelFault):
    """Two conflicting accesses that nothing orders, or a use of data that a cp.async is still copying."""


class SyncFault(KernelFault):
    """Barrier divergence, a deadlock, or a warp operation that names absent lanes."""


class TrapFault(KernelFault):
    """The kernel executed a trap, as a failed assertion does."""
