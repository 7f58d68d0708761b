"""Translation of a kernel's basic blocks into Python that computes on NumPy arrays."""
