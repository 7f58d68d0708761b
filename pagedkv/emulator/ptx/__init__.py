"""Reads PTX: text into instructions, kernels into basic blocks."""
