"""What threads know of each other apart from barriers: clocks, which fences, strong accesses and barriers hand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

# By number of a thread block, the times before which the accesses of its threads are known. A clock never changes.
Clock = Mapping[int, np.ndarray]
Scope = int  # 0 if a fence is for its own thread block, 1 if it is for the grid


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
    """What the threads of a thread block knew at a fence that some of them passed; clocks are made when needed.

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
    _clocks: dict[int, Clock] = field(default_factory=dict)

    def clock_of(self, thread: int) -> Clock:
        """What one of the threads knew, always as the same object."""
        if thread not in self._clocks:
            self._clocks[thread] = self.clock(np.array([thread]))
        return self._clocks[thread]

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
    """The clocks of each lane of a batch. All but `known` are pairs, by `Scope`.

    `released` and `pending` make release and acquire patterns: what one thread does in program order, so no barrier
    hands them on. The other two are for fence.sc. All of those stand in one order, so that one of them, X, synchronizes
    with another one, Y, even if the write and the read between them are other threads', behind barriers: were Y the
    first, the read would come before the write that it sees. Those go on with whatever X, or the read, comes before.

    Attributes
    ----------
    known : ndarray of Clock or None
        What the lane knows of other thread blocks.
    released : list of ndarray of Clock, Snapshot or None
        What it knew at its last fence that releases: its strong stores hand that on.
    pending : list of ndarray of Clock or None
        What its strong loads have found: known after its next fence that acquires.
    sc_released, sc_pending
        The same of the fence.scs that come before, and of the strong loads that do: for the next fence.sc.
    uneven : set of int
        Slots of the thread blocks whose threads do not all have the same clocks.
    used, learned : bool
        Whether any lane has released anything, and acquired anything.
    """

    def __init__(self, num_lanes: int, num_threads: int) -> None:
        self._num_threads = num_threads
        self.known, *rest = (np.full(num_lanes, None, object) for _ in range(9))
        self.released, self.pending, self.sc_released, self.sc_pending = (rest[i : i + 2] for i in range(0, 8, 2))
        self._shared = (self.known, *self.sc_released, *self.sc_pending)  # what barriers hand on
        self.uneven: set[int] = set()
        self.used = self.learned = False

    def released_by(self, lane: int, scope: Scope) -> tuple[Clock | None, Clock | None]:
        """What the strong stores of a lane hand on, to any fence and to a fence.sc."""
        return (
            self._clock_of_lane(self.released[scope], lane),
            self._clock_of_lane(self.sc_released[scope], lane),
        )

    def _clock_of_lane(self, clocks: np.ndarray, lane: int) -> Clock | None:
        clock: Clock | Snapshot | None = clocks[lane]
        return clock.clock_of(lane % self._num_threads) if isinstance(clock, Snapshot) else clock

    def find(self, lane: int, scope: Scope, flag: tuple[Clock | None, Clock | None]) -> None:
        """Note that a strong load of a lane has found a flag, with what it hands to any fence and to a fence.sc."""
        for mine, other in zip((self.pending[scope], self.sc_pending[scope]), flag, strict=True):
            mine[lane] = joined(mine[lane], other)

    def of(self, lanes: np.ndarray) -> list[Clock | None]:
        """What some lanes of a thread block know together, of what barriers hand on."""
        return [self._joined_clock_of(clocks, lanes) for clocks in self._shared]

    def _joined_clock_of(self, clocks: np.ndarray, lanes: np.ndarray) -> Clock | None:
        held = clocks[lanes].tolist()
        out = {id(clock): clock for clock in held} if len(set(map(id, held))) > 1 else {0: held[0]}
        for number, clock in out.items():
            if isinstance(clock, Snapshot):
                mine = lanes if len(out) == 1 else lanes[[other is clock for other in held]]
                out[number] = clock.clock(mine % self._num_threads)
        return joined_all([*out.values()])

    def give(self, lanes: np.ndarray, clocks: list[Clock | None]) -> None:
        """Give these lanes the same clocks."""
        for mine, clock in zip(self._shared, clocks, strict=True):
            mine[lanes] = clock
