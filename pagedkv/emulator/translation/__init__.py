"""Translates the basic blocks of a kernel into Python that computes on NumPy arrays."""
