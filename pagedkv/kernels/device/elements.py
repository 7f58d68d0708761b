"""Elements of caches, queries and outputs. Plain numbers: what only plans a kernel needs no compiler."""

ELEMENT_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8}
