"""Arrays that only speak DLPack, read with cuda-core."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import BackendUnavailableError
from ..extras import pip_install
from .argument import DeviceArgument
from .shadow import Metadata, metadata_of

_LEGACY_STREAM = 1  # what DLPack calls the legacy default stream
_CUDA_DEVICES = (2, 13)  # device types of DLPack: CUDA memory, and CUDA managed memory


def is_on_cuda(x: Any) -> bool:
    """Whether x reports through DLPack that it is in CUDA memory."""
    try:
        place = x.__dlpack_device__()
    except Exception:  # x does not speak DLPack, or does not know its device: in either case it is no CUDA array
        return False
    return isinstance(place, tuple) and len(place) == 2 and place[0] in _CUDA_DEVICES


class DlpackArray(DeviceArgument):
    """An array whose framework supports DLPack and nothing else."""

    __slots__ = ()

    def stream(self) -> int:
        return 0

    def metadata(self, stream: int) -> Metadata:
        """As in `DeviceArgument`; the producer orders its work before that of the stream."""
        try:
            from cuda.core.utils import StridedMemoryView
        except ImportError:
            raise BackendUnavailableError(
                f"{self.name} only speaks DLPack, which needs cuda-core: {pip_install('cu13')} (or [cu12] for CUDA 12)"
            ) from None
        try:
            view = StridedMemoryView.from_dlpack(self.array, stream or _LEGACY_STREAM)
            dtype = np.dtype(view.dtype)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"{self.name} must be an array that DLPack can show: {error}") from error
        strides = None if view.strides is None else tuple(n * dtype.itemsize for n in view.strides)
        shape, ordinal = tuple(view.shape), int(view.device_id)
        return metadata_of(self.name, int(view.ptr), shape, strides, dtype, bool(view.readonly), ordinal)
