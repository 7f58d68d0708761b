"""The CUDA backend: kernels of kernels/, compiled by compiler/ and launched with cuda.core."""

from .. import compiler as compiler  # before any kernel: it says what is missing, and puts numba_cuda in its place
