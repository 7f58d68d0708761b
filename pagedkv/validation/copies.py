"""The call's own copies of small arrays, and that they hold what they must.

The layers of a model pass the same tables, lengths and slots one after the other. Each call copies them before anybody
looks at them. A short copy is bytes, under which the array that an earlier call has checked is found: such calls share
it, and nobody writes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from ..arrays import Array
from ..placement import Placement

MOST_BYTES = 4096  # of longer ones, a hash takes more time than a check
MOST_COPIES = 16

T = TypeVar("T")


def checked_copy(placement: Placement, x: Array, check: Callable[..., T], *facts: Any) -> tuple[Array, T]:
    """A C-contiguous copy of an array on the host, and what ``check(copy, *facts)`` returns, unless it raises.

    `facts` are all that the check depends on; they are hashable.
    """
    if placement.backend == "cpu" and x.nbytes <= MOST_BYTES:
        return _known(x.tobytes(), x.shape, x.dtype, check, *facts)
    copy = placement.own(x)
    return copy, check(copy, *facts)


@lru_cache(maxsize=MOST_COPIES)
def _known(
    content: bytes, shape: tuple[int, ...], dtype: np.dtype[Any], check: Callable[..., T], *facts: Any
) -> tuple[Array, T]:
    copy = np.frombuffer(content, dtype).reshape(shape).copy()  # kernels are compiled for arrays that can be written
    return copy, check(copy, *facts)
