"""Compile a kernel's factory and config to PTX and machine code, with numba-cuda and nvJitLink and without a driver.

The import raises BackendUnavailableError without numba-cuda, with a NumPy that is too new for it, or while numba
simulates CUDA.
"""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np

from ..errors import BackendUnavailableError
from ..extras import pip_install

INSTALL = f"{pip_install('cu13')} (or [cu12] for CUDA 12, [emulator] without a GPU)"

if find_spec("numba_cuda") is None:
    raise BackendUnavailableError(f"CUDA kernels are compiled by numba-cuda, which is not installed: {INSTALL}")
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 5):  # which has no np.row_stack
    raise BackendUnavailableError(
        f"CUDA kernels are compiled by numba-cuda, and numba-cuda {version('numba-cuda')} needs NumPy below 2.5, got "
        f'{np.__version__}: pip install "numpy<2.5"'
    )

# This puts numba_cuda in the place of numba.cuda, before kernels import it. A .pth file does so, too, but Python does
# not read those of a folder on PYTHONPATH.
import_module("_numba_cuda_redirector")


def compiler_missing(error: Exception) -> BackendUnavailableError:
    """The error for a missing or broken NVVM, or nvrtc, which numba-cuda needs as well."""
    reason = str(error).split("\n", 1)[0]  # what follows lists folders
    needed = "need nvrtc" if "nvrtc" in reason else "are compiled by NVVM"
    return BackendUnavailableError(f"CUDA kernels {needed}, which is missing or does not work ({reason}): {INSTALL}")


def require_no_simulator() -> None:
    """Raise BackendUnavailableError if NUMBA_ENABLE_CUDASIM is set: numba then interprets kernels."""
    try:
        from numba import cuda
        from numba.cuda.core import config
    except ImportError as error:
        raise BackendUnavailableError(
            f"CUDA kernels are compiled by numba-cuda, which cannot be imported ({error}): {INSTALL}"
        ) from error
    if config.ENABLE_CUDASIM or hasattr(cuda, "simulator_init"):  # numba.cuda chooses at its import, decorators later
        raise BackendUnavailableError(
            "NUMBA_ENABLE_CUDASIM is set, and numba's simulator compiles no kernels: unset it, and start Python again"
        )


require_no_simulator()  # in the simulator, a module with a kernel cannot even be imported
