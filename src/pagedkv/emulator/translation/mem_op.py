"""Memory instructions as the checks see them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ptx.instruction import Instruction


@dataclass(eq=False)
class MemOp:
    """What a memory instruction says; every execution hands it to the checks."""

    ins: Instruction
    kind: str  # load, store, atomic
    space: str
    element: int  # its bytes
    count: int = 1  # elements of the vector
    strong: bool = False  # volatile, relaxed, acquire, release or atomic: cannot race with its like
    acquire: bool = False
    release: bool = False
    grid: bool = True  # a strong access to global memory is one for all thread blocks, not for its own alone
    size: int = field(init=False)
    shift: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.element * self.count
        self.shift = self.element.bit_length() - 1
