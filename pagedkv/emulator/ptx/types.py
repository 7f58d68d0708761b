"""PTX scalar types, the NumPy views that hold them, and the windows of the generic address space."""

from __future__ import annotations

import numpy as np

# dtype of each register view, such as "u32": a kind and a width in bits.
VIEW_DTYPE: dict[str, np.dtype] = {
    f"{letter}{8 * size}": np.dtype(f"{kind}{size}")
    for letter, kind in (("u", "u"), ("s", "i"), ("f", "f"))
    for size in (1, 2, 4, 8)
    if letter != "f" or size > 1
}

# Bytes of every PTX type that the emulator knows.
_TYPES_OF_SIZE = {
    1: "b8 u8 s8",
    2: "b16 u16 s16 f16 bf16 e4m3x2 e5m2x2",
    4: "b32 u32 s32 f32 tf32 f16x2 bf16x2 u16x2 s16x2",
    8: "b64 u64 s64 f64 f32x2",
    16: "b128",
}
SIZE: dict[str, int] = {name: size for size, names in _TYPES_OF_SIZE.items() for name in names.split()}

# The emulator computes these in float32 or float64, and rounds the result.
NARROW_FLOATS = ("f16", "bf16", "f16x2", "bf16x2", "f32x2")

# The addresses where global memory and the windows of shared and local memory begin.
GLOBAL_BASE = 0x7F0000000000
SHARED_WINDOW = 0x7D0000000000
LOCAL_WINDOW = 0x7C0000000000
WINDOW_BYTES = 1 << 24


def view_of(ty: str) -> str:
    """The register view that holds PTX type `ty`: "u32" for "b32", "u16" for "bf16"."""
    return ty if ty in VIEW_DTYPE else bits_of(ty)


def bits_of(ty: str) -> str:
    """The unsigned view as wide as `ty`."""
    return f"u{8 * SIZE[ty]}"


def dtype_of(ty: str) -> np.dtype:
    """The dtype that holds PTX type `ty`."""
    return VIEW_DTYPE[view_of(ty)]
