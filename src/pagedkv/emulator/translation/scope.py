"""The names that the generated code of a kernel uses, which all of its blocks share."""

from __future__ import annotations

from typing import Any

from ..ptx.program import Program


class Scope:
    """Every use of a name is noted here, so that a launch makes exactly the arrays that the code needs.

    Attributes
    ----------
    registers : dict of str to str
        PTX type of each register.
    python_name : dict of str to str
        What the code calls a register, without the suffix of a view.
    views : set of (str, str)
        Python names and views of the registers that are used.
    constants : dict
        The name of a constant by (kind, value, view).
    specials : set of str
        Special registers that are read.
    objects : dict of str to object
        Instructions and MemOps that calls are given.
    """

    def __init__(self, program: Program) -> None:
        self.registers = program.registers
        self.python_name = {r: f"v{i}" for i, r in enumerate(program.registers)}
        self.views: set[tuple[str, str]] = set()
        self.constants: dict[tuple[str, Any, str], str] = {}
        self.specials: set[str] = set()
        self.objects: dict[str, object] = {}

    def constant(self, kind: str, value: Any, view: str) -> str:
        """Name of a constant in the generated code."""
        return self.constants.setdefault((kind, value, view), f"c{len(self.constants)}")
