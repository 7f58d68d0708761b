"""What kernels are written in: `cuda`, the types of their values, and how intrinsics are declared.

All of it is numba-cuda's, which no other module of kernels/ imports: a move to its successor begins here.
"""

from numba import cuda, float32, float64, int32, int64, typeof, types, uint8, uint16, uint32, uint64
from numba.core import cgutils
from numba.cuda.extending import intrinsic

__all__ = [
    "cgutils",
    "cuda",
    "float32",
    "float64",
    "int32",
    "int64",
    "intrinsic",
    "typeof",
    "types",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]
