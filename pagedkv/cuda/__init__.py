"""The CUDA backend: kernels of kernels/, compiled by compiler/ and launched with cuda.core."""

from .. import compiler as compiler  # before any kernel, which takes what numba.cuda is then
