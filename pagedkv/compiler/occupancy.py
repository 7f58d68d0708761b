"""How many thread blocks of a kernel fit on a multiprocessor."""

from __future__ import annotations

from .ptx import Capability

# What the system reserves in each block's shared memory; from 9.0 on a cubin counts it as static.
SYSTEM_SHARED_BYTES = 1024

# Shared memory of a multiprocessor and the most that a block may have: CUDA C++ Programming Guide, technical
# specifications per compute capability.
_SMALL_KIB, _MEDIUM_KIB, _LARGE_KIB = 100, 164, 228


def shared_kib(capability: Capability) -> int:
    """KiB of shared memory of a multiprocessor, the least of all if it is not known; a block has at most 1 less."""
    if capability in ((8, 0), (8, 7)):
        return _MEDIUM_KIB
    return _LARGE_KIB if capability[0] in (9, 10) else _SMALL_KIB


def occupancy(capability: Capability, registers: int, num_threads: int, shared_bytes: int) -> int:
    """Blocks of a kernel that are resident on a multiprocessor at once; 0 if it cannot run.

    It follows cuda_occupancy.h of the CUDA toolkit (cudaOccMaxActiveBlocksPerMultiprocessor). Whole warps get
    registers, 256 at a time, from 4 partitions of 16384. Blocks get shared memory in units of 128 bytes, and 1 KiB more
    each for the system.

    Parameters
    ----------
    capability : tuple of int
        The rules are those of (8, 0), (9, 0) and (10, 0).
    registers : int
        Registers of a thread.
    num_threads : int
        Threads of a block.
    shared_bytes : int
        Shared memory of a block, static and dynamic.
    """
    most_shared = shared_kib(capability) * 1024
    warps = -(-num_threads // 32)
    warp_registers = -(-registers * 32 // 256) * 256
    if num_threads > 1024 or shared_bytes > most_shared - SYSTEM_SHARED_BYTES:
        return 0
    by_registers = 16384 // warp_registers * 4 // warps
    by_shared = most_shared // (-(-(shared_bytes + SYSTEM_SHARED_BYTES) // 128) * 128)
    return min(by_registers, by_shared, 64 // warps, 32)
