"""A toy in place of a model: layers of attention, and a next token that depends on every bit of their outputs."""

from functools import cache as memoized

import numpy as np

import pagedkv
from pagedkv.stores import HostStore, SwapSpace

from ..stores.test_prefixes import FaultyStore

VOCAB, HEAD_DIM = 50, 64
EMBED = np.random.default_rng(0).standard_normal((VOCAB, 1, HEAD_DIM), np.float32)
COS, SIN = (f(np.outer(np.arange(4096), 0.1 ** np.arange(HEAD_DIM // 2))).astype(np.float32) for f in (np.cos, np.sin))


def make_cache(num_blocks=64, block_size=4, windows=(None,), **options):
    return pagedkv.PagedKVCache(len(windows), num_blocks, block_size, 1, HEAD_DIM, windows=windows, **options)


def swap_of(cache, fault=lambda keys, blocks: blocks, timeout=60.0):
    """A space whose store does what a fault makes of it, and the store behind that one."""
    store = HostStore(2**22, 2**14)
    return SwapSpace(cache, FaultyStore(store, fault), block_tokens=8, timeout=timeout), store


def forward(cache, step, windows=None):
    """Write K and V of a step's tokens, other ones in each layer, and choose the next tokens.

    With `windows` the layers of a cache without any have these.
    """
    sums = 0
    for layer in range(len(cache.k_caches)):
        x = np.roll(EMBED, layer, axis=0)[step.tokens]
        q, _ = pagedkv.apply_rotary(x, None, COS, SIN, step.batch.positions)
        cache.write(layer, q, x, step.slots)
        out = cache.attend(layer, q, step.batch, **({} if windows is None else {"window": windows[layer]}))
        sums = sums + out[step.logits_indices].view(np.uint32).sum(axis=(1, 2))
    return sums % VOCAB


def serve(scheduler, cache, each=lambda step: None, windows=None):
    """Run all requests to the end; return the generated tokens by request."""
    texts = {}
    while step := scheduler.schedule():
        each(step)
        for finished in scheduler.update(step, forward(cache, step, windows).astype(np.int64)):
            texts[finished.request] = finished.tokens.tolist()
    cache.check()
    return texts


@memoized
def alone(prompt, num_new, windows=(None,)):
    """Generate after a prompt in an empty cache that keeps all tokens."""
    cache = make_cache(256, 16, [None for _ in windows], prefix_cache=False, max_seqs=1)
    scheduler = pagedkv.Scheduler(cache)
    number = scheduler.add(prompt, num_new)
    return serve(scheduler, cache, windows=windows)[number]
