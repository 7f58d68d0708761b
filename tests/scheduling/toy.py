"""A toy in place of a model: one layer of attention, whose next token depends on every bit of its output."""

from functools import cache as memoized

import numpy as np

import pagedkv

VOCAB, HEAD_DIM = 50, 64
EMBED = np.random.default_rng(0).standard_normal((VOCAB, 1, HEAD_DIM), np.float32)
COS, SIN = (f(np.outer(np.arange(4096), 0.1 ** np.arange(HEAD_DIM // 2))).astype(np.float32) for f in (np.cos, np.sin))


def make_cache(num_blocks=64, block_size=4, **options):
    return pagedkv.PagedKVCache(1, num_blocks, block_size, 1, HEAD_DIM, **options)


def forward(cache, step):
    """Write K and V of a step's tokens, and choose the next ones."""
    x = EMBED[step.tokens]
    q, _ = pagedkv.apply_rotary(x, None, COS, SIN, step.batch.positions)
    cache.write(0, q, x, step.slots)
    out = cache.attend(0, q, step.batch)[step.logits_indices]
    return out.view(np.uint32).sum(axis=(1, 2)) % VOCAB


def serve(scheduler, cache, each=lambda step: None):
    """Run all requests to the end; return the generated tokens by request."""
    texts = {}
    while step := scheduler.schedule():
        each(step)
        for finished in scheduler.update(step, forward(cache, step).astype(np.int64)):
            texts[finished.request] = finished.tokens.tolist()
    cache.check()
    return texts


@memoized
def alone(prompt, num_new):
    """Generate after a prompt in an empty cache."""
    cache = make_cache(256, 16, prefix_cache=False, max_seqs=1)
    scheduler = pagedkv.Scheduler(cache)
    number = scheduler.add(prompt, num_new)
    return serve(scheduler, cache)[number]
