"""An array of the host behind a buffer of the device, copied page by page when something first needs it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

# Bytes that one miss copies, so that a launch takes memory for what it touches, not for a whole cache. Small arrays are
# one page.
PAGE_BYTES = 1 << 16
SMALL_BYTES = 1 << 23


class HostArray:
    """The pages of a strided array, counted from its lowest byte.

    Parameters
    ----------
    array : ndarray

    Attributes
    ----------
    bytes : ndarray of uint8
        All bytes from its lowest to its highest, gaps included.
    page_bytes : int
        Size of a page.
    absent : ndarray of bool
        The pages that have not been copied to the device.
    """

    def __init__(self, array: np.ndarray) -> None:
        axes = sorted((abs(step), n) for n, step in zip(array.shape, array.strides, strict=True) if n > 1 and step)
        self._run = array.itemsize  # bytes without a gap, repeated along axes of (stride, count), the largest first
        self._axes: list[tuple[int, int]] = []
        for step, n in axes:
            if not self._axes and step == self._run:
                self._run *= n
            elif self._axes and step == math.prod(self._axes[0]):
                self._axes[0] = (self._axes[0][0], self._axes[0][1] * n)
            else:
                self._axes.insert(0, (step, n))
        reach = [self._run]  # from the first to the last byte of what is repeated along an axis, innermost first
        for step, n in reversed(self._axes):
            reach.append(reach[-1] + (n - 1) * step)
        nbytes = reach[-1] if array.size else 0
        overlap = any(inner > step for inner, (step, _) in zip(reach, reversed(self._axes), strict=False))
        self.bytes = _span(array, nbytes)
        self._overlapping = _marked(array, nbytes) if overlap else None
        self.page_bytes = PAGE_BYTES if nbytes > SMALL_BYTES else max(nbytes, 1)
        self.absent = np.ones(-(-nbytes // self.page_bytes), np.bool_)

    def rebind(self, array: np.ndarray) -> None:
        """Use another view of the same elements from now on, which may be writable."""
        self.bytes = _span(array, len(self.bytes))

    def page(self, number: int) -> slice:
        """The bytes of a page."""
        begin = int(number) * self.page_bytes
        return slice(begin, min(begin + self.page_bytes, len(self.bytes)))

    def elements(self, span: slice) -> Any:
        """Which bytes of whole pages belong to elements and not to gaps between them; True if all do."""
        if self._overlapping is not None:
            return self._overlapping[span]
        if not self._axes:
            return True
        unit = math.gcd(PAGE_BYTES, self._run, *(step for step, _ in self._axes))
        left = np.arange(span.start, span.stop, unit)
        inside = np.ones(len(left), np.bool_)
        for step, n in self._axes:
            index = left // step
            left -= index * step
            inside &= index < n
        return np.repeat(inside & (left < self._run), unit)


def _span(array: np.ndarray, nbytes: int) -> np.ndarray:
    """All bytes from an array's lowest to its highest, gaps included."""
    if not nbytes:
        return np.empty(0, np.uint8)
    array = np.atleast_1d(array)
    lowest = array[tuple(slice(-1, None) if step < 0 else slice(1) for step in array.strides)]
    first = lowest.reshape(1).view(np.uint8)
    return np.lib.stride_tricks.as_strided(first, (nbytes,), (1,), writeable=array.flags.writeable)


def _marked(array: np.ndarray, nbytes: int) -> np.ndarray:
    """Which of the bytes from the lowest to the highest belong to elements."""
    marks = np.zeros(nbytes, np.bool_)
    origin = sum((n - 1) * -step for n, step in zip(array.shape, array.strides, strict=True) if step < 0)
    np.ndarray((*array.shape, array.itemsize), np.bool_, marks, origin, (*array.strides, 1))[...] = True
    return marks
