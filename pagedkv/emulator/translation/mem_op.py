"""Memory instructions, fences and wgmma, as the checks need them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ptx.instruction import Instruction


@dataclass(eq=False)
class MemOp:
    """A memory instruction; every execution passes it to the checks."""

    ins: Instruction
    kind: str  # load, store, atomic
    space: str
    element: int  # its bytes
    count: int = 1  # elements of the vector
    strong: bool = False  # volatile, relaxed, acquire, release or atomic
    acquire: bool = False
    release: bool = False
    observes: bool = False  # a strong read that a fence makes an acquire pattern: a load or an atom, never a red
    grid: bool = True  # its scope is all thread blocks, not its own alone
    read_only: bool = False  # ld.global.nc: nothing may store to its bytes in the whole launch
    size: int = field(init=False)
    shift: int = field(init=False)
    strong_class: int = field(init=False)  # morally strong with accesses of the same class; 0 if weak

    def __post_init__(self) -> None:
        self.size = self.element * self.count
        self.shift = self.element.bit_length() - 1
        self.strong_class = 1 + self.shift if self.strong else 0


@dataclass(frozen=True)
class Wgmma:
    """A wgmma.mma_async: m64n{n}k16, its elements, and how its operands lie."""

    n: int
    kind: str
    sign: int  # of the product
    a_is_mn_major: bool
    b_is_mn_major: bool


@dataclass(frozen=True)
class Fence:
    """A fence."""

    acquire: bool
    release: bool
    sc: bool
    grid: bool
