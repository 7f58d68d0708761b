"""fp8 and int8 as float16 halves of words, which is exact, for tensor cores to multiply."""

from __future__ import annotations

from typing import Any

from .intrinsics.warp import halves_of_lower_e4m3, halves_of_upper_e4m3, permute, subtract_halves
from .language import uint32
from .source import device_function

SIGNS = 0x80008000  # of both halves of a word


def make_halves(kind: str, hardware_fp8: bool) -> tuple[Any, Any]:
    """The device functions that widen the lower and the upper two codes of a word to float16 halves.

    Without an instruction for it, e4m3 comes out as 2**-8 times its value; `software_factor` makes up for that.
    """
    if kind == "int8":
        return _halves_of_int8(0x4140), _halves_of_int8(0x4342)
    if kind == "fp8_e4m3" and hardware_fp8:
        return halves_of_lower_e4m3, halves_of_upper_e4m3
    IS_E4M3 = kind == "fp8_e4m3"

    @device_function
    def widen(halves):
        """Widen codes in the upper bytes of both halves; in e5m2 these are float16 already."""
        if IS_E4M3:
            # Shifted right by one, exponent and mantissa are those of 2**-8 times the value. All ones are NaN: adding
            # one carries into the sign bit, which then fills the exponent.
            magnitude = uint32(halves & 0x7F007F00)
            nan = uint32((magnitude + 0x01000100) & SIGNS)
            value = uint32(uint32(magnitude >> 1) | uint32(nan >> 1))
            return uint32((halves & SIGNS) | value)
        return halves

    @device_function
    def lower(word):
        return widen(permute(word, 0, 0x1404))

    @device_function
    def upper(word):
        return widen(permute(word, 0, 0x3424))

    return lower, upper


def _halves_of_int8(selector: int) -> Any:
    SELECTOR = selector

    @device_function
    def widen(word):
        """Beside 1024 a float16 counts in ones: as its low byte, code + 128 makes 1152 + code."""
        biased = permute(uint32(word ^ uint32(0x80808080)), uint32(0x64646464), SELECTOR)
        return subtract_halves(biased, uint32(0x64806480))

    return widen


def software_factor(kind: str, hardware_fp8: bool) -> float:
    """The factor by which values from `make_halves` are too small."""
    return 256.0 if kind == "fp8_e4m3" and not hardware_fp8 else 1.0
