"""Parses PTX text into functions made of statements, without interpreting them."""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field

import numpy as np

from ..errors import EmulatorError
from .instruction import Instruction
from .lines import LineTable
from .types import SIZE

_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")


Statement = Instruction | str  # a str is a label


@dataclass
class Param:
    name: str
    type: str
    size: int  # in bytes, of the type or of the byte array
    align: int = 1


@dataclass
class Function:
    name: str
    is_entry: bool
    params: list[Param]
    returns: list[Param]
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    locals: list[tuple[str, int, int | None]] = field(default_factory=list)  # name, alignment, bytes
    shared: list[tuple[str, int, int | None]] = field(default_factory=list)  # bytes None: dynamic
    has_body: bool = False


def _blank(m: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", m[0])


def _require_match(m: re.Match[str] | None, text: str) -> re.Match[str]:
    if m is None:
        raise EmulatorError(f"cannot parse the PTX declaration: {text[:120]}")
    return m


def _match_brace(s: str, i: int) -> int:
    """Index just past the brace that closes s[i]."""
    depth = 0
    for m in re.compile(r"[{}]").finditer(s, i):
        depth += 1 if m[0] == "{" else -1
        if depth == 0:
            return m.end()
    raise EmulatorError("unbalanced braces in PTX")


_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.(?:global|shared|local|const)\s+)?"
    r"(?:\.align\s+\d+\s+)?)?([\w$]+)\s*(?:\[(\d+)\])?"
)


def _params(text: str) -> list[Param]:
    return [Param(m[3], m[2], SIZE[m[2]] * int(m[4] or 1), int(m[1] or SIZE[m[2]])) for m in _PARAM.finditer(text)]


