"""PoolMap: which sequence holds which block of a pool, for which layers, as text and as a picture for notebooks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NOBODY = -1
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
COLOURS = ("#2f6f9f", "#c9772b", "#3f8f5a", "#9a4f96", "#b5483a", "#7a6a1e", "#3b7f86", "#6b5bb0", "#c0558f", "#5d7f2a")
SEVERAL = "#8a8f98"  # grey on light and dark pages
COLUMNS, MAX_ROWS, SIDE, SMALL_SIDE = 64, 16, 9, 5
MAX_TITLES = 100

BoolArray = npt.NDArray[np.bool]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Cells:
    """The contents of each square or character of a map; (num_cells,) unless it says otherwise.

    Attributes
    ----------
    per_cell : int
        Blocks per cell.
    seqs : (num_seqs,) int64
        The handles that are alone in a cell, in order.
    rank : int64
        The index in `seqs` of the sequence that is alone in the cell; NOBODY for none or several.
    used, shared, cached : bool
        Whether any block is in use, is shared, or is free but can be found by its tokens.
    fill : float64
        The share of all its slots that hold a token.
    group : int64
        The group of layers of all used blocks of the cell; NOBODY for none or several.
    small : bool
        Whether all of them belong to layers with a window.
    """

    per_cell: int
    seqs: Int64Array
    rank: Int64Array
    used: BoolArray
    shared: BoolArray
    cached: BoolArray
    fill: npt.NDArray[np.float64]
    group: Int64Array
    small: BoolArray


@dataclass(frozen=True, slots=True)
class PoolMap:
    """A map of the blocks of a pool in their order.

    Attributes
    ----------
    owners : (N,) int64
        The handle of a sequence that holds each block; -1 for none.
    ref_counts : (N,) int32
        References to each block.
    fills : (N,) int32
        Slots of each block that hold a token.
    block_size : int
        P.
    cached : (N,) bool or None
        Free blocks whose contents can still be found by their tokens.
    groups : (N,) int64 or None
        The index of the group of layers that each block belongs to, -1 for none; None if there is one group.
    windows : tuple of int or None
        The window of each group.
    states : str
        How many states there are, in words; empty if sequences have none.
    """

    owners: Int64Array
    ref_counts: npt.NDArray[np.int32]
    fills: npt.NDArray[np.int32]
    block_size: int
    cached: BoolArray | None = None
    groups: Int64Array | None = None
    windows: tuple[int | None, ...] = (None,)
    states: str = ""

    def to_text(self, width: int = COLUMNS) -> str:
        """Draw the map in characters, `width` to a line and at most 16 lines, with a legend.

        With several groups of layers a second map of the same blocks follows, which has the index of the group.
        """
        cells = self._cells(width)
        full = cells.fill == 1
        letters = np.array(list(LETTERS))[cells.rank % len(LETTERS)]
        by_sequence = np.where(full, letters, np.char.lower(letters))
        signs = np.select(
            [cells.shared, cells.rank != NOBODY, cells.used & full, cells.used, cells.cached],
            ["+", by_sequence, "#", "-", "~"],
            ".",
        )
        kinds = ["A-Z sequences, a-z with empty slots", "+ shared", ". free"]
        kinds += ["~ cached"] * bool(cells.cached.any()) + ["# - of several sequences"] * (cells.per_cell > 1)
        lines = [*_lines(signs, width), f"{'  '.join(kinds)}; {_scale(cells, 'character')}"]
        if self.groups is not None:
            digits = np.array(list(DIGITS))[cells.group % len(DIGITS)]
            lines += _lines(np.select([cells.group != NOBODY, cells.used], [digits, "#"], "."), width)
            of_window: dict[int | None, str] = {}
            for g, window in enumerate(self.windows):
                of_window[window] = of_window.get(window, "") + DIGITS[g % len(DIGITS)]
            names = [f"{g} {f'window {w}' if w else 'all tokens'}" for w, g in of_window.items()]
            lines.append("groups of layers: " + "  ".join([*names, *["# several"] * (cells.per_cell > 1)]))
        return "\n".join([*lines, *[self.states] * bool(self.states)])

    def to_html(self) -> str:
        """Draw the map as SVG for notebooks, with at most 1,024 squares, a legend and no scripts."""
        cells = self._cells(COLUMNS)
        count = len(cells.rank)
        sides = np.where(cells.small, SMALL_SIDE, SIDE).tolist()
        heights = np.ceil(sides * cells.fill).astype(int).tolist()

        margins = [(SIDE - side) // 2 + 1 for side in sides]
        lefts = [(SIDE + 2) * (i % COLUMNS) + margin for i, margin in enumerate(margins)]
        tops = [(SIDE + 2) * (i // COLUMNS) + margin for i, margin in enumerate(margins)]

        def squares(chosen: BoolArray) -> str:
            at = np.flatnonzero(chosen).tolist()
            return "".join(f"M{lefts[i]} {tops[i]}h{(side := sides[i])}v{side}h-{side}z" for i in at)

        def filled(chosen: BoolArray) -> str:
            at = [i for i in np.flatnonzero(chosen).tolist() if heights[i]]
            return "".join(f"M{lefts[i]} {tops[i] + (side := sides[i])}h{side}v-{heights[i]}h-{side}z" for i in at)

        empty = ~(cells.used | cells.cached)
        parts = [
            _path(squares(empty), f'fill="none" stroke="{SEVERAL}" stroke-opacity=".35"'),
            _path(squares(cells.cached & ~cells.used), f'fill="none" stroke="{SEVERAL}" stroke-dasharray="2 1"'),
        ]
        for title, colour, chosen in self._groups(cells):
            shapes = _path(squares(chosen), 'fill-opacity=".3"') + _path(filled(chosen), "")
            parts.append(f'<g fill="{colour}">{title}{shapes}</g>')
        parts.append(_path(squares(cells.shared), 'fill="none" stroke="currentColor" stroke-width="1.5"'))
        width, height = (SIDE + 2) * min(count, COLUMNS) + 1, (SIDE + 2) * -(-count // COLUMNS) + 1
        legend = "a colour is a sequence: full tokens, pale empty slots; framed: shared; empty: free"
        legend += "; dashed: cached" * bool(cells.cached.any()) + "; grey: of several" * (cells.per_cell > 1)
        legend += "; small: of layers with a window" * bool(cells.small.any())
        legend += f"; {self.states}" * bool(self.states)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="blocks of the pool">{"".join(parts)}</svg>'
            f"<div><small>{_scale(cells, 'square')}; {legend}</small></div>"
        )

    @staticmethod
    def _groups(cells: _Cells) -> list[tuple[str, str, BoolArray]]:
        """The title, colour and cells of each sequence, or of each colour if there are too many sequences to name."""
        alone = cells.rank != NOBODY
        groups = [("", SEVERAL, cells.used & ~alone)]
        if len(cells.seqs) > MAX_TITLES:
            groups += [("", colour, alone & (cells.rank % len(COLOURS) == i)) for i, colour in enumerate(COLOURS)]
        else:
            for i, seq in enumerate(cells.seqs.tolist()):
                groups.append((f"<title>sequence {seq}</title>", COLOURS[i % len(COLOURS)], cells.rank == i))
        return [group for group in groups if group[2].any()]

    def _cells(self, width: int) -> _Cells:
        num_blocks = len(self.owners)
        per_cell = -(-num_blocks // (width * MAX_ROWS))
        starts = np.arange(0, num_blocks, per_cell)
        sizes = np.diff(starts, append=num_blocks)
        used = self.ref_counts > 0
        any_used = np.logical_or.reduceat(used, starts)
        owner, group = _common(self.owners, used, starts), np.full(len(starts), NOBODY)
        small = np.zeros(len(starts), bool)
        if self.groups is not None:
            group = _common(self.groups, used, starts)
            full = np.array([window is None for window in self.windows])[self.groups]
            small = any_used & ~np.logical_or.reduceat(used & full, starts)
        seqs = np.unique(owner[owner != NOBODY])
        cached = np.zeros(num_blocks, bool) if self.cached is None else self.cached
        return _Cells(
            per_cell=per_cell,
            seqs=seqs,
            rank=np.where(owner == NOBODY, NOBODY, np.searchsorted(seqs, owner)),
            used=any_used,
            shared=np.logical_or.reduceat(self.ref_counts > 1, starts),
            cached=np.logical_or.reduceat(cached, starts),
            fill=np.add.reduceat(self.fills.astype(np.int64), starts) / (sizes * self.block_size),
            group=group,
            small=small,
        )


def _common(values: Int64Array, used: BoolArray, starts: Int64Array) -> Int64Array:
    """What the used blocks of each cell have in common; NOBODY if they differ, or there is none."""
    least = np.minimum.reduceat(np.where(used, values, np.iinfo(np.int64).max), starts)
    largest = np.maximum.reduceat(np.where(used, values, NOBODY), starts)
    return np.where(least == largest, largest, NOBODY)


def _lines(signs: npt.NDArray[np.str_], width: int) -> list[str]:
    return ["".join(signs[start : start + width]) for start in range(0, len(signs), width)]


def _scale(cells: _Cells, what: str) -> str:
    return f"{cells.per_cell} block{'s' if cells.per_cell > 1 else ''} a {what}"


def _path(d: str, attributes: str) -> str:
    return f'<path {attributes} d="{d}"/>' if d else ""
