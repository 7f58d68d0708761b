"""What one warp did in a launch: instructions, the lanes that ran them, registers written and bytes touched."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import index
from types import NoneType
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ..errors import Coordinates, EmulatorError, SourceLine

MOST_LINES = 200  # that `print` shows
_MANGLED = re.compile(r"\b_Z\w*?_(param_\d+)\b")  # numba's names of parameters fill lines
_WIDTH = 32  # of an instruction, where it fits


@dataclass(frozen=True)
class Warp:
    """The warp of a launch to trace.

    Parameters
    ----------
    thread_block : int, or sequence or array of up to three int
        Coordinates (x, y, z) of its thread block.
    warp : int
        Its number in the thread block: thread // 32, where x counts first.
    max_steps : int
        The most instructions to record. Later ones are counted, and the launch goes on.

    Raises
    ------
    EmulatorError
        A number is negative, or there are more than three coordinates.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> from pagedkv import emulator
    >>> def double(x):
    ...     x[cuda.threadIdx.x] *= 2
    >>> x = np.arange(32, dtype=np.float32)
    >>> trace = emulator.run(double, 1, 32, x, trace=emulator.Warp(thread_block=0, warp=0)).trace
    >>> [access.kind for access in trace.accesses("x")]
    ['load', 'store']
    """

    thread_block: int | Sequence[int] | npt.NDArray[np.integer] = (0, 0, 0)
    warp: int = 0
    max_steps: int = 10_000

    def __post_init__(self) -> None:
        try:
            given = np.atleast_1d(self.thread_block)
            x, y, z = (*map(index, given), *(0,) * (3 - len(given)))
        except (TypeError, ValueError):
            raise EmulatorError(f"thread_block must be one to three coordinates, got {self.thread_block!r}") from None
        try:
            least = min(x, y, z, index(self.warp), index(self.max_steps))
        except TypeError:
            least = -1
        if least < 0:
            raise EmulatorError(f"thread_block, warp and max_steps must be integers >= 0, got {self}")
        object.__setattr__(self, "thread_block", (x, y, z))

    @property
    def coordinates(self) -> Coordinates:
        """All three coordinates of its thread block."""
        return cast(Coordinates, self.thread_block)

    def is_in(self, grid: Coordinates, threads: Coordinates) -> bool:
        """Whether a launch of these sizes has the warp."""
        inside = all(at < size for at, size in zip(self.coordinates, grid, strict=True))
        return inside and 32 * self.warp < threads[0] * threads[1] * threads[2]


def require_warp(trace: object) -> None:
    """Raise TypeError unless `trace` is a Warp or None."""
    if trace is not None and not isinstance(trace, Warp):
        raise TypeError(f"trace must be a Warp, such as Warp((0, 0, 0), 1), or None, got {trace!r}")


class WarpAccess(NamedTuple):
    """The bytes of one array that one instruction of a warp touched.

    Attributes
    ----------
    kind : str
        "load", "store" or "atomic".
    space : str
        "global", "shared" or "local".
    array : str
        The parameter's name, or the name of shared memory in the PTX.
    size : int
        Bytes of each lane.
    offsets : (lanes,) int64
        The first byte of each lane, counted from the array's lowest byte; -1 for lanes that took no part.
    phase : int
        The address of that lowest byte modulo 128, which says where sectors and banks begin.
    """

    kind: str
    space: str
    array: str
    size: int
    offsets: np.ndarray
    phase: int = 0

    @property
    def sectors(self) -> int:
        """Different aligned runs of 32 bytes, which is what global memory moves."""
        offsets = self.offsets[self.offsets >= 0] + self.phase
        return len(np.unique(np.concatenate([offsets >> 5, (offsets + self.size - 1) >> 5])))

    @property
    def wavefronts(self) -> int:
        """Passes over the 32 banks of shared memory; lanes that read 8 or 16 bytes go by half or quarter warp."""
        words = max(1, self.size // 4)
        lanes = np.flatnonzero(self.offsets >= 0)
        word = (self.offsets[lanes] + self.phase >> 2)[:, None] + np.arange(words)
        keys = np.unique((lanes * words // 32)[:, None] << 32 | word)
        banks, together = np.unique(keys >> 32 << 5 | keys & 31, return_counts=True)
        return sum(int(together[banks >> 5 == group].max()) for group in np.unique(banks >> 5))


@dataclass(slots=True, eq=False)  # arrays have no one answer to ==
class Step:
    """One instruction of a traced warp, which has fewer lanes than 32 if it is the rest of a thread block.

    Attributes
    ----------
    line, text : int and str
        Line number and text of the PTX instruction.
    source : tuple of SourceLine
        The Python line it comes from, then the lines that called it; empty without line information.
    active : (lanes,) bool
        The lanes that ran it; for a jump, those that jump.
    registers : dict of str to (lanes,) ndarray
        The values of the registers that it has written, or, for a store, stored. Only `active` lanes count.
    accesses : list of WarpAccess
        The bytes that it loaded and stored.
    """

    line: int
    text: str
    source: tuple[SourceLine, ...]
    active: np.ndarray
    registers: dict[str, np.ndarray] = field(default_factory=dict)
    accesses: list[WarpAccess] = field(default_factory=list)


@dataclass
class WarpTrace(Sequence[Step]):
    """The steps of one warp, in their order; `print` shows the first of them by Python line.

    Attributes
    ----------
    kernel : str
    warp : Warp
    arrays : dict of str to range
        The addresses of each array in global memory.
    steps : list of Step
    dropped : int
        How many more steps there were, after `max_steps`.
    others : tuple of str
        The other names in accesses: arrays in shared memory, and local memory.
    """

    kernel: str
    warp: Warp
    arrays: dict[str, range] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    dropped: int = 0
    others: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __getitem__(self, at: Any) -> Any:
        return self.steps[at]

    def select(
        self, *, line: int | range | None = None, name: str | None = None, array: str | None = None
    ) -> WarpTrace:
        """The steps that meet all conditions that are given.

        Parameters
        ----------
        line : int or range, optional
            Lines of Python, of any file; a step belongs to its own line and to the lines that called it.
        name : str, optional
            A word of the Python line, such as a variable.
        array : str, optional
            An array whose bytes it loads or stores.

        Returns
        -------
        WarpTrace

        Raises
        ------
        TypeError
            `line` is no int and no range, or `name` or `array` no str.
        ValueError
            There is no such array.
        """
        if line is not None and not isinstance(line, (int, range)):
            raise TypeError(f"line must be an int or a range, such as range(7, 10), got {type(line).__name__}")
        for what, given in (("name", name), ("array", array)):
            if not isinstance(given, (str, NoneType)):
                raise TypeError(f"{what} must be a str, such as {what}='x', got {type(given).__name__}")
        if array is not None:
            self._require(array)
        lines = range(line, line + 1) if isinstance(line, int) else line
        word = None if name is None else re.compile(rf"\b{re.escape(name)}\b")

        def meets(step: Step) -> bool:
            return (
                (lines is None or any(place.line in lines for place in step.source))
                and (word is None or any(word.search(place.text) for place in step.source[:1]))
                and (array is None or any(access.array == array for access in step.accesses))
            )

        return replace(self, steps=[step for step in self.steps if meets(step)])

    def accesses(self, array: str) -> list[WarpAccess]:
        """Each access to one array, in order.

        Raises
        ------
        ValueError
            There is no such array.
        """
        self._require(array)
        return [access for step in self.steps for access in step.accesses if access.array == array]

    def _require(self, array: str) -> None:
        """Raise ValueError for an unknown array, which may be misspelt; it would look like one that no step touches."""
        if array not in (names := (*self.arrays, *self.others)):
            raise ValueError(f"array must be one of {', '.join(names)}, got {array!r}")

    def to_text(self, lanes: Sequence[int] | None = None, max_lines: int | None = None) -> str:
        """A line for each step, under the Python line it comes from.

        Parameters
        ----------
        lanes : sequence of int, optional
            Lanes whose values to show; otherwise those of all lanes, shortened.
        max_lines : int, optional
            After how many steps to stop.

        Returns
        -------
        str

        Raises
        ------
        ValueError
            There is no such lane.
        """
        if wrong := [lane for lane in lanes or () if not 0 <= lane < 32]:
            raise ValueError(f"lanes must be from 0 to 31, got {', '.join(map(str, wrong))}")
        shown = len(self) if max_lines is None else min(max_lines, len(self))
        head = f"{self.kernel}: thread block {self.warp.coordinates}, warp {self.warp.warp}"
        lines = [f"{head}, {_counted(len(self), 'step')}", *_Lines(self.arrays, lanes).of(islice(self, shown))]
        if len(self) > shown:
            lines.append(f"... {_counted(len(self) - shown, 'more step')}: to_text() shows all, select() fewer")
        if self.dropped:
            lines.append(f"... {_counted(self.dropped, 'step')} after max_steps={self.warp.max_steps} not recorded")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.to_text(max_lines=MOST_LINES)

    def __repr__(self) -> str:
        return f"<WarpTrace of {self.kernel}, {self.warp}: {len(self.steps)} steps>"


class _Lines:
    """Writes values; an integer that points into an array becomes its name and a byte."""

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
    """Lane numbers, with runs shortened."""
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
