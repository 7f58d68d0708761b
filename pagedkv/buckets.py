"""Buckets of lengths: what is made for one length serves all others of its bucket."""

from __future__ import annotations

SMALLEST_BUCKET = 256  # tokens: the shortest split


def bucket(num_tokens: int) -> int:
    """The power of two, SMALLEST_BUCKET or more, that a length of at least 0 is rounded up to.

    So a length that grows token by token, as in decoding, needs a new plan or CUDA graph once for each doubling.

    Raises
    ------
    ValueError
        The length is negative.
    """
    if num_tokens < 0:
        raise ValueError(f"a length must be at least 0, got {num_tokens}")
    return max(1 << (num_tokens - 1).bit_length(), SMALLEST_BUCKET)
