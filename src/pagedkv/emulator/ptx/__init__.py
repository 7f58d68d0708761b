"""Reads PTX: text to instructions, and kernels to basic blocks."""
