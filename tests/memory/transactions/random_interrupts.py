"""Interrupts at random instants of manager calls, while another thread reads: a program of its own, with its own timer.

Takes how many; prints how many of them came before the change, and how many after it.
"""

import random
import statistics
import sys
import threading
import time

from ...support.alarm import Alarm
from .scene import MUTATIONS, Scene

CALLS = {
    **MUTATIONS,
    "batch": lambda s: s.cache.batch([s.seq, s.other]),
    "stats": lambda s: s.cache.stats(),
    "check": lambda s: s.cache.check(),
}


def seconds(call) -> float:
    """How long a call takes."""
    scene = Scene()
    start = time.perf_counter()
    call(scene)
    return time.perf_counter() - start


def main(wanted: int) -> tuple[int, int]:
    alarm = Alarm()
    rng = random.Random(wanted)
    before, outcomes, usual = Scene().everything(), {}, {}
    for name, call in CALLS.items():
        scene = Scene()
        call(scene)
        outcomes[name] = scene.everything()
        usual[name] = statistics.median(seconds(call) for _ in range(20))
    early = late = 0
    scene, done, wrong = Scene(), False, []

    def read() -> None:
        while not done:
            cache = scene.cache
            try:
                cache.pool.check()
                stats = cache.stats()
                assert stats.used + stats.free == stats.num_blocks
            except BaseException as error:
                wrong.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while early + late < wanted:
        name = rng.choice(list(CALLS))
        scene = Scene()
        try:
            alarm.arm(rng.uniform(1e-6, 2 * usual[name]))
            CALLS[name](scene)
            alarm.disarm()
        except KeyboardInterrupt:
            now = scene.everything()
            assert now in (before, outcomes[name]), f"{name} is half done"
            if name in MUTATIONS:
                early, late = early + (now == before), late + (now != before)
        assert scene.cache.pool._guard.holder != threading.get_ident(), name
        (scene.cache.pool if name.startswith("pool.") else scene.cache).check()
        scene.cache.append(scene.forks[1])
    done = True
    reader.join()
    assert not wrong, wrong[0]
    return early, late


if __name__ == "__main__":
    print(*main(int(sys.argv[1])))
