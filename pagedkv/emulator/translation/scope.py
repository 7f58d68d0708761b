"""The names in a kernel's generated code, which all of its blocks share."""

from __future__ import annotations

from typing import Any

from ..ptx.program import Program


class Scope:
    """Records every name that the code uses, so that a launch makes just the arrays it needs.

    Attributes
    ----------
    registers : dict of str to str
        PTX type of each register.
    python_name : dict of str to str
        The code's name for a register, without the view's suffix.
    views : set of (str, str)
        Python name and view of every register in use.
    constants : dict
        Names of constants, by (kind, value, view).
    specials : set of str
        Special registers in use.
    objects : dict of str to object
        Instructions and MemOps that the code passes to calls.
    """

    def __init__(self, program: Program) -> None:
        self.registers = program.registers
        self.python_name = {r: f"v{i}" for i, r in enumerate(program.registers)}
        self.views: set[tuple[str, str]] = set()
        self.constants: dict[tuple[str, Any, str], str] = {}
        self.specials: set[str] = set()
        self.objects: dict[str, object] = {}

    def constant(self, kind: str, value: Any, view: str) -> str:
        """The name of a constant, which is made when it is first used."""
        return self.constants.setdefault((kind, value, view), f"c{len(self.constants)}")
