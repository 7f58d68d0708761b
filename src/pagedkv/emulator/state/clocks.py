"""What threads know of each other beyond a barrier: clocks that fences, strong accesses and barriers hand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

# By number of a thread block, for each of its threads the time before which its accesses are known. Never changed.
Clock = Mapping[int, np.ndarray]


def joined(a: Clock | None, b: Clock | None) -> Clock | None:
    """What either of two clocks knows."""
    if a is None or a is b:
        return b
    if b is None:
        return a
    if len(a) < len(b):
        a, b = b, a
    out = dict(a)
    for cta, row in b.items():
        mine = out.get(cta)
        out[cta] = row if mine is None or mine is row else np.maximum(mine, row)
    return out


@dataclass
class Snapshot:
    """What the threads of a thread block knew at a fence that some of them passed; a clock is made when one is needed.

    Attributes
    ----------
    cta, time : int
        Number and time of the thread block.
    rows : callable
        What the threads with these numbers knew of their own block, shape (threads, all threads).
    known : ndarray of Clock or None
        What each thread knew of other blocks.
    """

    cta: int
    time: int
    rows: Callable[[np.ndarray], np.ndarray]
    known: np.ndarray

    def clock(self, threads: np.ndarray) -> Clock:
        """All that some threads, which passed the fence, knew together."""
        every = len(threads) == len(self.known)
        row = np.full(len(self.known), self.time) if every else self.rows(threads).max(0)
        return {**(joined_all(self.known[threads].tolist()) or {}), self.cta: row}


def joined_all(clocks: list[Clock | None]) -> Clock | None:
    """What any of the clocks knows."""
    if len(set(map(id, clocks))) == 1:
        return clocks[0]
    out: Clock | None = None
    for clock in {id(clock): clock for clock in clocks}.values():
        out = joined(out, clock)
    return out


class Clocks:
    """The clocks of each lane of a batch; each list has one for fences of a thread block and one for those of the grid.

    Attributes
    ----------
    known : ndarray of Clock or None
        What the lane knows of other thread blocks.
    released : list of ndarray of Clock, Snapshot or None
        What it knew at its last fence: its strong stores hand that on.
    pending : list of ndarray of Clock or None
        What its strong loads have found: known after its next fence.
    uneven : set of int
        Slots of the thread blocks whose threads do not all have the same clocks.
    used, learned : bool
        Whether any lane has released anything, and acquired anything.
    """

    def __init__(self, num_lanes: int, num_threads: int) -> None:
        self._num_threads = num_threads
        self.known, *rest = (np.full(num_lanes, None, object) for _ in range(5))
        self.released, self.pending = rest[:2], rest[2:]
        self.uneven: set[int] = set()
        self.used = self.learned = False

    def released_by(self, lane: int, scope: int) -> Clock | None:
        """What one lane hands on."""
        clock = self.released[scope][lane]
        return clock.clock(np.array([lane % self._num_threads])) if isinstance(clock, Snapshot) else clock

    def of(self, lanes: np.ndarray) -> list[Clock | None]:
        """What some lanes of a thread block have together."""
        return [self._of(clocks, lanes) for clocks in (self.known, *self.released, *self.pending)]

    def _of(self, clocks: np.ndarray, lanes: np.ndarray) -> Clock | None:
        held = clocks[lanes].tolist()
        out = {id(clock): clock for clock in held} if len(set(map(id, held))) > 1 else {0: held[0]}
        for number, clock in out.items():
            if isinstance(clock, Snapshot):
                mine = lanes if len(out) == 1 else lanes[[other is clock for other in held]]
                out[number] = clock.clock(mine % self._num_threads)
        return joined_all([*out.values()])

    def give(self, lanes: np.ndarray, clocks: list[Clock | None]) -> None:
        """Give these lanes the same clocks."""
        for mine, clock in zip((self.known, *self.released, *self.pending), clocks, strict=True):
            mine[lanes] = clock
