"""Which keys a row sees by its position: validation makes the rule of a call, and plans ask it what they need.

Kernels get its scalars, and have the rule once on the CPU (`start_row` in cpu/attention/scratch.py) and once in CUDA
kernels (kernels/device/visible.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import Array

FURTHEST = 2**31 - 1  # lengths are int32: no key is further away


@dataclass(frozen=True, slots=True)
class Visible:
    """The keys from `before` tokens before a row to `after` behind it, without the padding of its sequence.

    Where a call has no such limit, its value leaves all keys, so that nothing below asks whether there is one. Neither
    the first key that a row sees nor the last one is before that of an earlier row.

    Attributes
    ----------
    before : int
        0 where a row sees its own key alone.
    after : int
        0 where the call is causal, as decode is.
    leftpad : (num_seqs,) int32 array or None
        The first key of each sequence that is seen.
    """

    before: int = FURTHEST
    after: int = 0
    leftpad: npt.NDArray[np.int32] | None = None

    @property
    def scalars(self) -> tuple[int, ...]:
        """What kernels take of the rule beside `leftpad`."""
        return self.before, self.after

    def first_keys(self, seq_lens: Array, query_lens: Any) -> npt.NDArray[np.int64]:
        """The first key that the last query_lens tokens of each sequence see: (num_seqs,)."""
        positions = seq_lens.astype(np.int64) - query_lens
        return np.maximum(positions - self.before, 0 if self.leftpad is None else self.leftpad)

    def most_keys(self, max_seq_len: int, num_rows: int = 1) -> int:
        """The most keys that the last num_rows tokens of a sequence of up to max_seq_len see together."""
        return min(max_seq_len, self.before + num_rows)

    def most_units(self, size: int, max_seq_len: int, num_rows: int = 1) -> int:
        """The most units of `size` tokens of the sequence in which those keys lie, at least 1."""
        units = (self.most_keys(max_seq_len, num_rows) + size - 2) // size + 1
        return max(1, min(-(-max_seq_len // size), units))
