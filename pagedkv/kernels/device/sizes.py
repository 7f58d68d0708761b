"""Sizes of elements and of a warp. They are plain numbers: code that only plans a kernel needs no compiler for them."""

ELEMENT_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8}
SCALED_BY_ROW = ("int8",)  # the kinds whose rows have a float32 scale each
LARGEST_CODE = 127  # of such a row
WARP_SIZE = 32
ALL_LANES = 0xFFFFFFFF  # the mask of an operation of the whole warp
