"""Buckets of lengths: what is made for one length serves all others of its bucket."""

from __future__ import annotations

SMALLEST_BUCKET = 256  # tokens: the shortest split


def bucket(num_tokens: int) -> int:
    """The power of two that a length of at least 1 is rounded up to, or SMALLEST_BUCKET; below 1, the number itself.

    So a length that grows token by token, as in decoding, needs a new plan or CUDA graph once for each doubling.
    """
    return num_tokens if num_tokens < 1 else max(1 << (num_tokens - 1).bit_length(), SMALLEST_BUCKET)
