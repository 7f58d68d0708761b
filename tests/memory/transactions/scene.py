"""A cache in the middle of its life, and every mutation of it."""

import numpy as np

from pagedkv import PagedKVCache

from ..manager import state


class Scene:
    """A cache in which the forks share a partial block, and one sequence is about to fill up its own."""

    def __init__(self) -> None:
        self.cache = PagedKVCache(2, 12, 4, 1, 8, max_seqs=6, max_seq_len=20)
        self.cache.k_caches[0][:] = np.arange(12)[:, None, None, None]
        self.seq = self.cache.add(6).seq
        self.forks = self.cache.fork(self.seq, 2)
        self.other = self.cache.add(8).seq
        self.cache.free(self.cache.add(1).seq)

    def contents(self) -> bytes:
        """K of all blocks in use; what is in the free ones does not matter."""
        return np.stack(self.cache.k_caches)[:, self.cache.pool.ref_counts > 0].tobytes()

    def everything(self) -> tuple:
        arrays = state(self.cache)
        del arrays["k_caches"], arrays["v_caches"]
        return arrays, self.contents()


MUTATIONS = {
    "pool.allocate": lambda s: s.cache.pool.allocate(2),
    "pool.retain": lambda s: s.cache.pool.retain([0, 1, 1]),
    "pool.release": lambda s: s.cache.pool.release([0, 2, 1, 0]),
    "table.append": lambda s: s.cache.table.append([s.other, s.forks[0], s.seq], [3, 1, 0]),
    "table.add": lambda s: s.cache.table.add(5),
    "add": lambda s: s.cache.add(7),
    "append 1": lambda s: s.cache.append([s.other, s.forks[0], s.seq]),
    "append n": lambda s: s.cache.append([s.other, s.seq, s.forks[0]], [0, 9, 1]),
    "fork": lambda s: s.cache.fork(s.seq, 2),
    "truncate": lambda s: s.cache.truncate([s.other, s.seq], [3, 4]),
    "free": lambda s: s.cache.free([s.seq, s.other]),
}
