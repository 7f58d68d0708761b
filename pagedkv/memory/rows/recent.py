"""Recent: what the last step knew of its sequences, for the next step of the same ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .handles import Int64Array


class Recent(NamedTuple):
    """Sequences after an `append` of one token each: it holds until something else changes.

    All of them have a last block of their own, which cannot be found.

    Attributes
    ----------
    change : int
        The number of the pool's change that made it: any later one ends it.
    late : bool or None
        Whether `commit` has yet to see full blocks: the last one of each sequence in `full`. None if it may have yet to
        see others.
    rows, lens, slots : (num_seqs,) int64
        Their rows, how many tokens each has, and where its last token is.
    longest : int
        The most tokens that one of them has.
    full, full_rows, full_columns : (num_full,) int64
        Which of them have no room in their last block, their rows, and how many blocks each has.
    is_known : bool
        Whether all their tokens are known by their ids.
    tables : (num_seqs, width) int32, or None
        Their block tables, as wide as the longest needs. The next step writes its new blocks into it.
    """

    change: int
    late: bool | None
    rows: Int64Array
    lens: Int64Array
    slots: Int64Array
    longest: int
    full: Int64Array
    full_rows: Int64Array
    full_columns: Int64Array
    is_known: bool
    tables: npt.NDArray[np.int32] | None
