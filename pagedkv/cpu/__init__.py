"""The CPU backend. numba is slow to import, so its modules are imported on first use."""
