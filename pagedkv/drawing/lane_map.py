"""Pictures of the bytes that lanes of a warp access: of an array by sector, of shared memory by bank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from .pool_map import COLOURS
from .svg import Svg, cell, svg, text

ROW_BYTES, SECTOR_BYTES, WORD_BYTES, NUM_BANKS = 128, 32, 4, 32
LEFT, WORD, HIGH, GAP = 84, 22, 22, 6  # pixels: left margin, width of a word, height of a row, gap
WIDTH = LEFT + NUM_BANKS * WORD + 16
MAX_ROWS = 32


@runtime_checkable
class LaneAccess(Protocol):
    """An access to draw: one of ``WarpTrace.accesses``, or any object with these attributes.

    Attributes
    ----------
    array : str
        Name of the array.
    size : int
        Bytes that each lane accesses.
    offsets : (lanes,) int64
        The first byte of each lane, counted from the array's lowest byte; -1 for lanes without an access.
    phase : int
        The address of that lowest byte modulo 128.
    """

    @property
    def array(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def offsets(self) -> np.ndarray: ...
    @property
    def phase(self) -> int: ...


def draw_bytes(accesses: Sequence[LaneAccess], *, max_rows: int = MAX_ROWS) -> Svg:
    """Draw the bytes of one array that a warp accesses, in rows of 128 bytes or four sectors.

    A box shows the bytes that a lane, or several, access at once; its text names the lanes and its colour the
    instruction. Sectors that have to move are shaded: a shade without a box is traffic that no lane asked for.

    Parameters
    ----------
    accesses : sequence of LaneAccess
        Accesses to one array, such as ``trace.accesses("k_cache")``.
    max_rows : int
        The most rows to draw. Rows that no lane accesses are left out.

    Returns
    -------
    Svg
        The text of an SVG file, for light and dark pages.

    Raises
    ------
    TypeError
        `accesses` is something else, such as one access, or the steps of a trace.
    ValueError
        There are no accesses, they are to several arrays, or have no lanes.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> from pagedkv.drawing import draw_bytes
    >>> access = SimpleNamespace(array="x", size=4, offsets=4 * np.arange(32), phase=0)  # or of trace.accesses("x")
    >>> draw_bytes([access]).startswith("<svg")
    True
    """
    name = _only_array(accesses)
    phase = accesses[0].phase
    boxes: dict[tuple[int, int], dict[int, list[int]]] = {}  # (first byte, bytes) -> access -> lanes
    for number, access in enumerate(accesses):
        for lane in np.flatnonzero(access.offsets >= 0).tolist():
            place = int(access.offsets[lane]) + phase, access.size
            boxes.setdefault(place, {}).setdefault(number, []).append(lane)
    sectors = {at // SECTOR_BYTES for start, size in boxes for at in range(start, start + size)}
    asked = len({at for start, size in boxes for at in range(start, start + size)})
    rows = sorted({sector * SECTOR_BYTES // ROW_BYTES for sector in sectors})
    requests = sum(_sectors(access) for access in accesses)
    words = (
        f"{_counted(len(accesses), 'instruction')}: {asked} bytes in {_counted(len(sectors), 'sector')} of 32, "
        f"asked for {_counted(requests, 'time')}"
    )
    title = f"Bytes of {name} that each lane takes"
    parts = [text(16, 28, title, 14), text(16, 46, words, pale=True)]
    parts += [text(LEFT + 8 * WORD * i + 3, 66, f"+{SECTOR_BYTES * i}", 10, pale=True) for i in range(4)]
    top, tops = 72.0, dict[int, float]()
    for before, row in zip([None, *rows], rows[:max_rows], strict=False):
        if before is not None and row > before + 1:
            parts.append(
                text(LEFT, top + 10, f"{ROW_BYTES * (row - before - 1)} bytes that no lane takes", 10, pale=True)
            )
            top += 18
        tops[row] = top
        parts += _row(top, f"byte {max(ROW_BYTES * row - phase, 0)}", {s % 4 for s in sectors if s // 4 == row})
        top += HIGH + GAP
    for (start, size), by_access in sorted(boxes.items()):
        row, at = divmod(start, ROW_BYTES)
        if row in tops:
            lanes = sorted({lane for lanes in by_access.values() for lane in lanes})
            said = "; ".join(f"instruction {number + 1}: {lane_list(lanes)}" for number, lanes in by_access.items())
            colour = COLOURS[min(by_access) % len(COLOURS)]
            wide = WORD * size / WORD_BYTES
            label = _lanes_that_fit(lanes, wide)
            where = f"bytes {start - phase} to {start - phase + size - 1}, {said}"
            parts.append(cell(LEFT + WORD * at / WORD_BYTES, tops[row], wide, HIGH, colour, label, where))
    if len(rows) > max_rows:
        parts.append(text(LEFT, top + 10, f"and {_counted(len(rows) - max_rows, 'more row')}", 10, pale=True))
        top += 18
    if len(accesses) > 1:
        top = _legend(parts, top + 8, len(accesses))
    return svg(WIDTH, top + 10, title, f"{words}. {_describe_accesses(accesses)}", parts)


def draw_banks(access: LaneAccess) -> Svg:
    """Draw one access to shared memory: the 32 banks, and the wavefronts that serve it.

    Lanes that access different words of one bank need a wavefront each, which is a bank conflict. Accesses of 8 or 16
    bytes are served by half or quarter warp.

    Parameters
    ----------
    access : LaneAccess
        One of ``trace.accesses(...)`` in shared memory.

    Returns
    -------
    Svg
        The text of an SVG file, for light and dark pages.

    Raises
    ------
    TypeError
        `access` is something else, such as a list of accesses.
    ValueError
        The access has no lanes, or is to global memory, which has no banks.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> from pagedkv.drawing import draw_banks
    >>> access = SimpleNamespace(array="x", size=4, offsets=4 * np.arange(32), phase=0)  # or of trace.accesses("x")
    >>> draw_banks(access).startswith("<svg")
    True
    """
    name = _only_array([access])
    if getattr(access, "space", "shared") == "global":
        raise ValueError(f"{name} is in global memory, which has no banks: draw_bytes draws its sectors")
    wavefronts, fewest = bank_wavefronts(access)
    extra = len(wavefronts) - fewest
    words = f"{_counted(len(wavefronts), 'wavefront')}, " + (
        f"{extra} of them for conflicts" if extra else "no conflict"
    )
    title = f"Banks of {name} that each lane takes"
    parts = [text(16, 28, title, 14), text(16, 46, words, pale=True)]
    parts += [text(LEFT + WORD * (i + 0.5), 66, i, 10, "middle", True) for i in range(NUM_BANKS)]
    parts.append(text(LEFT - 8, 66, "bank", 10, "end", True))
    top = 72.0
    for number, banks in enumerate(wavefronts):
        parts += _row(top, f"wavefront {number + 1}", set())
        for bank, (word, lanes) in sorted(banks.items()):
            where = f"bank {bank}, byte {WORD_BYTES * word - access.phase}: {lane_list(lanes)}"
            colour = COLOURS[number % len(COLOURS)]
            parts.append(cell(LEFT + WORD * bank, top, WORD, HIGH, colour, _lanes_that_fit(lanes, WORD), where))
        top += HIGH + GAP
    return svg(WIDTH, top + 10, title, f"{words}. {_describe_accesses([access])}", parts)


def bank_wavefronts(access: LaneAccess) -> tuple[list[dict[int, tuple[int, list[int]]]], int]:
    """The banks of each wavefront with their word and its lanes, and the number of wavefronts without conflicts."""
    words = max(1, access.size // WORD_BYTES)
    found: list[dict[int, tuple[int, list[int]]]] = []
    fewest = 0
    lanes_in = np.flatnonzero(access.offsets >= 0).tolist()
    for group in sorted({lane * words // 32 for lane in lanes_in}):
        lanes_of: dict[int, list[int]] = {}
        for lane in lanes_in:
            if lane * words // 32 == group:
                first = (int(access.offsets[lane]) + access.phase) // WORD_BYTES
                for word in range(first, first + words):
                    lanes_of.setdefault(word, []).append(lane)
        in_bank: dict[int, list[int]] = {}
        for word in sorted(lanes_of):
            in_bank.setdefault(word % NUM_BANKS, []).append(word)
        for turn in range(max(map(len, in_bank.values()))):
            chosen = {bank: words_in[turn] for bank, words_in in in_bank.items() if turn < len(words_in)}
            found.append({bank: (word, lanes_of[word]) for bank, word in chosen.items()})
        fewest += -(-len(lanes_of) // NUM_BANKS)
    return found, fewest


def lane_list(lanes: Iterable[int]) -> str:
    """Write lanes as text, with runs shortened."""
    runs: list[list[int]] = []
    for lane in lanes:
        if runs and lane == runs[-1][1] + 1:
            runs[-1][1] = lane
        else:
            runs.append([lane, lane])
    parts = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    return f"lane{'s' if len(parts) > 1 or '-' in parts[0] else ''} {','.join(parts)}"


def _only_array(accesses: Sequence[LaneAccess]) -> str:
    if isinstance(accesses, LaneAccess) or not all(isinstance(access, LaneAccess) for access in accesses):
        raise TypeError('draw_bytes takes accesses, such as trace.accesses("x"), and draw_banks takes one of them')
    if not accesses:
        raise ValueError("accesses must be one or more, got none: print(trace) names the arrays that the warp meets")
    names = sorted({access.array for access in accesses})
    if len(names) != 1:
        raise ValueError(f"accesses must be one or more, to one array, got {len(accesses)} to {names}")
    if not any((access.offsets >= 0).any() for access in accesses):
        raise ValueError(f"accesses must have a lane that takes part, got none to {names[0]}")
    return names[0]


def _sectors(access: LaneAccess) -> int:
    offsets = access.offsets[access.offsets >= 0] + access.phase
    ends = np.concatenate([offsets // SECTOR_BYTES, (offsets + access.size - 1) // SECTOR_BYTES])
    return len(np.unique(ends))


def _row(top: float, words: str, moved: set[int]) -> list[str]:
    wide = NUM_BANKS // 4 * WORD
    parts = [text(LEFT - 8, top + HIGH / 2 + 4, words, 10, "end", True)]
    for i in range(4):
        kind = "moved" if i in moved else "page"
        place = f'x="{LEFT + wide * i}" y="{top:g}" width="{wide}" height="{HIGH}"'
        parts.append(f'<rect class="{kind} grid" {place}/>')
    return parts


def _legend(parts: list[str], top: float, count: int) -> float:
    """Draw the colour of each instruction; return where the legend ends."""
    shown = min(count, len(COLOURS))
    for number in range(shown):
        x = LEFT + number * 64
        parts.append(cell(x, top, 14, 14, COLOURS[number], "", f"instruction {number + 1}"))
        parts.append(text(x + 18, top + 11, number + 1, 10))
    parts.append(text(LEFT - 8, top + 11, "instruction", 10, "end", True))
    if count > shown:
        parts.append(text(LEFT + shown * 64, top + 11, "and so on", 10, pale=True))
    return top + 20


def _lanes_that_fit(lanes: list[int], width: float) -> str:
    """The lanes if there is room for them, otherwise how many, as in "8x", or nothing."""
    words = lane_list(lanes).partition(" ")[2]
    short = words if len(words) * 6 <= width + 2 else f"{len(lanes)}x"
    return short if len(short) * 6 <= width + 2 else ""


def _describe_accesses(accesses: Sequence[LaneAccess]) -> str:
    said = []
    for number, access in enumerate(accesses[:8]):
        lanes = np.flatnonzero(access.offsets >= 0)
        if len(lanes):
            first, last = (int(access.offsets[lane]) for lane in (lanes[0], lanes[-1]))
            said.append(
                f"Instruction {number + 1}: {access.size} bytes a lane, lane {lanes[0]} from byte {first}, "
                f"lane {lanes[-1]} from byte {last}."
            )
    return " ".join(said)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
