"""A small cache, a text to put into it, and the digests of its blocks."""

import hashlib

import numpy as np

from pagedkv import PagedKVCache

P = 4
TEXT = list(range(100, 111))  # two full blocks, and three tokens


def make(num_blocks=16, **options) -> PagedKVCache:
    return PagedKVCache(1, num_blocks, P, 1, 8, **{"max_seqs": 8} | options)


def started(cache, tokens, salt=None):
    seq = cache.add(tokens, salt).seq
    cache.commit(seq)
    return seq


def digests(tokens, head=bytes(16)):
    """The digests of the full blocks, worked out once more."""
    found = []
    for i in range(0, len(tokens) // P * P, P):
        head = hashlib.blake2b(head + np.array(tokens[i : i + P], "<i4").tobytes(), digest_size=16).digest()
        found.append(head)
    return found
