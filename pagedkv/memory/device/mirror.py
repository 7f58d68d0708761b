"""Mirror: a device array that follows rows on the host, sending only those that have changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import Arrays

_NOT_SENT = -(2**31)  # neither a length nor an entry of a block table, used or not
_INDEX_BYTES = 8


class Mirror:
    """A device array of int32 that follows rows on the host.

    Its memory stays in place unless an update has more rows or columns than it was made for, so kernels captured in a
    CUDA graph find the new rows where the old ones were.

    Parameters
    ----------
    arrays : Arrays
        Makes arrays on the device.
    num_rows, num_columns : int
        The size of the array; an update with more rows or columns reallocates it.
    """

    def __init__(self, arrays: Arrays, num_rows: int, num_columns: int) -> None:
        self._arrays = arrays
        self._make_arrays(num_rows, num_columns)

    def _make_arrays(self, num_rows: int, num_columns: int) -> None:
        device = self._arrays.zeros((num_rows, num_columns), np.dtype(np.int32))
        self._device, self._sent = device, np.full((num_rows, num_columns), _NOT_SENT, np.int32)

    def update(self, rows: npt.NDArray[np.int32], min_width: int = 0) -> Any:
        """Send the rows that have changed since they were last sent.

        Parameters
        ----------
        rows : (num_rows, num_columns) int32
            No entry is -2**31, the mark of a row that was not sent.
        min_width : int
            Columns that the result has at least; those past `rows` may hold anything.

        Returns
        -------
        (num_rows, max(num_columns, min_width)) int32 device array
            A view, which the next update overwrites.
        """
        num_rows, num_columns = rows.shape
        width = max(num_columns, min_width)
        if num_rows > len(self._sent) or width > self._sent.shape[1]:
            self._make_arrays(max(num_rows, len(self._sent)), max(width, self._sent.shape[1]))
        sent, device = self._sent[:num_rows, :num_columns], self._device[:num_rows, :num_columns]
        changed = np.flatnonzero((sent != rows).any(axis=1))
        if len(changed):
            # If the copy fails, the device may hold anything: send these rows again.
            sent[changed] = _NOT_SENT
            row_bytes = num_columns * rows.itemsize
            if len(changed) * (row_bytes + _INDEX_BYTES) < num_rows * row_bytes:
                device[self._arrays.asarray(changed)] = self._arrays.asarray(rows[changed])
            else:
                device[...] = self._arrays.asarray(rows)
            sent[changed] = rows[changed]
        return self._device[:num_rows, :width]
