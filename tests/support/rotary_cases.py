"""Queries, keys and tables for the tests of the rotary embedding."""

import numpy as np


def tokens_of(rng, num_tokens, num_heads, head_dim, dtype):
    """Normal q and k, as parts of the rows that one projection makes."""
    both = (3 * rng.standard_normal((num_tokens, sum(num_heads), head_dim), np.float32)).astype(dtype)
    return both[:, : num_heads[0]], both[:, num_heads[0] :]


def tables_of(rng, max_positions, half, dtype, *, one_table=True):
    """Cosines and sines of any angles: the halves of one table, or arrays of their own."""
    angles = rng.uniform(-np.pi, np.pi, (max_positions, half))
    cos, sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    if not one_table:
        return cos, sin
    both = np.concatenate([cos, sin], axis=1)
    return both[:, :half], both[:, half:]
