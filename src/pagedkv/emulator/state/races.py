"""Race detectors: shared memory inside a thread block, global memory between thread blocks.

Shared memory has a record for each granule, the size of the kernel's smallest access, so that half-words written by
different lanes do not clash. Each thread block counts its synchronisations as time, and `seen[cta, w, v]` is the time
up to which warp w has synchronised with warp v. An access by warp v at time t is ordered before one by warp w now if
t < seen[cta, w, v] or, within a warp, if a bar.warp.sync came in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from ..errors import RaceFault
from ..translation.mem_op import MemOp
from .frame import Frame, Mask
from .memory import sparse_zeros

# A record is time << _TIME | op << _OP | thread << 1 | strong; records of reads ignore the lowest bit.
_OP, _TIME = 21, 33
_MANY = (1 << (_OP - 1)) - 1  # instead of a thread: several readers
_MOST_OPS = (1 << (_TIME - _OP)) - 1


def _thread(record: np.ndarray) -> np.ndarray:
    return record >> 1 & _MANY


class SharedRaces:
    """Detects conflicting accesses to shared memory by threads that nothing orders."""

    def __init__(self, frame: Frame, granule: int) -> None:
        self.frame, self.shift = frame, granule.bit_length() - 1
        count = len(frame.shared) >> self.shift
        self.writes = np.full(count, -1, np.int64)
        self.reads = np.full(count, -1, np.int64)
        self.readers = np.zeros(count, np.uint32)  # bit mask of the warps that read since the last write
        self.time = np.zeros(frame.num_ctas, np.int64)
        self.stamp = frame.lanes << 1  # each lane's time and thread, as in a record
        self.seen = np.zeros((frame.num_ctas, frame.warps_per_cta, frame.warps_per_cta), np.int64)
        self.floor = np.zeros(frame.num_lanes, np.int64)  # minimum of seen over v: smaller records are ordered
        self.warp_synced = np.zeros(frame.num_lanes, np.int64)
        self.warp_bit = np.left_shift(np.uint32(1), frame.warp_in_cta.astype(np.uint32))
        self._ops: list[MemOp] = []
        self._numbers: dict[MemOp, int] = {}

    # -- synchronisation
    def barrier_all(self) -> None:
        """All threads of the batch passed a barrier."""
        self.time += 1
        self.seen[...] = self.time[:, None, None]
        self.floor = np.repeat(self.time << _TIME, self.frame.num_threads)
        self.stamp = self.floor | (self.frame.lanes << 1)

    def arrive(self, cta: int) -> int:
        """The time of a bar.arrive in a thread block."""
        self.time[cta] += 1
        self._refresh(cta)
        return int(self.time[cta])

    def barrier(self, cta: int, warps: np.ndarray, arrived: Mapping[int, tuple[int, np.ndarray]]) -> None:
        """`warps` synchronise with each other and with earlier arrivals {warp: (time, what it had seen)}."""
        self.time[cta] += 1
        known = self.seen[cta, warps].max(0)
        for warp, (when, seen) in arrived.items():
            known = np.maximum(known, seen)
            known[warp] = max(known[warp], when)
        known[warps] = self.time[cta]
        self.seen[cta, warps] = known
        self._refresh(cta)

    def warp_sync(self, m: Mask) -> None:
        """The lanes passed a bar.warp.sync."""
        self.time += 1
        now = np.repeat(self.time, self.frame.num_threads)
        self.stamp = (now << _TIME) | (self.frame.lanes << 1)
        lanes = slice(None) if m is None else m
        self.warp_synced[lanes] = now[lanes]

    def _refresh(self, cta: int) -> None:
        f = self.frame
        lanes = slice(cta * f.num_threads, (cta + 1) * f.num_threads)
        self.stamp[lanes] = (self.time[cta] << _TIME) | (f.lanes[lanes] << 1)
        self.floor[lanes] = self.seen[cta].min(1)[f.warp_in_cta[lanes]] << _TIME

    # -- accesses
    def _unordered(self, lane: np.ndarray, record: np.ndarray, readers: np.ndarray | None = None) -> np.ndarray:
        """Which of the recorded accesses race with one by `lane` now; `readers` are warps, for records of several."""
        f, when, who = self.frame, record >> _TIME, _thread(record)
        cta, w = lane // f.num_threads, f.warp_in_cta[lane]
        many = who == _MANY
        v = f.warp_in_cta[np.where(many, lane, who)]
        own = np.maximum(self.seen[cta, w, w], self.warp_synced[lane])
        bad = when >= np.where(v == w, own, self.seen[cta, w, v])
        if readers is not None and many.any():
            for x in range(f.warps_per_cta):
                has = many & ((readers >> np.uint32(x)) & np.uint32(1)).astype(np.bool_)
                bad |= has & (when >= np.where(w == x, own, self.seen[cta, w, x]))
        return bad

    def access(self, op: MemOp, off: np.ndarray, size: int, idx: np.ndarray | None, store: bool, what: str) -> None:
        """Check an access against earlier ones to the same bytes, and record it."""
        thread, floor, stamp = self.frame.lanes, self.floor, self.stamp
        if idx is not None:
            thread, floor, stamp = idx, floor[idx], stamp[idx]
        strong = int(op.strong)
        mine = stamp | (self._number(op) | strong)
        first = off >> self.shift
        for q in range(max(1, size >> self.shift)):
            g = first + q if q else first
            record = self.writes[g]
            bad = record >= floor
            if bad.any():
                bad &= _thread(record) != thread
            if strong:
                bad &= (record & 1) == 0
            if bad.any():
                c = np.flatnonzero(bad)
                c = c[self._unordered(thread[c], record[c])]
                if len(c):
                    self._report(op, int(thread[c[0]]), int(off[c[0]]), what, "written", int(record[c[0]]))
            if store:
                if not strong:  # reads do not record strength: checking would blame strong ones
                    self._check_readers(op, g, off, thread, floor, what)
                self.writes[g] = mine
                self.reads[g] = -1
                self.readers[g] = 0
            else:
                self._note_read(g, thread, floor, mine, idx)

    def _number(self, op: MemOp) -> int:
        """The bits that stand for an op in a record."""
        number = self._numbers.get(op)
        if number is None:
            number = self._numbers[op] = min(len(self._ops), _MOST_OPS) << _OP
            self._ops.append(op)
        return number

    def _check_readers(
        self, op: MemOp, g: np.ndarray, off: np.ndarray, thread: np.ndarray, floor: np.ndarray, what: str
    ) -> None:
        record = self.reads[g]
        bad = record >= floor
        if bad.any():
            bad &= _thread(record) != thread
        if not bad.any():
            return
        c = np.flatnonzero(bad)
        c = c[self._unordered(thread[c], record[c], self.readers[g[c]])]
        if len(c):
            self._report(op, int(thread[c[0]]), int(off[c[0]]), what, "read", int(record[c[0]]))

    def _note_read(
        self, g: np.ndarray, thread: np.ndarray, floor: np.ndarray, mine: np.ndarray, idx: np.ndarray | None
    ) -> None:
        bit = self.warp_bit if idx is None else self.warp_bit[idx]
        old = self.reads[g]
        if ((old == mine) | (old == (mine | _MANY << 1))).all() and (self.readers[g] & bit).all():
            return  # a loop that reads the same again
        live = old >= floor
        if live.any():
            new = np.where(live & (_thread(old) != thread), mine | (_MANY << 1), mine)
            readers = np.where(live, self.readers[g], np.uint32(0)) | bit
        else:
            new, readers = mine, bit
        self.reads[g], self.readers[g] = new, readers
        lost = self.reads[g] != new  # several lanes of this load read one granule
        if lost.any():
            self.reads[g[lost]] |= _MANY << 1
            missing = (self.readers[g] & bit) == 0
            if missing.any():
                np.bitwise_or.at(self.readers, g[missing], bit[missing])

    def record_write(self, op: MemOp, off: np.ndarray, size: int, lanes: np.ndarray) -> None:
        """Record a completed cp.async as a write, now, by the thread that issued it."""
        for q in range(max(1, size >> self.shift)):
            g = (off >> self.shift) + q
            self.writes[g] = self.stamp[lanes] | self._number(op)
            self.reads[g] = -1
            self.readers[g] = 0

    def _report(self, op: MemOp, lane: int, off: int, what: str, did: str, record: int) -> NoReturn:
        f, who = self.frame, record >> 1 & _MANY
        other = "several threads" if who == _MANY else f"thread {f.thread_coordinates(who)}"
        ins = self._ops[record >> _OP & _MOST_OPS].ins
        where = next(map(str, f.program.source(ins.line)), f"PTX line {ins.line}: {ins.text}")
        words = f"shared-memory race: {what} of a location {did} by {other} with no barrier in between ({where})"
        f.fail(RaceFault, words, op.ins, lane, *f.describe("shared", off, lane))


class GlobalRaces:
    """Detects conflicting accesses to global memory by different thread blocks of a launch.

    Fences and atomics order thread blocks: a fence of gpu scope publishes a thread block's writes; atomics, and
    accesses with acquire or release, pass them on to later ones at the same location.
    """

    def __init__(self, nbytes: int, granule: int, num_ctas: int) -> None:
        self.shift = granule.bit_length() - 1
        count = (nbytes >> self.shift) + 1
        self.writes = sparse_zeros(count, np.int64)  # epoch << 32 | (cta + 1) << 1 | strong
        self.reads = sparse_zeros(count, np.int64)  # epoch << 32 | (cta + 1) << 1 | several
        self.epoch = np.zeros(num_ctas, np.int64)  # advanced by fences
        self.knows: dict[int, dict[int, int]] = {}  # cta -> {cta: epoch it has acquired}
        self.location: dict[int, dict[int, int]] = {}

    def fence(self, ctas: np.ndarray) -> None:
        """These thread blocks passed a fence of gpu scope."""
        self.epoch[np.unique(ctas)] += 1

    def _synchronise(self, off: np.ndarray, ctas: np.ndarray) -> None:
        """Acquire, and release the fenced epochs; lanes of one instruction may come in any order."""
        pairs = set(zip(off.tolist(), ctas.tolist(), strict=True))
        for o, c in pairs:
            location, mine = self.location.setdefault(o, {}), self.knows.setdefault(c, {})
            if self.epoch[c]:
                location[c] = max(location.get(c, 0), int(self.epoch[c]))
            for k, e in mine.items():
                location[k] = max(location.get(k, 0), e)
        for o, c in pairs:
            mine = self.knows[c]
            for k, e in self.location[o].items():
                mine[k] = max(mine.get(k, 0), e)

    def _ordered(self, cta: int, record: int) -> bool:
        return self.knows.get(cta, {}).get((record >> 1 & 0x7FFFFFFF) - 1, -1) > (record >> 32)

    def access(
        self, frame: Frame, op: MemOp, off: np.ndarray, size: int, idx: np.ndarray | None, store: bool, what: str
    ) -> None:
        """Check an access against earlier ones to the same bytes, and record it."""
        cta = frame.cta if idx is None else frame.cta[idx]
        strong = int(op.strong)
        if strong:
            if op.release:
                self.fence(cta)
            self._synchronise(off, cta)
        me = (cta + 1) << 1
        for q in range(max(1, size >> self.shift)):
            g = (off >> self.shift) + q
            record = self.writes[g]
            bad = (record != 0) & ((record & 0xFFFFFFFE) != me)
            if strong:
                bad &= (record & 1) == 0
            self._check(frame, op, off, idx, cta, record, bad, what, "written")
            if "nc" in op.ins.parts and record.any():
                j = int(record.argmax())
                self._fail(frame, op, off, idx, j, int(record[j]), "read-only (.nc) load", "written")
            mine = (self.epoch[cta] << 32) | me
            if store:
                record = self.reads[g]
                bad = (record != 0) & (((record & 0xFFFFFFFE) != me) | ((record & 1) != 0))
                if not strong:
                    self._check(frame, op, off, idx, cta, record, bad, what, "read")
                self.writes[g] = mine | strong
                lost = self.writes[g] & ~1 != mine
                if lost.any() and not strong:
                    j = int(lost.argmax())
                    self._fail(frame, op, off, idx, j, int(self.writes[g][j]), what, "written")
                self.reads[g] = 0
            elif not strong:
                old = self.reads[g]
                several = (old != 0) & ((old & 0xFFFFFFFE) != me)
                self.reads[g] = np.where(several, mine | 1, mine | (old & 1))
                lost = (self.reads[g] & 0xFFFFFFFE) != me
                if lost.any():
                    self.reads[g[lost]] |= 1

    def _check(
        self,
        frame: Frame,
        op: MemOp,
        off: np.ndarray,
        idx: np.ndarray | None,
        cta: np.ndarray,
        record: np.ndarray,
        bad: np.ndarray,
        what: str,
        did: str,
    ) -> None:
        for j in np.flatnonzero(bad):
            if not self._ordered(int(cta[j]), int(record[j])):
                self._fail(frame, op, off, idx, int(j), int(record[j]), what, did)

    @staticmethod
    def _fail(
        frame: Frame, op: MemOp, off: np.ndarray, idx: np.ndarray | None, j: int, record: int, what: str, did: str
    ) -> NoReturn:
        other = frame.cta_coordinates((record >> 1 & 0x7FFFFFFF) - 1)
        lane = j if idx is None else int(idx[j])
        words = f"global-memory race: {what} of a location {did} by thread block {other} in the same launch"
        frame.fail(RaceFault, words, op.ins, lane, *frame.describe("global", int(off[j]), lane))
