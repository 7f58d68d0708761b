"""What the emulator raises."""

from __future__ import annotations

from typing import NamedTuple

Coordinates = tuple[int, int, int]


class SourceLine(NamedTuple):
    """A line of the Python source that an instruction was compiled from."""

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f": {self.text}" if self.text else "")


class EmulatorError(RuntimeError):
    """What the emulator cannot parse or start, and the base class of everything it raises."""


class UnsupportedInstructionError(EmulatorError):
    """The kernel executed an instruction, or called a function, that the emulator does not model."""


class KernelFault(EmulatorError):
    """A running kernel did what it must not do.

    Attributes
    ----------
    what : str
        The fault in a few words.
    kernel : str
        Name of the kernel.
    source : SourceLine or None
        The Python line that the instruction comes from; None without line information in the PTX.
    callers : tuple of SourceLine
        The lines that called it, from the inside out, where it was inlined from a device function.
    line, text : int and str
        Line number and text of the PTX instruction.
    thread_block, thread : tuple of int, or None
        Coordinates (x, y, z) of the thread, where one is to blame.
    address : int or None
        The address it used.
    place : str
        Where that address points: the array, and the byte or element of it.
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
    """An access out of bounds, misaligned, to freed or never written bytes, or a store to a read-only array."""


class RaceFault(KernelFault):
    """Two conflicting accesses that nothing orders, or use of data of an unfinished cp.async."""


class SyncFault(KernelFault):
    """Barrier divergence, deadlock, or a warp operation whose named lanes are not there."""


class TrapFault(KernelFault):
    """The kernel executed a trap: an assertion that failed."""
