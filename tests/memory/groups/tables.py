"""What the groups of a cache hold, what can be found in them, and an eviction of the blocks that a test names."""

from itertools import count

import numpy as np

from pagedkv import PagedKVCache
from pagedkv.memory import LRU, AllBlocksCleared, BlockStored

P = 4


def make(*windows, num_blocks=100, **options):
    """A cache with a layer for each window, in blocks of 4 tokens."""
    return PagedKVCache(len(windows), num_blocks, P, 1, 8, windows=windows, **options)


def tables(cache, seqs):
    """The block tables of each group, (G, num_seqs, width), of a cache with one group, too."""
    tables = cache.batch(seqs).block_tables
    return tables if tables.ndim == 3 else tables[None]


def columns(cache, seq):
    """The columns that a sequence holds, for each group."""
    return [np.flatnonzero(table[0] >= 0).tolist() for table in tables(cache, [seq])]


def assert_sound(cache, seqs):
    """Every invariant holds, and the tables of all sequences account for each reference; a block is in one group."""
    cache.check()
    held = tables(cache, seqs)
    references = np.bincount(held[held >= 0], minlength=cache.pool.num_blocks)
    assert references.tolist() == cache.pool.ref_counts.tolist()
    of_groups = [set(table[table >= 0].tolist()) for table in held]
    assert sum(map(len, of_groups)) == len(set().union(*of_groups))
    assert cache.stats().used_by_group == tuple(map(len, of_groups))


def shortest(cache, seq):
    """The shortest length above 0 that a sequence can be cut to, which the errors for shorter ones name."""
    messages = []
    for length in count(1):
        [copy] = cache.fork(seq)
        try:
            cache.truncate(copy, length)
        except ValueError as error:
            messages.append(str(error))
        else:
            break
        finally:
            cache.free(copy)
    assert all(message.startswith(f"length must be 0 or at least {length}") for message in messages)
    return length


class Chosen(LRU):
    """Evicts the blocks `first` before all others."""

    first = ()

    def plan_leave(self, blocks, num_evicted):
        waiting = self.waiting()
        left = waiting[~np.isin(waiting, blocks)]
        evicted = left[np.argsort(~np.isin(left, self.first), kind="stable")][:num_evicted]
        return evicted, super().plan_leave(np.concatenate([blocks, evicted]), 0)[1]


class Listener:
    """The digest and the group of each findable block, by the events."""

    def __init__(self):
        self.blocks, self.any_removed = set(), False
        self._last = None

    def __call__(self, event):
        if event is self._last:  # an interrupt makes the cache deliver it again
            return
        self._last = event
        if isinstance(event, AllBlocksCleared):
            self.blocks, self.any_removed = set(), True
            return
        blocks = {(digest, event.group_idx) for digest in event.block_hashes}
        assert len(blocks) == len(event.block_hashes)
        if isinstance(event, BlockStored):
            assert not blocks & self.blocks
            self.blocks |= blocks
        else:
            assert blocks <= self.blocks
            self.blocks -= blocks
            self.any_removed = True

    @property
    def states(self):
        """The digests of the blocks that a snapshot is behind, in a cache of two groups."""
        return {digest for digest, group in self.blocks if group == 2}

    def agrees_with(self, cache, salts=(None,)):
        """There are as many blocks as can be found."""
        if cache.prefix_cache:
            assert len(self.blocks) == len(cache.pool._prefix_cache.findable())


def evict(cache, blocks):
    """Evict just these blocks, from a cache whose eviction is `Chosen`."""
    cache.pool._prefix_cache.eviction.first = tuple(blocks.tolist())
    stats = cache.stats()
    cache.pool.release(cache.pool.allocate(stats.free - stats.cached + len(blocks)))
