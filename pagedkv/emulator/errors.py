"""What the emulator raises when it cannot run a kernel, and the source lines that a fault names."""

from __future__ import annotations

from typing import NamedTuple

Coordinates = tuple[int, int, int]


class SourceLine(NamedTuple):
    """A line of the Python source that an instruction was compiled from.

    Attributes
    ----------
    file : str
        The file's path.
    line : int
        The line's number, from 1.
    text : str
        The line itself, without indentation; empty if the file cannot be read.
    """

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f": {self.text}" if self.text else "")


class EmulatorError(RuntimeError):
    """The emulator cannot parse or start this; base class of everything it raises."""


class UnsupportedInstructionError(EmulatorError):
    """The kernel executed an instruction, or called a function, that the emulator does not model."""
