"""A toy in place of a model: layers of attention, and a next token that depends on every bit of their outputs."""

from functools import cache as memoized

import numpy as np

import pagedkv

VOCAB, HEAD_DIM = 50, 64
EMBED = np.random.default_rng(0).standard_normal((VOCAB, 1, HEAD_DIM), np.float32)
COS, SIN = (f(np.outer(np.arange(4096), 0.1 ** np.arange(HEAD_DIM // 2))).astype(np.float32) for f in (np.cos, np.sin))


def make_cache(num_blocks=64, block_size=4, *, num_layers=1, **options):
    return pagedkv.PagedKVCache(num_layers, num_blocks, block_size, 1, HEAD_DIM, **options)


def forward(cache, step, windows=None):
    """Write K and V of a step's tokens, and choose the next ones; `windows` are those that the cache does not know."""
    x = EMBED[step.tokens]
    q, _ = pagedkv.apply_rotary(x, None, COS, SIN, step.batch.positions)
    chosen = 0
    for layer in range(len(cache.k_caches)):
        cache.write(layer, q, x, step.slots)
        own = {} if windows is None else {"window": windows[layer]}
        out = cache.attend(layer, q, step.batch, **own)[step.logits_indices]
        chosen = 3 * chosen + out.view(np.uint32).sum(axis=(1, 2))
    return chosen % VOCAB


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
    """Generate after a prompt in an empty cache, which keeps all blocks; each layer has a window or None."""
    cache = make_cache(256, 16, num_layers=len(windows), prefix_cache=False, max_seqs=1)
    scheduler = pagedkv.Scheduler(cache)
    number = scheduler.add(prompt, num_new)
    return serve(scheduler, cache, windows=windows)[number]
