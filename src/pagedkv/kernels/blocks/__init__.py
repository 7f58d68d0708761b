"""The kernels on the contents of caches: write, gather, copy."""
