"""How many blocks of a kernel fit on a multiprocessor."""

from __future__ import annotations

from .ptx import Capability

# Reserved by the system in each block's shared memory; from 9.0 on a cubin counts it as static.
SYSTEM_SHARED_BYTES = 1024

# Shared memory of a multiprocessor and the most that a block may have: CUDA C++ Programming Guide, technical
# specifications per compute capability.
_SMALL_KIB, _MEDIUM_KIB, _LARGE_KIB = 100, 164, 228


def shared_kib(capability: Capability) -> int:
    """KiB of shared memory of a multiprocessor; a block has at most 1 less. Of one not known yet, the least."""
    if capability in ((8, 0), (8, 7)):
        return _MEDIUM_KIB
    return _LARGE_KIB if capability[0] in (9, 10) else _SMALL_KIB


def occupancy(capability: Capability, registers: int, num_threads: int, shared_bytes: int) -> int:
    """Blocks of a kernel that are resident on a multiprocessor at once; 0 if it cannot run.

    The rules of cuda_occupancy.h of the CUDA toolkit (cudaOccMaxActiveBlocksPerMultiprocessor): registers are given to
    whole warps, 256 at a time, in 4 partitions of 16384; shared memory in units of 128 bytes, with 1 KiB per block
    reserved for the system.

    Parameters
    ----------
    capability : tuple of int
        The rules are those of (8, 0), (9, 0) and (10, 0).
    registers : int
        Per thread.
    num_threads : int
        Per block.
    shared_bytes : int
        Per block, static and dynamic.
    """
    most_shared = shared_kib(capability) * 1024
    warps = -(-num_threads // 32)
    warp_registers = -(-registers * 32 // 256) * 256
    if num_threads > 1024 or shared_bytes > most_shared - SYSTEM_SHARED_BYTES:
        return 0
    by_registers = 16384 // warp_registers * 4 // warps
    by_shared = most_shared // (-(-(shared_bytes + SYSTEM_SHARED_BYTES) // 128) * 128)
    return min(by_registers, by_shared, 64 // warps, 32)
