"""Devices of a bench's own in the place of the emulator's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from .. import backends
from ..cuda.backend import KernelBackend
from ..emulator import EmulatorDevice


@contextmanager
def emulated_on(make: Callable[[], EmulatorDevice]) -> Iterator[None]:
    """Run each call for the emulator on the device that ``make()`` returns."""
    with patch.dict(backends._backends, emulator=KernelBackend(lambda placement: make())):
        yield
