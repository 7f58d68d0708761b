"""What this machine's processor can do, as numba compiles for it."""

from __future__ import annotations

from numba.core.registry import cpu_target


def _has(feature: str) -> bool:
    features = cpu_target.target_context.codegen().magic_tuple()[2]
    return f"+{feature}" in features.split(",")


def has_halves() -> bool:
    """Converts float16 and float32 in one instruction: all of AArch64, x86 with F16C."""
    return _has("f16c") or cpu_target.target_context.codegen().magic_tuple()[0].startswith(("aarch64", "arm64"))


def has_byte_permutes() -> bool:
    """Picks any 64 bytes out of 128 in one instruction (AVX-512 VBMI)."""
    return _has("avx512vbmi")


def prefetches_into_l1() -> bool:
    """AMD's Zen from Zen 5 on, which waits for lines that are in L2 alone. Others have too few miss buffers of L1."""
    name = cpu_target.target_context.codegen().magic_tuple()[1]
    return name.startswith("znver") and name not in ("znver1", "znver2", "znver3", "znver4")


def num_accumulators() -> int:
    """Vectors of 16 float32 that stay in registers beside the operands: 16 of AVX-512's 32, or 4 elsewhere.

    Each of those 4 takes two registers of AVX2's 16, or four of NEON's 32.
    """
    return 16 if _has("avx512f") else 4
