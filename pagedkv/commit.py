"""Storing a change as a whole or not at all, for operations and the memory manager.

A call first checks its arguments and computes, in new arrays, everything that it will store. It lists the writes, and
`commit` makes all of them at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import starmap
from operator import setitem
from typing import Any

import numpy as np

from .arrays import Array

_UNSIGNED: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4)}

Write = tuple[Any, Any, Any]
"""An array, an index, and what to store there, of the array's own dtype.

In these forms NumPy converts nothing and allocates nothing, and so the write cannot fail:

* any array of integers, the index ``...``, and an array of its shape;
* a 1-D array, an int64 array of indices in range, and an array of as many values;
* a 1-D int64 array, an index in range and what to store there, both of them ints.

Nor does Python for a list of one element, 0 and an object, or for ``vars`` of an object, the name of an attribute that
it has, and an object.

All writes of the memory manager have one of these forms but the first. Tokens and small blocks are stored through index
arrays in caches of more dimensions, for which NumPy asks for about a kilobyte: docs/guarantees.md says what that means.
"""


def commit(writes: Sequence[Write]) -> None:
    """Store every write, in order.

    The loop runs in C, and Python runs signal handlers between byte codes only: a Ctrl-C comes before the first write
    or after the last.
    """
    deque(starmap(setitem, writes), maxlen=0)


def bits(x: Array) -> Array:
    """A view of the elements as unsigned integers: NumPy copies those faster than bfloat16, and NaN keeps its bits."""
    return x.view(_UNSIGNED[x.itemsize])
