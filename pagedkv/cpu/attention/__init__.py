"""Decode and prefill on the CPU: one kernel each, compiled by numba, over the vector arithmetic of `steps`."""
