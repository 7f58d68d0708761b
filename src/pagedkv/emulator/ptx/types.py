"""PTX scalar types, how registers of each type are viewed as NumPy arrays, and the windows of the address space."""

from __future__ import annotations

import numpy as np

# NumPy dtype of each register view; the letter is the interpretation, the number the width in bits.
VIEW_DTYPE: dict[str, np.dtype] = {
    f"{letter}{8 * size}": np.dtype(f"{kind}{size}")
    for letter, kind in (("u", "u"), ("s", "i"), ("f", "f"))
    for size in (1, 2, 4, 8)
    if letter != "f" or size > 1
}

# Size in bytes of every PTX type this package knows.
_TYPES_OF_SIZE = {
    1: "b8 u8 s8",
    2: "b16 u16 s16 f16 bf16 e4m3x2 e5m2x2",
    4: "b32 u32 s32 f32 tf32 f16x2 bf16x2 u16x2 s16x2",
    8: "b64 u64 s64 f64 f32x2",
    16: "b128",
}
SIZE: dict[str, int] = {name: size for size, names in _TYPES_OF_SIZE.items() for name in names.split()}

# Narrow and packed floats are computed in float32 or float64 and rounded back.
NARROW_FLOATS = ("f16", "bf16", "f16x2", "bf16x2", "f32x2")

# Windows of the generic address space.
GLOBAL_BASE = 0x7F0000000000
SHARED_WINDOW = 0x7D0000000000
LOCAL_WINDOW = 0x7C0000000000
WINDOW_BYTES = 1 << 24


def view_of(ty: str) -> str:
    """The register view that holds a value of PTX type `ty`: "b32" is held as "u32", "bf16" as "u16"."""
    return ty if ty in VIEW_DTYPE else bits_of(ty)


def bits_of(ty: str) -> str:
    """The unsigned view of the width of `ty`."""
    return f"u{8 * SIZE[ty]}"


def dtype_of(ty: str) -> np.dtype:
    """The NumPy dtype that holds a value of PTX type `ty`."""
    return VIEW_DTYPE[view_of(ty)]
