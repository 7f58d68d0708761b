"""The CPU backend. Its modules are imported when they are first used: numba takes its time."""
