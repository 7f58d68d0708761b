"""How full a pool is, as numbers and as a picture."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from .table import SequenceTable


@dataclass(frozen=True, slots=True)
class Stats:
    """How full the pool of a PagedKVCache is.

    Attributes
    ----------
    num_blocks : int
        N, all blocks.
    used, free : int
        Blocks that sequences have, and blocks that can be handed out.
    shared : int
        Used blocks with more than one reference.
    cached : int
        Free blocks whose contents can still be found by their tokens.
    num_tokens : int
        The lengths of all sequences together; a shared token counts once for each.
    wasted_slots : int
        Slots of used blocks that hold no token of any sequence.
    contiguous_blocks : int
        What reserving the maximum length for every sequence would take.
    """

    num_blocks: int
    used: int
    free: int
    shared: int
    cached: int
    num_tokens: int
    wasted_slots: int
    contiguous_blocks: int

    @classmethod
    def of(cls, table: SequenceTable) -> Stats:
        """Read them off a table and its pool."""
        pool = table.pool
        used = pool.num_blocks - pool.num_free
        return cls(
            num_blocks=pool.num_blocks,
            used=used,
            free=pool.num_free,
            shared=int(np.count_nonzero(pool.ref_counts > 1)),
            cached=0,
            num_tokens=table.num_tokens,
            wasted_slots=used * table.block_size - int(table.block_fills().sum()),
            contiguous_blocks=table.num_seqs * table.max_blocks,
        )

    def to_html(self) -> str:
        """A table of the numbers."""
        rows = "".join(f"<tr><th>{field.name}</th><td>{getattr(self, field.name)}</td></tr>" for field in fields(self))
        return f"<table>{rows}</table>"


def draw(ref_counts: npt.NDArray[np.int32], width: int = 64, max_rows: int = 16) -> str:
    """A map of the pool in characters, block 0 first, with a legend.

    Parameters
    ----------
    ref_counts : (N,) int32
        References to each block.
    width, max_rows : int
        Characters to a line, and lines at most: in a larger pool a character stands for several blocks.
    """
    per_cell = -(-len(ref_counts) // (width * max_rows))
    starts = np.arange(0, len(ref_counts), per_cell)
    sizes = np.diff(starts, append=len(ref_counts))
    used = np.add.reduceat(np.minimum(ref_counts, 1), starts)
    shared = np.maximum.reduceat(ref_counts, starts) > 1
    cells = np.select([shared, used == sizes, used > 0], ["+", "#", "-"], ".")
    rows = ["".join(cells[start : start + width]) for start in range(0, len(cells), width)]
    legend = f". free  # used  + shared  - partly used; {per_cell} block{'s' if per_cell > 1 else ''} a character"
    return "\n".join([*rows, legend])
