"""What of the split kernel fits into registers: every number that was found by trying, and what was seen without it.

A `Limit` is a table, and its first row that applies counts; there is a module for each class that limits are asked for.
Most rows are there because ptxas spilled, that is, kept in local memory what it had no register for. Bytes are those of
all spill loads and stores with NVVM 13.5.37, and instructions are those of a warp in the inner loop for each 512 bytes
of the cache; q and the cache are float16 where nothing else is said. With a newer compiler, take a row away, compile
the variant that its reason names, and see.
"""

from __future__ import annotations

from typing import Any

from . import row_shape, split_config, tensor_shape
from .limit import Limit

LIMITS: dict[str, Limit[Any]] = {
    name: value
    for module in (split_config, tensor_shape, row_shape)
    for name, value in vars(module).items()
    if isinstance(value, Limit)
}
