"""What models with windows need at their sizes: bytes, blocks, and beginnings that long prompts do not push out."""

import pytest

from pagedkv import PagedKVCache

GEMMA = [1024] * 5 + [None]  # Gemma 3: five layers with a window to one without
P = 16


@pytest.mark.parametrize(
    ("block_size", "num_bytes", "without_windows"), [(16, 311_296, 1_130_496), (8, 266_240, 1_105_920)]
)
def test_bytes_of_a_small_model_are_those_that_its_windows_need(block_size, num_bytes, without_windows):
    """Five of six layers see 24 tokens; 354 tokens, once in chunks and once one by one."""
    sizes = 6, 700 // block_size * 6, block_size, 2, 32
    for chunks in ([100, 100, 100, 54], [1] * 354):
        cache = PagedKVCache(*sizes, windows=[24] * 5 + [None])
        seq = cache.add(0).seq
        for n in chunks:
            cache.append(seq, n)
            cache.commit(seq)
        assert cache.stats().used_bytes == num_bytes
    cache = PagedKVCache(*sizes)
    cache.add(354)
    assert cache.stats().used_bytes == without_windows


def computed(cache, seq, num_tokens, *, chunk=512, tokens=None):
    """Append tokens in chunks until a sequence has so many, and return the most blocks that were in use."""
    most = 0
    while n := min(chunk, num_tokens - (length := int(cache.seq_lens(seq)[0]))):
        cache.append(seq, n, None if tokens is None else tokens[length : length + n])
        most = max(most, cache.stats().used)
        cache.commit(seq)
    return most


def test_long_sequences_take_the_blocks_that_windows_need():
    """And no more than a chunk besides while they are computed."""
    length = 32_768
    needed = 8 * (length + 5 * 1024) // P
    cache = PagedKVCache(6, 20_000, P, 1, 8, windows=GEMMA)
    seqs = [cache.add(0).seq for _ in range(8)]
    most = max(computed(cache, seq, length) for seq in seqs)
    assert cache.stats().used == needed
    assert most <= 1.01 * needed
    cache.append(seqs)
    assert cache.stats().used <= 1.005 * needed


def test_prompts_find_their_common_beginning_in_half_of_the_blocks_that_they_need():
    """Eight prompts that have 4,096 tokens of their own, three at a time; windows pass 1,280 blocks of each."""
    needed = 8 * (4608 // P + 5 * (1024 // P + 1))
    cache = PagedKVCache(6, needed // 2, P, 1, 8, windows=GEMMA, max_seq_len=5000)
    num_cached, seqs = [], []
    for i in range(8):
        tokens = [*range(512), *range(10_000 * (i + 1), 10_000 * (i + 1) + 4096)]
        cache.free(seqs[-3:-2])
        seq, n = cache.add_found(tokens, chunk=512)
        computed(cache, seq, len(tokens), tokens=tokens)
        seqs.append(seq)
        num_cached.append(n)
    assert num_cached == [0] + [512] * 7  # plain LRU finds it twice
