"""What is known of a memory instruction before it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ptx.instruction import Instruction


@dataclass(eq=False)
class MemOp:
    """One memory instruction: every execution of it passes this to the checks."""

    ins: Instruction
    kind: str  # load, store, atomic
    space: str
    element: int  # bytes per element
    count: int = 1  # elements of a vector
    strong: bool = False  # volatile, relaxed, acquire, release, atomic: does not race with other strong accesses
    release: bool = False
    size: int = field(init=False)
    shift: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.element * self.count
        self.shift = self.element.bit_length() - 1
