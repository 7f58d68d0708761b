"""Mirror: rows of int32 that are kept on a device, where only what has changed is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import Arrays

_NOT_SENT = -(2**31)  # neither a length nor an entry of a block table, used or not
_INDEX_BYTES = 8


class Mirror:
    """A device array that follows rows on the host.

    Its memory stays where it is as long as no more rows and columns come than it was made for: kernels that were
    captured in a CUDA graph find the new rows in the old place.

    Parameters
    ----------
    arrays : Arrays
        Makes arrays on the device.
    num_rows, num_columns : int
        The most that come, as a rule.
    """

    def __init__(self, arrays: Arrays, num_rows: int, num_columns: int) -> None:
        self._arrays = arrays
        self._make(num_rows, num_columns)

    def _make(self, num_rows: int, num_columns: int) -> None:
        device = self._arrays.zeros((num_rows, num_columns), np.dtype(np.int32))
        self._device, self._sent = device, np.full((num_rows, num_columns), _NOT_SENT, np.int32)

    def update(self, rows: npt.NDArray[np.int32]) -> Any:
        """Send the rows that are not what was sent before.

        Parameters
        ----------
        rows : (num_rows, num_columns) int32
            None of them -2**31.

        Returns
        -------
        (num_rows, num_columns) int32 device array
            A view, of which the next update changes what it has to.
        """
        num_rows, num_columns = rows.shape
        if num_rows > len(self._sent) or num_columns > self._sent.shape[1]:
            self._make(max(num_rows, len(self._sent)), max(num_columns, self._sent.shape[1]))
        sent, device = self._sent[:num_rows, :num_columns], self._device[:num_rows, :num_columns]
        changed = np.flatnonzero((sent != rows).any(axis=1))
        if len(changed):
            # Until all is there, nobody knows what is.
            sent[changed] = _NOT_SENT
            row_bytes = num_columns * rows.itemsize
            if len(changed) * (row_bytes + _INDEX_BYTES) < num_rows * row_bytes:
                device[self._arrays.asarray(changed)] = self._arrays.asarray(rows[changed])
            else:
                device[...] = self._arrays.asarray(rows)
            sent[changed] = rows[changed]
        return device
