"""The device that a test of a kernel runs on: the emulator, and a GPU where there is one."""

import pytest

from pagedkv.cuda import driver

from .decode_cases import emulator
from .gpu_device import CopyingDevice


# Of a module: pytest would run what asks for one of a session before all that does not, and xdist share out the tests
# of one kernel, which each worker would compile.
@pytest.fixture(scope="module", params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def open_device(request):
    """A function of the checks of the emulator that makes a Device on NumPy arrays, for a `with` statement."""
    if request.param == "emulator":
        return emulator
    device = driver.cuda_device(0, 0)
    return lambda **checks: CopyingDevice(device)
