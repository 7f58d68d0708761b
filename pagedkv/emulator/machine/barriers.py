"""Barriers of thread blocks: bar.sync, bar.arrive and bar.red, with names and counts, and faults for their misuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from ..ptx.instruction import Instruction
from ..ptx.program import Block
from ..state.faults import SyncFault
from ..state.frame import WARP_SIZE, Frame
from ..state.order import Arrival, Order


@dataclass(eq=False)
class Reduction:
    """A bar.red, which gives every thread the count, conjunction or disjunction of all predicates."""

    what: str
    dest: np.ndarray
    pred: np.ndarray
    negated: bool

    def apply(self, lanes: slice, votes: np.ndarray, part: np.ndarray) -> None:
        """Reduce each row of `part` (thread blocks, threads), which covers the slice `lanes` of the batch."""
        result = (votes | ~part).all(1) if self.what == "and" else (votes & part).sum(1)
        dest = self.dest[lanes]
        full = np.broadcast_to(result[:, None], part.shape).astype(dest.dtype)  # bar.red.or casts the count to bool
        np.putmask(dest, part.reshape(-1), full.reshape(-1))


@dataclass(eq=False)
class Barrier:
    """A barrier instruction; its number and count may be registers."""

    number: int | np.ndarray
    count: int | np.ndarray
    arrive: bool
    reduction: Reduction | None
    simple: bool  # constant, not an arrive, and for the whole thread block


@dataclass
class _Arrivals:
    """The bar.arrives at one barrier so far, and what their threads knew of others."""

    threads: int = 0
    count: int = 0
    lanes: list[np.ndarray] = field(default_factory=list)
    knew: list[Arrival] = field(default_factory=list)


class Barriers:
    """The threads of a batch that wait at barriers; in the scheduler's `pc` they stand one block further already."""

    def __init__(self, frame: Frame, order: Order | None, pc: np.ndarray, blocks: list[Block]) -> None:
        self.frame, self.order, self.pc, self.blocks = frame, order, pc, blocks
        self.exit = len(blocks)
        lanes = frame.num_lanes
        self.waiting = np.zeros(lanes, np.bool_)
        self._number = np.zeros(lanes, np.int32)
        self._count = np.zeros(lanes, np.int32)
        self._vote = np.zeros(lanes, np.bool_)
        self._reduction: dict[int, Reduction] = {}  # by block
        self._arrivals: dict[tuple[int, int], _Arrivals] = {}  # by slot of the thread block and barrier
        self.completed = 0

    def whole(self, barrier: Barrier) -> None:
        """The whole batch passes one simple barrier."""
        f = self.frame
        self.completed += f.num_ctas
        if self.order is not None:
            self.order.barrier_all()
        if red := barrier.reduction:
            shape = (f.num_ctas, f.num_threads)
            red.apply(slice(None), (red.pred ^ red.negated).reshape(shape), np.ones(shape, np.bool_))

    def reach(self, barrier: Barrier, block: int, part: np.ndarray, fair: bool) -> None:
        """The lanes of `part` reach the barrier that ends a block; with `fair`, open every barrier that can be."""
        f = self.frame
        number, count = barrier.number, barrier.count
        self._number[part] = number if isinstance(number, int) else number[part]
        self._count[part] = count if isinstance(count, int) else count[part]
        if red := barrier.reduction:
            self._vote[part] = (red.pred ^ red.negated)[part]
            self._reduction[block] = red
        if barrier.arrive:
            self._arrive(part)
        else:
            self.waiting |= part
        if not (isinstance(count, int) and count == 0) and part.any():  # a counted barrier opens at once
            for cta, b in set(zip(f.cta_slot[part].tolist(), self._number[part].tolist(), strict=True)):
                self._try_open(cta, b)
        elif fair:  # or a thread block would wait for one that spins until this one is done
            blocked = (self.waiting | (self.pc == self.exit)).reshape(f.num_ctas, -1).all(1)
            for cta in np.flatnonzero(blocked & part.reshape(f.num_ctas, -1).any(1)).tolist():
                self._open_cta(cta)

    def release(self) -> None:
        """Open every complete barrier when nothing else can run, or report the deadlock."""
        opened = [self._open_cta(cta) for cta in np.unique(self.frame.cta_slot[self.waiting]).tolist()]
        if not any(opened):
            self._deadlock()

    def _arrive(self, part: np.ndarray) -> None:
        f = self.frame
        for cta in np.unique(f.cta_slot[part]).tolist():
            lanes = np.flatnonzero(part & (f.cta_slot == cta))
            for b in np.unique(self._number[lanes]).tolist():
                chosen = lanes[self._number[lanes] == b]
                state = self._arrivals.setdefault((cta, b), _Arrivals())
                state.threads += len(chosen)
                state.lanes.append(chosen)
                state.count = max(state.count, int(self._count[chosen].max()))
                if self.order is not None:
                    state.knew.append(self.order.arrive(cta, np.unique(f.warp_in_cta[chosen])))

    def _lanes(self, cta: int) -> slice:
        return slice(cta * self.frame.num_threads, (cta + 1) * self.frame.num_threads)

    def _open_cta(self, cta: int) -> bool:
        lanes = self._lanes(cta)
        numbers = np.unique(self._number[lanes][self.waiting[lanes]]).tolist()
        return sum(self._try_open(cta, b) for b in numbers) > 0

    def _try_open(self, cta: int, b: int) -> bool:
        """Open barrier b of a thread block if every thread it expects has arrived."""
        f, s = self.frame, self._lanes(cta)
        lanes = np.flatnonzero(self.waiting[s] & (self._number[s] == b)) + s.start
        state = self._arrivals.get((cta, b)) or _Arrivals()
        want = max(int(self._count[lanes].max()) if len(lanes) else 0, state.count)
        have = len(lanes) + state.threads
        if want == 0:
            if len(lanes) + int((self.pc[s] == self.exit).sum()) != f.num_threads:
                return False
        elif have != want:
            if have > want:
                lane = int(lanes[0]) if len(lanes) else s.start
                what = f"barrier {b} expects {want} threads, {have} arrived"
                f.fail(SyncFault, what, self._instruction(lane), lane)
            return False
        if len(lanes):
            self._open(cta, lanes, want, state)
        self._arrivals.pop((cta, b), None)
        return True

    def _instruction(self, lane: int) -> Instruction:
        """The barrier instruction that a lane waits at."""
        return self.blocks[max(int(self.pc[lane]) - 1, 0)].instructions[-1]

    def _open(self, cta: int, lanes: np.ndarray, want: int, state: _Arrivals) -> None:
        f, s = self.frame, self._lanes(cta)
        pcs = self.pc[lanes]
        if want == 0 and (pcs != pcs[0]).any():
            other = int(lanes[np.flatnonzero(pcs != pcs[0])[0]])
            line = self._instruction(int(lanes[0])).line
            what = f"threads of a thread block wait at different barriers (also PTX line {line})"
            f.fail(SyncFault, what, self._instruction(other), other)
        part = np.zeros(f.num_lanes, np.bool_)
        part[lanes] = True
        warps = np.unique(f.warp_in_cta[lanes])
        gone = self.pc == self.exit
        if (gone & (f.cta_slot == cta) & np.isin(f.warp_in_cta, warps)).any():
            lane = int(lanes[0])
            what = "barrier reached by part of a warp whose other threads have exited"
            f.fail(SyncFault, what, self._instruction(lane), lane)
        met = np.unique(np.concatenate([lanes, *state.lanes]))
        each, counts = np.unique(f.warp_in_cta[met], return_counts=True)
        # The order of accesses is known by warp.
        if (counts < np.minimum(WARP_SIZE, f.num_threads - WARP_SIZE * each)).any():
            lane = int(lanes[0])
            what = "barrier completed by part of a warp: all of its threads have to reach it"
            f.fail(SyncFault, what, self._instruction(lane), lane)
        if red := self._reduction.get(int(pcs[0]) - 1):
            red.apply(s, self._vote[s][None], part[s][None])
        self.completed += 1
        if self.order is not None:
            self.order.barrier(cta, warps, state.knew)
        self.waiting[lanes] = False

    def _deadlock(self) -> NoReturn:
        stuck = np.flatnonzero(self.pc != self.exit).tolist()
        at = [
            self._instruction(lane) if self.waiting[lane] else self.blocks[self.pc[lane]].instructions[0]
            for lane in stuck
        ]
        what = "barrier never completes" if self.waiting[stuck[0]] else "members of a warp operation never arrive"
        lines = sorted({ins.line for ins in at})
        words = f"deadlock: {what}; threads are stuck at PTX lines {', '.join(map(str, lines[:8]))}"
        self.frame.fail(SyncFault, words, at[0], stuck[0])
