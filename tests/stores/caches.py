"""Caches whose K and V are random bits, and what tests compare of them."""

import math

import numpy as np

from pagedkv import PagedKVCache
from pagedkv.arrays import host_view
from pagedkv.commit import bits
from pagedkv.layouts import as_tokens
from pagedkv.stores.blocks import CacheBlocks

LAYERS, HEADS, DIM, W = 3, 4, 16, 8
SIZES = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": DIM}


def make_cache(num_blocks=40, block_size=8, **options):
    return PagedKVCache(num_blocks=num_blocks, block_size=block_size, **SIZES | options)


def blocks_of(cache, model="a model", **options):
    return CacheBlocks(cache, model, block_tokens=W, **options)


def fill(cache, seed=0):
    """Write random bits to all blocks, and to the scales of their rows."""
    rng = np.random.default_rng(seed)
    for array in (*cache.k_caches, *cache.v_caches, *cache.k_scales, *cache.v_scales):
        view = bits(host_view(array))
        view[...] = rng.integers(0, np.iinfo(view.dtype).max, view.shape, view.dtype)


def contents(cache, slots, layout="NHD"):
    """K and V of tokens, and the scales of their rows, as (num_layers, 2, num_tokens, num_kv_heads, bytes)."""
    ids, offsets = np.divmod(slots, cache.block_size)

    def stored(array):
        rows = np.ascontiguousarray(as_tokens(layout, bits(host_view(array)))[ids, offsets])
        return rows.reshape(*rows.shape[:2], math.prod(rows.shape[2:])).view(np.uint8)

    parts = (*zip(cache.k_caches, cache.v_caches, strict=True),), (*zip(cache.k_scales, cache.v_scales, strict=True),)
    return np.concatenate([[[stored(x) for x in both] for both in part] for part in parts if part], axis=-1)


def text(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, num_tokens).astype(np.int32)


def committed(cache, tokens, salt=None):
    """A sequence with random K and V that others find."""
    seq, num_cached = cache.add(tokens, salt)
    slots = cache.slots(seq, num_cached, len(tokens))
    rng = np.random.default_rng(len(tokens))
    for layer in range(LAYERS):
        cache.write(layer, *rng.standard_normal((2, len(slots), HEADS, DIM), np.float32), slots)
    cache.commit(seq)
    return seq


def evict(cache):
    """Evict all blocks that no sequence has."""
    cache.free(cache.add(cache.num_free // len(cache.groups) * cache.block_size).seq)
