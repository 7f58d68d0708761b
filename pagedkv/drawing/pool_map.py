"""PoolMap: which sequence holds which block of a pool, as text and as a picture for notebooks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NOBODY = -1
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLOURS = ("#2f6f9f", "#c9772b", "#3f8f5a", "#9a4f96", "#b5483a", "#7a6a1e", "#3b7f86", "#6b5bb0", "#c0558f", "#5d7f2a")
SEVERAL = "#8a8f98"  # grey on light and dark pages
COLUMNS, MAX_ROWS, SIDE = 64, 16, 9
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
    """

    per_cell: int
    seqs: Int64Array
    rank: Int64Array
    used: BoolArray
    shared: BoolArray
    cached: BoolArray
    fill: npt.NDArray[np.float64]


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
    """

    owners: Int64Array
    ref_counts: npt.NDArray[np.int32]
    fills: npt.NDArray[np.int32]
    block_size: int
    cached: BoolArray | None = None

    def to_text(self, width: int = COLUMNS) -> str:
        """Draw the map in characters, `width` to a line and at most 16 lines, with a legend."""
        cells = self._cells(width)
        full = cells.fill == 1
        letters = np.array(list(LETTERS))[cells.rank % len(LETTERS)]
        by_sequence = np.where(full, letters, np.char.lower(letters))
        signs = np.select(
            [cells.shared, cells.rank != NOBODY, cells.used & full, cells.used, cells.cached],
            ["+", by_sequence, "#", "-", "~"],
            ".",
        )
        lines = ["".join(signs[start : start + width]) for start in range(0, len(signs), width)]
        kinds = ["A-Z sequences, a-z with empty slots", "+ shared", ". free"]
        kinds += ["~ cached"] * bool(cells.cached.any()) + ["# - of several sequences"] * (cells.per_cell > 1)
        return "\n".join([*lines, f"{'  '.join(kinds)}; {_scale(cells, 'character')}"])

    def to_html(self) -> str:
        """Draw the map as SVG for notebooks, with at most 1,024 squares, a legend and no scripts."""
        cells = self._cells(COLUMNS)
        count = len(cells.rank)
        at = [divmod(i, COLUMNS) for i in range(count)]
        lefts, tops = [(SIDE + 2) * x + 1 for _, x in at], [(SIDE + 2) * y + 1 for y, _ in at]
        heights = np.ceil(SIDE * cells.fill).astype(int).tolist()

        def squares(chosen: BoolArray) -> str:
            return "".join(f"M{lefts[i]} {tops[i]}h9v9h-9z" for i in np.flatnonzero(chosen).tolist())

        def filled(chosen: BoolArray) -> str:
            indices = [i for i in np.flatnonzero(chosen).tolist() if heights[i]]
            return "".join(f"M{lefts[i]} {tops[i] + SIDE}h9v-{heights[i]}h-9z" for i in indices)

        empty = ~(cells.used | cells.cached)
        parts = [
            _path(squares(empty), f'fill="none" stroke="{SEVERAL}" stroke-opacity=".35"'),
            _path(squares(cells.cached & ~cells.used), f'fill="none" stroke="{SEVERAL}" stroke-dasharray="2 1"'),
        ]
        for title, colour, chosen in self._groups(cells):
            shapes = _path(squares(chosen), 'fill-opacity=".3"') + _path(filled(chosen), "")
            parts.append(f'<g fill="{colour}">{title}{shapes}</g>')
        parts.append(_path(squares(cells.shared), 'fill="none" stroke="currentColor" stroke-width="1.5"'))
        width, height = (SIDE + 2) * min(count, COLUMNS) + 1, (SIDE + 2) * (at[-1][0] + 1) + 1
        legend = "a colour is a sequence: full tokens, pale empty slots; framed: shared; empty: free"
        legend += "; dashed: cached" * bool(cells.cached.any()) + "; grey: of several" * (cells.per_cell > 1)
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
        first = np.minimum.reduceat(np.where(used, self.owners, np.iinfo(np.int64).max), starts)
        last = np.maximum.reduceat(np.where(used, self.owners, NOBODY), starts)
        alone = (first == last) & (last != NOBODY)
        seqs = np.unique(last[alone])
        cached = np.zeros(num_blocks, bool) if self.cached is None else self.cached
        return _Cells(
            per_cell=per_cell,
            seqs=seqs,
            rank=np.where(alone, np.searchsorted(seqs, last), NOBODY),
            used=np.logical_or.reduceat(used, starts),
            shared=np.logical_or.reduceat(self.ref_counts > 1, starts),
            cached=np.logical_or.reduceat(cached, starts),
            fill=np.add.reduceat(self.fills.astype(np.int64), starts) / (sizes * self.block_size),
        )


def _scale(cells: _Cells, what: str) -> str:
    return f"{cells.per_cell} block{'s' if cells.per_cell > 1 else ''} a {what}"


def _path(d: str, attributes: str) -> str:
    return f'<path {attributes} d="{d}"/>' if d else ""
