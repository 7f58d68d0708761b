"""Each mutation, with every allocation of CPython's and NumPy's small objects failing in turn, alone or with the next.

A program of its own, since NumPy does not survive everything that it can be made to meet here.
"""

import _testcapi
import gc
import itertools

from .scene import MUTATIONS, OF_WINDOWS, WINDOWS, Scene, states_of


def refusals(name, windows, width):
    """How many failures of a mutation changed nothing, or no more than its first steps."""
    scene = Scene(windows)  # for all of them, since a failure changes nothing
    states = states_of(MUTATIONS[name], windows)[:-1]
    # Groups that fail together stand side by side and do not overlap.
    for number in itertools.count(1, width):
        gc.collect()  # also empties the lists of free objects, from which CPython would allocate without failing
        done = False
        _testcapi.set_nomemory(number, number + width)
        try:
            MUTATIONS[name](scene)
            done = True
        except (MemoryError, SystemError):  # NumPy loses the MemoryError in places
            pass
        finally:
            _testcapi.remove_mem_hooks()
        assert not scene.cache.pool._guard.lock.locked(), f"{name}, allocation {number}, {width=}"
        assert done or scene.everything() in states, f"{name}, allocation {number}, {width=}"
        scene.cache.pool.check()  # the guard lets calls in
        if done:
            return number


if __name__ == "__main__":
    gc.freeze()  # what the imports made need not be collected each time
    for windows, mutations in ((None, MUTATIONS), (WINDOWS, OF_WINDOWS)):
        for mutation in mutations:
            MUTATIONS[mutation](Scene(windows))
            print(mutation, *(refusals(mutation, windows, width) for width in (1, 4)), flush=True)
