"""Turns the basic blocks of a kernel into Python that works on NumPy arrays."""
