"""NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .argument import HostArgument
from .shadow import Array


class HostArray(HostArgument):
    """A NumPy array, possibly of a subclass."""

    __slots__ = ()

    def view(self) -> Array:
        return np.asarray(self.array)

    def of_numpy(self, result: Array) -> Any:
        return result
