"""The CUDA backend: kernels compiled with numba-cuda, linked and launched with cuda.core.

Importing it without numba-cuda is a BackendUnavailableError.
"""

from importlib.util import find_spec

from ..errors import BackendUnavailableError

INSTALL = (
    'pip install "pagedkv[cu13]" or "pagedkv[cu12]" on a machine with a GPU, and "pagedkv[emulator]" on one without'
)

if find_spec("numba_cuda") is None:
    raise BackendUnavailableError(f"CUDA kernels are compiled by numba-cuda, which is not installed: {INSTALL}")
