"""Happens-before: which accesses of a batch come before others, whatever the schedule.

Each thread block counts its synchronisations as time. An access by thread u at time t is ordered before one by thread
v now if t is smaller than the time up to which v knows u. Barriers are recorded by warp, which is enough for most
kernels: warp w knows warp v up to `seen[cta, w, v]`, and a lane its own warp up to `warp_synced`. What single threads
learn, at a bar.warp.sync of part of a warp or from flags, is in a matrix of the thread block's threads, made when it is
first needed.

Flags follow the PTX ISA, "Memory Consistency Model". A release pattern is a fence and then a strong store by the same
thread: it hands on what the thread knew at the fence. An acquire pattern is a strong load that finds this store, or an
atomic of its chain, and then a fence by the same thread. So "barrier; fence and atomic in one thread" hands on what the
whole thread block did. "Fence in all threads; barrier; atomic in one" does not: its pattern begins before the barrier.
It does if the fences on both sides are fence.sc, as __threadfence() is: see `Clocks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..translation.mem_op import Fence, MemOp
from .clocks import Clock, Clocks, Scope, Snapshot, joined
from .frame import Frame, Mask

LANE, TIME = 4, 36  # a stamp is time << TIME | lane << LANE
# What the last strong stores to a location released, to any fence and to a fence.sc. A location is a byte offset, which
# belongs to one array only, and a size: strong accesses of different sizes are not morally strong and hand on nothing.
Flag = tuple[Clock | None, Clock | None]
Flags = dict[tuple[int, int], Flag]


@dataclass
class Arrival:
    """What threads at a bar.arrive knew: by warp, by thread if there is a matrix, and their clocks."""

    seen: np.ndarray
    threads: np.ndarray | None
    clocks: list[Clock | None] | None


class Order:
    """What every thread of a batch knows.

    Parameters
    ----------
    frame : Frame
    flags : dict, optional
        The flags of the grid; None if nothing needs an order between thread blocks.
    uses_flags : bool
        Whether the kernel has fences, or accesses that acquire or release.

    Attributes
    ----------
    now, stamp, floor : ndarray of int64
        For each lane its time, its time and number, and the time, shifted, before which all of its block is known.
    precise : bool
        Whether any thread block has a matrix.
    """

    def __init__(self, frame: Frame, flags: Flags | None, uses_flags: bool) -> None:
        self.frame = frame
        self.time = np.zeros(frame.num_ctas, np.int64)
        self.seen = np.zeros((frame.num_ctas, frame.warps_per_cta, frame.warps_per_cta), np.int64)
        self.floor = np.zeros(frame.num_lanes, np.int64)
        self.warp_synced = np.zeros(frame.num_lanes, np.int64)
        self.now, self.stamp = np.zeros(frame.num_lanes, np.int64), frame.lanes << LANE
        self._matrices: dict[int, np.ndarray] = {}
        self._flags = flags
        self._block_flags: dict[tuple[str, int, int], dict[int, Flag]] = {}  # by space and location, then by slot
        self._release_ops: dict[tuple[Scope, int, str, int, int], Clock] = {}  # by scope, lane, space and location
        self.clocks = Clocks(frame.num_lanes, frame.num_threads) if uses_flags else None

    @property
    def precise(self) -> bool:
        return bool(self._matrices)

    def rows(self, lanes: np.ndarray) -> np.ndarray:
        """What each lane knows of the threads of its block, shape (lanes, threads)."""
        f = self.frame
        slot, warp, thread = f.cta_slot[lanes], f.warp_in_cta[lanes], f.thread[lanes]
        warps = f.warp_in_cta[: f.num_threads]
        known = self.seen[slot, warp][:, warps]
        same = warps == warp[:, None]
        np.maximum(known, self.warp_synced[lanes][:, None], out=known, where=same)
        for kept, matrix in self._matrices.items():
            mine = np.flatnonzero(slot == kept)
            if len(mine):
                known[mine] = np.maximum(known[mine], matrix[thread[mine]])
        known[np.arange(len(lanes)), thread] = self.time[slot]
        return known

    def _matrix(self, slot: int) -> np.ndarray:
        if slot not in self._matrices:
            self._matrices[slot] = np.zeros((self.frame.num_threads,) * 2, np.int64)
        return self._matrices[slot]

    def _threads(self, slot: int) -> slice:
        return slice(slot * self.frame.num_threads, (slot + 1) * self.frame.num_threads)

    def _tick(self, slots: np.ndarray | slice | int) -> None:
        self.time[slots] += 1
        self.now = np.repeat(self.time, self.frame.num_threads)
        self.stamp = (self.now << TIME) | (self.frame.lanes << LANE)

    # -- barriers
    def barrier_all(self) -> None:
        """Let all threads of the batch pass a barrier."""
        self._tick(slice(None))
        self.seen[...] = self.time[:, None, None]
        self.floor = self.now << TIME
        self._matrices.clear()
        if self.clocks is not None:
            for slot in self.clocks.uneven:
                self._share_clocks(self.frame.lanes[self._threads(slot)], [])
            self.clocks.uneven.clear()

    def arrive(self, slot: int, warps: np.ndarray) -> Arrival:
        """Let warps of a thread block pass a bar.arrive, and return what their threads know."""
        self._tick(slot)
        seen = self.seen[slot, warps].max(0)
        seen[warps] = self.time[slot]
        lanes = self._threads(slot).start + np.flatnonzero(np.isin(self.frame.warp_in_cta[self._threads(slot)], warps))
        matrix = self._matrices.get(slot)
        threads = None if matrix is None else matrix[self.frame.thread[lanes]].max(0)
        return Arrival(seen, threads, None if self.clocks is None else self.clocks.of(lanes))

    def barrier(self, slot: int, warps: np.ndarray, arrivals: list[Arrival]) -> None:
        """Synchronise `warps` with each other and with earlier arrivals."""
        self._tick(slot)
        known = np.maximum.reduce([self.seen[slot, warps].max(0), *(arrival.seen for arrival in arrivals)])
        known[warps] = self.time[slot]
        self.seen[slot, warps] = known
        every = self._threads(slot)
        self.floor[every] = self.seen[slot].min(1)[self.frame.warp_in_cta[every]] << TIME
        threads = np.flatnonzero(np.isin(self.frame.warp_in_cta[every], warps))
        lanes = every.start + threads
        learned = [arrival.threads for arrival in arrivals if arrival.threads is not None]
        if len(warps) == self.frame.warps_per_cta:
            self._matrices.pop(slot, None)
        elif slot in self._matrices or learned:
            matrix = self._matrix(slot)
            matrix[threads] = np.maximum.reduce([matrix[threads].max(0), *learned])
        if self.clocks is not None and (slot in self.clocks.uneven or arrivals):
            clocks = [arrival.clocks for arrival in arrivals if arrival.clocks is not None]
            self._share_clocks(lanes, clocks)
            if len(warps) == self.frame.warps_per_cta:
                self.clocks.uneven.discard(slot)
            else:
                self.clocks.uneven.add(slot)

    def _share_clocks(self, lanes: np.ndarray, others: list[list[Clock | None]]) -> None:
        assert self.clocks is not None
        together = self.clocks.of(lanes)
        for other in others:
            together = [joined(a, b) for a, b in zip(together, other, strict=True)]
        self.clocks.give(lanes, together)

    def warp_sync(self, members: np.ndarray | None, m: Mask) -> None:
        """Let lanes pass a bar.warp.sync; `members` are the lanes that each one names, or None for its whole warp."""
        f = self.frame
        self._tick(slice(None))
        lanes = f.lanes if m is None else np.flatnonzero(m)
        named = f.exists[lanes] if members is None else members[lanes] & f.exists[lanes]
        part = named != f.exists[lanes]
        whole = lanes[~part]
        self.warp_synced[whole] = self.now[whole]
        uneven = set(self._matrices) | (set() if self.clocks is None else self.clocks.uneven)
        if not part.any() and not uneven:
            return
        single = part | np.isin(f.cta_slot[lanes], list(uneven))
        groups = f.warp[lanes[single]] << 32 | named[single]
        for group in np.unique(groups).tolist():
            among = lanes[single][groups == group]
            self._meet(among, bool(part[single][groups == group].any()))

    def _meet(self, lanes: np.ndarray, part: bool) -> None:
        """Let lanes of one warp, all of it or a part, learn what any of them knows."""
        slot, threads = int(self.frame.cta_slot[lanes[0]]), self.frame.thread[lanes]
        if part or slot in self._matrices:
            matrix = self._matrix(slot)
            matrix[threads] = self.rows(lanes).max(0)
        if self.clocks is not None and slot in self.clocks.uneven:
            self._share_clocks(lanes, [])

    # -- flags
    def fence(self, what: Fence, m: Mask) -> None:
        """Let lanes pass a fence."""
        f, clocks = self.frame, self.clocks
        assert clocks is not None
        lanes = f.lanes if m is None else np.flatnonzero(m)
        if not len(lanes):
            return
        slots = np.unique(f.cta_slot[lanes])
        self._tick(slots)
        clocks.used = True
        scopes: tuple[Scope, ...] = (0, 1) if what.grid else (0,)
        for scope in scopes:
            if what.acquire:
                self._acquire(lanes, clocks.pending[scope])
            if what.sc:
                self._acquire(lanes, clocks.sc_pending[scope])
        for slot in slots.tolist() if what.release else ():
            mine = lanes if len(slots) == 1 else lanes[f.cta_slot[lanes] == slot]
            snapshot = self._snapshot(slot)
            for scope in scopes:
                clocks.released[scope][mine] = snapshot
                if what.sc:
                    clocks.sc_released[scope][mine] = snapshot
        clocks.uneven.update(slots.tolist())

    def _snapshot(self, slot: int) -> Snapshot:
        """What all threads of a block know now."""
        assert self.clocks is not None
        f, every, time = self.frame, self._threads(slot), int(self.time[slot])
        seen, synced, matrix = self.seen[slot].copy(), self.warp_synced[every].copy(), self._matrices.get(slot)
        matrix = None if matrix is None else matrix.copy()
        warps = f.warp_in_cta[: f.num_threads]

        def rows(threads: np.ndarray) -> np.ndarray:
            """What each of these threads knew of every thread of the block, (threads, all threads)."""
            known = seen[warps[threads]][:, warps]
            np.maximum(known, synced[threads][:, None], out=known, where=warps == warps[threads][:, None])
            if matrix is not None:
                np.maximum(known, matrix[threads], out=known)
            known[np.arange(len(threads)), threads] = time
            return known

        return Snapshot(int(f.cta[every.start]), time, rows, self.clocks.known[every].copy())

    def _acquire(self, lanes: np.ndarray, pending: np.ndarray) -> None:
        """Let lanes know from now on what is pending for them."""
        assert self.clocks is not None
        found, known = pending[lanes].tolist(), self.clocks.known[lanes].tolist()
        groups: dict[tuple[int, int, int], list[int]] = {}
        for i, slot in enumerate(self.frame.cta_slot[lanes].tolist()):
            if found[i] is not None:
                groups.setdefault((slot, id(found[i]), id(known[i])), []).append(i)
        for (slot, _, _), group in groups.items():
            mine, clock = lanes[group], found[group[0]]
            row = clock.get(int(self.frame.cta[mine[0]]))
            if row is not None and (row > self.rows(mine)).any():
                matrix, threads = self._matrix(slot), self.frame.thread[mine]
                matrix[threads] = np.maximum(matrix[threads], row)
            self.clocks.learned = True
            self.clocks.known[mine] = joined(known[group[0]], clock)
            pending[mine] = None

    def strong(self, op: MemOp, space: str, off: np.ndarray, idx: np.ndarray | None, wrote: np.ndarray | None) -> None:
        """Hand on clocks at a strong access of lanes, one by one; `wrote` says which of them have stored, None all."""
        clocks, f = self.clocks, self.frame
        if clocks is None or not (clocks.used or self._flags or op.release):
            return
        lanes = f.lanes if idx is None else idx
        scopes: tuple[Scope, ...] = (0, 1) if op.grid and space == "global" and self._flags is not None else (0,)
        now: dict[int, Snapshot] = {}
        if op.release:
            clocks.used = True
            self._tick(np.unique(f.cta_slot[lanes]))
            now = {slot: self._snapshot(slot) for slot in np.unique(f.cta_slot[lanes]).tolist()}
        found = [np.full(f.num_lanes, None, object) for _ in range(2)] if op.acquire else []
        for i, (lane, first) in enumerate(zip(lanes.tolist(), off.tolist(), strict=True)):
            stored = op.kind != "load" and (wrote is None or bool(wrote[i]))
            mine = now[lane // f.num_threads].clock_of(lane % f.num_threads) if op.release else None
            for offset in range(first, first + op.size, op.element):
                for scope in scopes:
                    clock = self._hand_on(lane, scope, op, (space, offset, op.element), stored, mine)
                    if op.acquire:
                        found[scope][lane] = joined(found[scope][lane], clock)
        for pending in found:
            self._acquire(lanes, pending)

    def _hand_on(
        self, lane: int, scope: Scope, op: MemOp, location: tuple[str, int, int], stored: bool, mine: Clock | None
    ) -> Clock | None:
        """Hand on clocks from and to the flag at a location; return what it hands to any fence, if `op` observes it."""
        clocks, slot = self.clocks, lane // self.frame.num_threads
        assert clocks is not None
        flags: dict[Any, Flag] | None
        key: Any
        if scope == 0:
            flags, key = self._block_flags.setdefault(location, {}), slot
        else:
            flags, key = self._flags, location[1:]
        assert flags is not None
        flag, clock = flags.get(key), None
        if op.observes and flag is not None:
            clocks.uneven.add(slot)
            clocks.find(lane, scope, flag)
            clock = flag[0]
        if stored:
            if op.kind == "store":  # begins a new chain; an atomic goes on with the one that it finds
                flag = None
                if scope == 0:
                    flags.clear()
            flag = self._released(lane, scope, location, flag, mine)
            if flag != (None, None):
                flags[key] = flag
            else:
                flags.pop(key, None)
        return clock

    def _released(
        self, lane: int, scope: Scope, location: tuple[str, int, int], flag: Flag | None, mine: Clock | None
    ) -> Flag:
        """What a flag hands on after a strong store of a lane; `mine` is what the lane knows, if it is a release."""
        assert self.clocks is not None
        if mine is not None:
            self._release_ops[scope, lane, *location] = mine
        first, sc = self.clocks.released_by(lane, scope)
        first = joined(first, self._release_ops.get((scope, lane, *location)))  # its later stores hand that on as well
        return (first, sc) if flag is None else (joined(flag[0], first), joined(flag[1], sc))
