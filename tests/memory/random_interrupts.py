"""Interrupts at random instants of manager calls: a program of its own, whose timer is no other test's.

Takes how many; prints how many of them came before the change, and how many after it.
"""

import random
import signal
import statistics
import sys
import time

from .scene import MUTATIONS, Scene

CALLS = {
    **MUTATIONS,
    "batch": lambda s: s.cache.batch([s.seq, s.other]),
    "stats": lambda s: s.cache.stats(),
    "check": lambda s: s.cache.check(),
}


def interrupt(*_) -> None:
    raise KeyboardInterrupt


def seconds(call) -> float:
    """How long a call takes."""
    scene = Scene()
    start = time.perf_counter()
    call(scene)
    return time.perf_counter() - start


def main(wanted: int) -> tuple[int, int]:
    signal.signal(signal.SIGALRM, interrupt)
    rng = random.Random(wanted)
    before, outcomes, usual = Scene().everything(), {}, {}
    for name, call in CALLS.items():
        scene = Scene()
        call(scene)
        outcomes[name] = scene.everything()
        usual[name] = statistics.median(seconds(call) for _ in range(20))
    early = late = 0
    while early + late < wanted:
        name = rng.choice(list(CALLS))
        scene = Scene()
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 2 * usual[name]))
            CALLS[name](scene)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            now = scene.everything()
            assert now in (before, outcomes[name]), f"{name} is half done"
            if name in MUTATIONS:
                early, late = early + (now == before), late + (now != before)
        guard = scene.cache.pool._guard
        assert (guard.lock.locked(), guard.holder, guard.changing) == (False, None, False), name
        (scene.cache.pool if name.startswith("pool.") else scene.cache).check()
        scene.cache.append(scene.forks[1])
    return early, late


if __name__ == "__main__":
    print(*main(int(sys.argv[1])))
