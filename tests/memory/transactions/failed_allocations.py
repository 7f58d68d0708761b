"""Each mutation, with every allocation of CPython's and NumPy's small objects failing in turn, alone or with the next.

A program of its own, since NumPy does not survive everything that it can be made to meet here.
"""

import _testcapi
import gc
import itertools
import sys

from pagedkv import PagedKVCache

from ..device_module import DeviceModule
from .scene import MUTATIONS, OF_THE_PREFIX_CACHE, Scene


def attempt(call, scene, first: int, last: int) -> bool:
    """Run the call while allocations first..last-1 fail; False if it raised."""
    gc.collect()  # also empties the lists of free objects, from which CPython would allocate without failing
    _testcapi.set_nomemory(first, last)
    try:
        call(scene)
    except (MemoryError, SystemError):  # NumPy loses the MemoryError in places
        _testcapi.remove_mem_hooks()
        return False
    finally:
        _testcapi.remove_mem_hooks()
    return True


def refusals(name: str, width: int) -> int:
    """How many failures of a mutation changed nothing."""
    scene = Scene()  # for all of them, since a failure changes nothing
    before = scene.everything()
    # Of calls that begin with many allocations, groups that fail together stand side by side and do not overlap.
    for number in itertools.count(1, width if name in OF_THE_PREFIX_CACHE else 1):
        done = attempt(MUTATIONS[name], scene, number, number + width)
        where = f"{name}, allocation {number}, {width=}"
        assert not scene.cache.pool._guard.lock.locked(), f"{where}: the lock stays taken"
        assert done or scene.everything() == before, f"{where}: changed"
        # The pool tells whether its guard lets calls in; of a cache that is as before there is no more to check.
        (scene.cache if done and not name.startswith("pool.") else scene.cache.pool).check()
        if done:
            return number - 1


def batches_that_recover(width: int) -> int:
    """How many failures of a batch on a device came before one that was right again."""
    sys.modules["cupy"] = DeviceModule()
    for number in itertools.count(1):
        cache = PagedKVCache(1, 12, 4, 1, 8, array_module="cupy", max_seqs=4)
        seqs = [cache.add(n).seq for n in (5, 8, 2)]
        cache.batch(seqs)
        cache.append(seqs)
        done = attempt(lambda cache, seqs=seqs: cache.batch(seqs), cache, number, number + width)
        assert not cache.pool._guard.lock.locked()
        batch = cache.batch(seqs)
        tables = cache.block_tables(seqs)
        assert (batch.block_tables[:, : tables.shape[1]] == tables).all(), (number, width)
        assert (batch.seq_lens == cache.seq_lens(seqs)).all(), (number, width)
        if done:
            return number - 1


if __name__ == "__main__":
    gc.freeze()  # what the imports made need not be collected each time
    for mutation in MUTATIONS:
        MUTATIONS[mutation](Scene())
        print(mutation, *(refusals(mutation, width) for width in (1, 4)), flush=True)
    print("batch", *map(batches_that_recover, (1, 4)))
