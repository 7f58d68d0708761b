"""Buckets of lengths: a plan or a table for one length serves all other lengths of its bucket."""

from __future__ import annotations

SMALLEST_BUCKET = 256  # tokens: the shortest split


def bucket(num_tokens: int) -> int:
    """Round a length up to a power of two, SMALLEST_BUCKET or more.

    A length that grows token by token, as in decoding, then needs a new plan or CUDA graph only when it has doubled.

    Raises
    ------
    ValueError
        The length is negative.
    """
    if num_tokens < 0:
        raise ValueError(f"a length must be at least 0, got {num_tokens}")
    return max(1 << (num_tokens - 1).bit_length(), SMALLEST_BUCKET)
