"""Recent: what the last step has left of its sequences, for the step that goes on with them."""

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
    late : (num_late,) int64, or None
        Which of them have full blocks that `commit` has not seen; None if that is not known.
    rows, lens, slots : (num_seqs,) int64
        Their rows, how many tokens each has, and where its last token is.
    longest : int
        The most tokens that one of them has.
    full : (num_full,) int64
        Which of them have no room in their last block.
    is_known : bool
        Whether all their tokens are known by their ids.
    tables : (num_seqs, width) int32, or None
        Their block tables, as wide as the longest needs. The next step writes its new blocks into it.
    """

    change: int
    late: Int64Array | None
    rows: Int64Array
    lens: Int64Array
    slots: Int64Array
    longest: int
    full: Int64Array
    is_known: bool
    tables: npt.NDArray[np.int32] | None
