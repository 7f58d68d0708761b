"""How much memory a piece of code allocates; of arrays, those of NumPy count."""

import tracemalloc
from contextlib import contextmanager


@contextmanager
def at_most(num_bytes):
    """Fail if the code allocates more at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= num_bytes
    finally:
        tracemalloc.stop()
