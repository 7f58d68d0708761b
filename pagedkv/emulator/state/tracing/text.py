"""The steps of a warp as text, under the Python lines that they come from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ...errors import SourceLine

if TYPE_CHECKING:
    from .warp_trace import Step, WarpAccess, WarpTrace

_MANGLED = re.compile(r"\b_Z\w*?_(param_\d+)\b")  # numba's names of parameters fill lines
_WIDTH = 32  # of an instruction, where it fits


def to_text(trace: WarpTrace, lanes: Sequence[int] | None, max_lines: int | None) -> str:
    """As `WarpTrace.to_text`."""
    shown = len(trace) if max_lines is None else min(max_lines, len(trace))
    block = trace.warp.coordinates
    head = f"{trace.kernel}: thread block {block}, warp {trace.warp.warp}, {_counted(len(trace), 'step')}"
    lines = [head, *_Lines(trace.arrays, lanes).of(islice(trace, shown))]
    if len(trace) > shown:
        lines.append(f"... {_counted(len(trace) - shown, 'more step')}: to_text() shows all, select() fewer")
    if trace.dropped:
        lines.append(f"... {_counted(trace.dropped, 'step')} after max_steps={trace.warp.max_steps} not recorded")
    return "\n".join(lines)


class _Lines:
    """How values are written: integers that point into an array as its name and a byte."""

    def __init__(self, arrays: dict[str, range], lanes: Sequence[int] | None) -> None:
        self.arrays, self.lanes = arrays, lanes

    def of(self, steps: Iterator[Step]) -> Iterator[str]:
        place: tuple[SourceLine, ...] | None = None
        for step in steps:
            if step.source != place:
                place = step.source
                yield _place(place)
            yield self._step(step)

    def _step(self, step: Step) -> str:
        chosen = np.flatnonzero(step.active)
        said = [] if step.active.all() else [f"({_runs(chosen)})"]
        if self.lanes is not None:
            chosen = chosen[np.isin(chosen, self.lanes)]
        if len(chosen):
            said += [f"{name} = {self._values(values[chosen])}" for name, values in step.registers.items()]
        line = f"{step.line:6}  {_MANGLED.sub(lambda m: m[1], step.text):{_WIDTH}}  {'; '.join(said)}".rstrip()
        return "\n        ".join([line, *map(_access, step.accesses)])

    def _values(self, values: np.ndarray) -> str:
        if (values == values[0]).all():
            return self._value(values[0])
        if self.lanes is None and len(values) > 4:
            return f"{', '.join(map(self._value, values[:3]))} ... {self._value(values[-1])}"
        return ", ".join(map(self._value, values))

    def _value(self, value: np.generic) -> str:
        if isinstance(value, np.integer):
            for name, addresses in self.arrays.items():
                if int(value) in addresses:
                    return f"{name}+{int(value) - addresses.start}"
        return str(value)


def _place(source: tuple[SourceLine, ...]) -> str:
    if not source or not source[0].line:  # the compiler's own
        return "no Python line"
    where = [f"{os.path.basename(line.file)}:{line.line}" for line in source]
    called = "".join(f", called from {caller}" for caller in where[1:])
    return f"{where[0]}: {source[0].text}{called}"


def _runs(lanes: np.ndarray) -> str:
    """Lane numbers, runs of them shortened."""
    if not len(lanes):
        return "no lane"
    runs = np.split(lanes, np.flatnonzero(np.diff(lanes) != 1) + 1)
    parts = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"lane{'s' if len(lanes) > 1 else ''} {','.join(parts)}"


def _access(access: WarpAccess) -> str:
    offsets = access.offsets[access.offsets >= 0]
    words = f"{access.kind}s {access.array}, bytes {offsets.min()} to {offsets.max() + access.size - 1}"
    if access.space == "global":
        return f"{words} in {_counted(access.sectors, 'sector')}"
    if access.space == "shared" and access.wavefronts > 1:
        return f"{words} in {access.wavefronts} wavefronts"
    return words


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