_VAR = re.compile(
    r"\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?(?:\.v\d\s+)?\.(\w+)\s+([\w$]+)"
    r"((?:\s*\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)


class ParsedModule:
    """Functions, shared and global variables of one PTX text."""

    def __init__(self, text: str) -> None:
        self.lines = LineTable(text)
        src = re.sub(r"//[^\n]*", _blank, text)
        src = re.sub(r"/\*.*?\*/", _blank, src, flags=re.S)
        src = re.sub(r"^[ \t]*\.(?:loc|file)\b[^\n]*", _blank, src, flags=re.M)
        self._src = src
        self._newlines = [m.start() for m in re.finditer("\n", src)]
        self.functions: dict[str, Function] = {}
        self.shared: list[tuple[str, int, int | None]] = []
        self.globals: dict[str, np.ndarray] = {}
        self.version = self.target = ""
        self._scopes = 0
        self._top_level()

    def _line(self, pos: int) -> int:
        return bisect.bisect_left(self._newlines, pos) + 1

    def _top_level(self) -> None:
        s, i = self._src, 0
        token = re.compile(
            r"\s*(?:\.(version|target)\s+([^\n]*)|(\.address_size)[^\n]*|(\.section)[^{]*"
            r"|([^;{]+?)(?=[;{]|=\s*\{))"
        )
        while True:
            m = token.match(s, i)
            if not m:
                if s[i:].strip(" \t\n\r;"):
                    i += 1
                    continue
                break
            if m[1]:
                setattr(self, m[1], m[2].strip())
                i = m.end()
            elif m[3]:
                i = m.end()
            elif m[4]:
                i = _match_brace(s, s.index("{", m.end() - 1))
            else:
                i = self._declaration(m, s)
        if not self.version:
            raise EmulatorError("no .version directive: is this PTX text?")

    def _declaration(self, m: re.Match[str], s: str) -> int:
        head = m[5]
        kind = re.search(r"\.(entry|func)\b", head)
        if kind:
            fn = self._header(head, kind)
            end = m.end()
            if s[end] == "{":
                close = _match_brace(s, end)
                _Body(self, fn, s, end + 1, close - 1).parse()
                fn.has_body, end = True, close
            else:
                end += 1
            if fn.name not in self.functions or fn.has_body:
                self.functions[fn.name] = fn
            return end
        end = s.index(";", m.end() - 1) if ";" in s[m.start() :] else len(s)
        self._variable(s[m.start() : end].strip())
        return end + 1

    def _header(self, head: str, kind: re.Match[str]) -> Function:
        rest = head[kind.end() :].strip()
        returns: list[Param] = []
        if rest.startswith("("):
            close = rest.index(")")
            returns, rest = _params(rest[:close]), rest[close + 1 :].strip()
        name = _require_match(re.match(r"[\w$%]+", rest), head)[0]
        rest = rest[len(name) :].strip()
        params: list[Param] = []
        if rest.startswith("("):
            close = rest.index(")")
            params, rest = _params(rest[:close]), rest[close + 1 :]
        fn = Function(name, kind[1] == "entry", params, returns)
        for d in re.finditer(r"\.(maxntid|reqntid|maxnreg|minnctapersm)\s+([\d\s,]+)", rest):
            fn.directives[d[1]] = tuple(int(x) for x in d[2].replace(",", " ").split())
        return fn

    def _variable(self, decl: str) -> None:
        decl = re.sub(r"^(?:\s*\.(?:visible|extern|weak|common)\b)+", "", decl).strip()
        if not decl.startswith((".shared", ".global", ".const")):
            return
        v = _require_match(_VAR.match(decl), decl)
        name, size = v[4], _array_bytes(v[3], v[5])
        if v[1] == "shared":
            self.shared.append((name, int(v[2] or SIZE[v[3]]), size))
            return
        data = np.zeros(size or 0, np.uint8)
        if v[6]:
            words = [w.strip() for w in v[6].strip("{} \n\t").split(",") if w.strip()]
            try:
                vals = [int(w[2:], 16) if w[:2] in ("0f", "0d", "0F", "0D") else int(w.rstrip("U"), 0) for w in words]
            except ValueError as e:
                raise EmulatorError(f"unsupported initialiser of {name}") from e
            width = SIZE[v[3]]
            raw = np.array([x & ((1 << 8 * width) - 1) for x in vals], np.uint64).astype(f"u{width}").view(np.uint8)
            data[: raw.size] = raw
        self.globals[name] = data


def _array_bytes(ty: str, dims: str) -> int | None:
    size = SIZE[ty]
    for d in re.findall(r"\[(\d*)\]", dims or ""):
        if d == "":
            return None
        size *= int(d)
    return size


class _Body:
    """Parses one function body, and gives registers and labels of nested `{ }` scopes unique names."""

    def __init__(self, mod: ParsedModule, fn: Function, src: str, start: int, end: int) -> None:
        self.mod, self.fn, self.src, self.pos, self.end = mod, fn, src, start, end
        self.scopes: list[dict[str, str]] = [{}]
        self.tags: list[str] = [""]

    def parse(self) -> None:
        s = self.src
        while True:
            while self.pos < self.end and s[self.pos] in " \t\r\n;":
                self.pos += 1
            if self.pos >= self.end:
                return
            c = s[self.pos]
            if c == "{":
                self._open_scope()
                self.pos += 1
            elif c == "}":
                self.scopes.pop()
                self.tags.pop()
                self.pos += 1
            else:
                self._statement()

    def _open_scope(self) -> None:
        self.mod._scopes += 1
        tag = f"$s{self.mod._scopes}"
        inner = self.src[self.pos + 1 : _match_brace(self.src, self.pos) - 1]
        labels = re.finditer(r"(?:^|[;{}\n])\s*([A-Za-z_$][\w$]*)\s*:(?!:)", inner)
        self.scopes.append({m[1]: m[1] + tag for m in labels})
        self.tags.append(tag)

    def _names(self) -> dict[str, str]:
        if len(self.scopes) == 1:
            return {}
        out: dict[str, str] = {}
        for sc in self.scopes:
            out.update(sc)
        return out

    def _declare(self, name: str, ty: str) -> None:
        if len(self.scopes) > 1:
            unique = f"{name}{self.tags[-1]}"
            self.scopes[-1][name] = unique
            name = unique
        self.fn.registers[name] = ty

    def _statement(self) -> None:
        lab = _LABEL.match(self.src, self.pos, self.end)
        if lab:
            self.fn.statements.append(self._names().get(lab[1], lab[1]))
            self.pos = lab.end()
            return
        stop = self.src.find(";", self.pos, self.end)
        stop = self.end if stop < 0 else stop
        text = " ".join(self.src[self.pos : stop].split())
        line = self.mod._line(self.pos)
        self.pos = stop + 1
        if text.startswith("."):
            self._directive(text)
            return
        ins = Instruction(text, line)
        names = self._names()
        self.fn.statements.append(ins.renamed(names) if names else ins)

    def _directive(self, text: str) -> None:
        if text.startswith(".reg"):
            ty, names = _require_match(re.match(r"\.reg\s+\.(\w+)\s+(.*)", text), text).groups()
            for nm in names.split(","):
                nm = nm.strip()
                many = re.match(r"(%?[\w$]+)<(\d+)>", nm)
                if many:
                    for q in range(int(many[2])):
                        self._declare(f"{many[1]}{q}", ty)
                else:
                    self._declare(nm, ty)
        elif text.startswith((".local", ".shared")):
            v = _require_match(_VAR.match(text), text)
            size = _array_bytes(v[3], v[5])
            dest = self.fn.locals if v[1] == "local" else self.fn.shared
            dest.append((v[4], int(v[2] or SIZE[v[3]]), size))
        elif text.startswith(".param") and len(self.scopes) > 1:
            name = _require_match(_PARAM.match(text), text)[3]
            self.scopes[-1][name] = f"{name}{self.tags[-1]}"
        # Skip .pragma, .callprototype and debug directives.
