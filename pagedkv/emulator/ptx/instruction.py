"""One PTX instruction as text."""

from __future__ import annotations

import re

_IDENT = re.compile(r"%?[A-Za-z_$][\w$]*")
_PRED = re.compile(r"@(!?)(%?[\w$]+)\s+(.*)", re.S)
_LONG_GROUP = re.compile(r"\{([^{},]+),[^{}]{80,},([^{},]+)\}")  # the accumulators of a wgmma


class Instruction:
    """One PTX instruction.

    Attributes
    ----------
    op, parts : str and list of str
        The opcode, whole and split at its dots.
    operands : list of str
    pred, negated : str or None, and bool
        The guard predicate, and whether the guard is its negation.
    line, text : int and str
        Line number and text in the module, for messages.
    """

    __slots__ = ("line", "negated", "op", "operands", "parts", "pred", "text")

    def __init__(self, text: str, line: int) -> None:
        self.text, self.line = _LONG_GROUP.sub(r"{\1, ...,\2}", text), line
        self.pred: str | None = None
        self.negated = False
        m = _PRED.match(text)
        if m:
            self.negated, self.pred, text = m[1] == "!", m[2], m[3]
        self.op, _, rest = text.partition(" ")
        self.parts = self.op.split(".")
        self.operands = split_operands(rest)

    def renamed(self, names: dict[str, str]) -> Instruction:
        """A copy with identifiers replaced, for nested scopes and inlined functions."""

        def sub(s: str) -> str:
            return _IDENT.sub(lambda m: names.get(m[0], m[0]), s)

        new = object.__new__(Instruction)
        new.op, new.parts, new.text, new.line, new.negated = self.op, self.parts, self.text, self.line, self.negated
        new.pred = sub(self.pred) if self.pred else None
        new.operands = [sub(o) for o in self.operands]
        return new

    def replaced(self, op: str, operands: list[str], pred: str | None = None, negated: bool = False) -> Instruction:
        """Another instruction in place of this one, with its line and text."""
        new = object.__new__(Instruction)
        new.op, new.parts, new.operands, new.pred, new.negated = op, op.split("."), operands, pred, negated
        new.text, new.line = self.text, self.line
        return new

    def __repr__(self) -> str:
        return f"{self.line}: {self.text}"


def split_operands(s: str) -> list[str]:
    """Split at the commas outside brackets."""
    out: list[str] = []
    cur: list[str] = []
    depth = 0
    for ch in s:
        if ch in "{[(":
            depth += 1
        elif ch in "}])":
            depth -= 1
        if ch == "," and depth == 0:
            out.append("".join(cur).strip())
            cur = []
        else:
            cur.append(ch)
    last = "".join(cur).strip()
    return [*out, last] if last else out


def split_group(operand: str) -> list[str]:
    """The elements of an operand "{a, b}"; any other operand is its only element."""
    return [x.strip() for x in operand[1:-1].split(",")] if operand.startswith("{") else [operand]
