"""The Python line of each PTX instruction, from the .file and .loc directives of a module."""

from __future__ import annotations

import bisect
import linecache
import os
import re

from ..errors import SourceLine

_FILE = re.compile(r'^[ \t]*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_LOC = re.compile(
    r"^[ \t]*\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:\s*,\s*function_name[^,]*,\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?",
    re.MULTILINE,
)
_ENTRY = re.compile(r"^[ \t]*(?:\.\w+\s+)*\.(?:entry|func)\b", re.MULTILINE)

Position = tuple[int, int, int]  # file number, line, column


class LineTable:
    """Looks up Python lines by PTX line number."""

    def __init__(self, ptx: str) -> None:
        self._files = {int(m[1]): m[2] for m in _FILE.finditer(ptx)}
        marks: list[tuple[int, tuple[Position, ...]]] = []
        if self._files:
            newlines = [m.start() for m in re.finditer("\n", ptx)]
            starts = [m.start() for m in _ENTRY.finditer(ptx)]
            marks = [(bisect.bisect_left(newlines, start) + 1, ()) for start in starts]
            called_from: dict[Position, Position | None] = {}
            function = 0
            for m in _LOC.finditer(ptx):
                if (now := bisect.bisect_right(starts, m.start())) != function:
                    function, called_from = now, {}
                position = (int(m[1]), int(m[2]), int(m[3]))
                caller = (int(m[4]), int(m[5]), int(m[6])) if m[4] else None
                called_from[position] = caller
                chain = [position]
                while caller is not None and caller not in chain:
                    chain.append(caller)
                    caller = called_from.get(caller)
                marks.append((bisect.bisect_left(newlines, m.start()) + 1, tuple(chain)))
        self._marks = sorted(marks, key=lambda mark: mark[0])
        self._starts = [line for line, _ in self._marks]

    def source(self, ptx_line: int) -> tuple[SourceLine, ...]:
        """The source line of the instruction at `ptx_line`, then its callers' lines; empty if unknown."""
        i = bisect.bisect_right(self._starts, ptx_line) - 1
        if i < 0:
            return ()
        return tuple(self._line(file, line) for file, line, _ in self._marks[i][1])

    def _line(self, file: int, line: int) -> SourceLine:
        path = self._files.get(file, "?")
        # numba prefixes names like "<stdin>" with a directory, where linecache finds nothing.
        for name in (path, os.path.basename(path)):
            if text := linecache.getline(name, line).strip():
                return SourceLine(name, line, text)
        return SourceLine(path, line)
