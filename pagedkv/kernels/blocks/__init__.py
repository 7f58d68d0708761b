"""Kernels that write, gather and copy what caches hold."""
