"""Runs translated kernels: the operations that their code calls, barriers, and the order of warps."""
