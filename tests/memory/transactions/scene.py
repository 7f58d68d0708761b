"""A cache in the middle of its life, and every mutation and read of it."""

from unittest import mock

import numpy as np

from pagedkv import PagedKVCache
from pagedkv.memory import BlockPool

from ..groups.tables import Listener
from ..manager import state
from ..prefix.router import Router

LATE = [7, 8, 9, 7, 8, 9, 7, 8]


class Scene:
    """A cache in which the forks share a partial block, and one sequence is about to fill up its own.

    Some blocks can be found, in use and not, and one sequence has full blocks that are not committed yet, the first of
    them like one that is. Two are in the middle of their steps, and one of them needs a block for the next.

    With `windows` the layers are two groups, and some calls release what a window has passed first.
    """

    def __init__(self, windows=None):
        self.events, num_blocks = [], 19 if windows is None else 38
        self.cache = PagedKVCache(
            *(2, num_blocks, 4, 1, 8), max_seqs=11, max_seq_len=20, windows=windows, events=self.events.append
        )
        self.cache.k_caches[0][:] = np.arange(num_blocks)[:, None, None, None]
        self.seq = self.cache.add(6).seq
        self.forks = self.cache.fork(self.seq, 2)
        self.other = self.cache.add(8).seq
        self.cache.free(self.cache.add(1).seq)
        self.late = self.cache.add(LATE).seq
        cached = self.cache.add(LATE[:4] + [0] * 13).seq
        self.cache.commit(cached)
        if windows is None:
            self.cache.truncate(cached, 4)
        self.cache.pin("first", LATE[:4])
        self.cache.free(cached)
        self.running = [self.cache.add([1, 2]).seq, self.cache.add([3, 4, 5]).seq]
        for token in (6, 7):
            self.cache.append(self.running, tokens=[token, token])
            self.cache.commit(self.running)

    def assert_events_match(self):
        """The events so far, of which one may have come twice, tell of just the blocks that can be found."""
        listener = Router() if len(self.cache.groups) == 1 else Listener()
        for event in self.events:
            listener(event)
        listener.agrees_with(self.cache)

    def everything(self):
        """All state of the cache as bytes, and K of all blocks in use; what is in the free ones does not matter."""
        # Events that an interrupt keeps from the listener come with those of the next change.
        arrays = {name: content for name, content in state(self.cache).items() if not name.endswith("outbox._events")}
        del arrays["k_caches"], arrays["v_caches"]
        return arrays, np.stack(self.cache.k_caches)[:, self.cache.pool.ref_counts > 0].tobytes()


def states_of(mutate, windows=None):
    """Everything before a mutation, and after each of its steps, of which an error leaves the first ones."""
    scene, commit = Scene(windows), BlockPool._commit
    states = [scene.everything()]

    def recorded(*args, **options):
        commit(*args, **options)
        states.append(scene.everything())

    with mock.patch.object(BlockPool, "_commit", recorded):
        mutate(scene)
    return states


WINDOWS = (3, None)
MUTATIONS = {
    "pool.allocate": lambda s: s.cache.pool.allocate(2),
    "pool.allocate, evicting": lambda s: s.cache.pool.allocate(7),
    "pool.retain": lambda s: s.cache.pool.retain([0, 1, 1]),
    "pool.release": lambda s: s.cache.pool.release([0, 2, 1, 0]),
    "add": lambda s: s.cache.add(7),
    "add, found": lambda s: s.cache.add([*LATE[:4], 0, 0, 0, 0, 1]),
    "add_found": lambda s: s.cache.add_found(LATE[:4]),
    "append 1": lambda s: s.cache.append([s.other, s.forks[0], s.seq]),
    "append n": lambda s: s.cache.append([s.other, s.seq, s.forks[0]], [0, 9, 1]),
    "append, next": lambda s: s.cache.append(s.running, tokens=[8, 8]),
    "append, tokens": lambda s: s.cache.append([s.late, s.seq], [2, 1], [1, 2, 3]),
    "commit": lambda s: s.cache.commit([s.late, s.seq]),
    "fork": lambda s: s.cache.fork(s.seq, 2),
    "truncate": lambda s: s.cache.truncate([s.other, s.seq], [3, 4]),
    "free": lambda s: s.cache.free([s.seq, s.other]),
    "reorder": lambda s: s.cache.reorder([s.other, s.seq, s.forks[0]], [1, 0, 0]),
    "pin": lambda s: s.cache.pin("second", [*LATE[:4], 0, 0, 0, 0]),
    "unpin": lambda s: s.cache.unpin("first"),
    "reset": lambda s: s.cache.reset(),
}
# Those that do more where there are windows.
OF_WINDOWS = ("add, found", "append n", "append, next", "commit", "truncate")
READS = {
    "batch": lambda s: [
        x.tolist() for x in (s.cache.batch([s.seq, s.other]).block_tables, s.cache.batch(s.seq).seq_lens)
    ],
    "stats": lambda s: s.cache.stats(),
    "plot": lambda s: s.cache.plot(),
    "check": lambda s: s.cache.check(),
    "pool.check": lambda s: s.cache.pool.check(),
    "html": lambda s: s.cache._repr_html_(),
    "slots": lambda s: s.cache.slots(s.other, 0, 8).tolist(),
    "seq_lens": lambda s: s.cache.seq_lens([s.seq, s.other]).tolist(),
    "block_tables": lambda s: s.cache.block_tables([s.seq, s.other]).tolist(),
    "num_tokens": lambda s: s.cache.num_tokens,
    "find": lambda s: s.cache.find(LATE),
    "can_add": lambda s: s.cache.can_add(20),
    "block_fills": lambda s: s.cache.block_fills().tolist(),
    "block_owners": lambda s: s.cache.block_owners().tolist(),
    "block_groups": lambda s: s.cache.block_groups().tolist(),
}
