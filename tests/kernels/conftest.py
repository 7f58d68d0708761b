"""The device that a test of a kernel runs on: the emulator, and a GPU where there is one."""

import pytest

from pagedkv.cuda import driver

from .decode_cases import emulator
from .gpu_device import CopyingDevice


@pytest.fixture(scope="session", params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def open_device(request):
    """A function of the checks of the emulator that makes a Device on NumPy arrays, for a `with` statement."""
    if request.param == "emulator":
        return emulator
    device = driver.cuda_device(0, 0)
    return lambda **checks: CopyingDevice(device)
