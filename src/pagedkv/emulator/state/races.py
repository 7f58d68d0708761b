"""Race detectors: shared memory inside a thread block, global memory between thread blocks.

Both have a record of the last write and of the last reads for each granule, the size of the kernel's smallest access,
so that half-words written by different lanes do not clash. Two accesses race if one of them is a store, not both are
strong, and `Order` does not know that one comes before the other.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from ..errors import RaceFault
from ..translation.mem_op import MemOp
from .frame import Frame
from .memory import sparse_zeros
from .order import TIME, Flags, Order

# A record in shared memory is time << TIME | op << _OP | thread << 1 | strong.
_OP = 21
_MANY = (1 << (_OP - 1)) - 1  # instead of a thread: several readers
_MOST_OPS = (1 << (TIME - _OP)) - 1


def _thread(record: np.ndarray) -> np.ndarray:
    return record >> 1 & _MANY


class SharedRaces:
    """Detects conflicting accesses to shared memory by threads that nothing orders.

    Parameters
    ----------
    frame : Frame
    granule : int
        Bytes of a record.
    order : Order
    by_lane : bool
        Keep which lanes have read, for kernels that order single threads and not only whole warps.
    """

    def __init__(self, frame: Frame, granule: int, order: Order, by_lane: bool) -> None:
        self.frame, self.order, self.shift = frame, order, granule.bit_length() - 1
        count = len(frame.shared) >> self.shift
        self.writes = np.full(count, -1, np.int64)
        self.reads = np.full(count, -1, np.int64)
        self.readers = np.zeros(count, np.uint32)  # bit mask of the warps that read since the last write
        self.lanes_read = np.zeros(count, np.uint32) if by_lane else None  # and of the lanes in them
        self.warp_bit = np.left_shift(np.uint32(1), frame.warp_in_cta.astype(np.uint32))
        self.lane_bit = np.left_shift(np.uint32(1), frame.lane.astype(np.uint32))
        self._strong_reads = False
        self._ops: list[MemOp] = []
        self._numbers: dict[MemOp, int] = {}

    # -- accesses
    def _unordered(self, lane: np.ndarray, record: np.ndarray, g: np.ndarray | None = None) -> np.ndarray:
        """Which of the recorded accesses race with one by `lane` now; `g` are granules, for records of reads."""
        f, order, when, who = self.frame, self.order, record >> TIME, _thread(record)
        cta, w = lane // f.num_threads, f.warp_in_cta[lane]
        many = who == _MANY
        v = f.warp_in_cta[np.where(many, lane, who)]
        own = np.maximum(order.seen[cta, w, w], order.warp_synced[lane])
        bad = when >= np.where(v == w, own, order.seen[cta, w, v])
        if g is not None and many.any():
            for x in range(f.warps_per_cta):
                has = many & ((self.readers[g] >> np.uint32(x)) & np.uint32(1)).astype(np.bool_)
                bad |= has & (when >= np.where(w == x, own, order.seen[cta, w, x]))
        if order.precise and bad.any():
            c = np.flatnonzero(bad)
            bad[c] = self._unordered_threads(lane[c], when[c], who[c], None if g is None else g[c])
        return bad

    def _unordered_threads(
        self, lane: np.ndarray, when: np.ndarray, who: np.ndarray, g: np.ndarray | None
    ) -> np.ndarray:
        """As `_unordered`, by what threads know of single threads."""
        f, k = self.frame, np.arange(len(lane))
        late = when[:, None] >= self.order.rows(lane)
        late[k, lane % f.num_threads] = False
        bad = late[k, np.where(who == _MANY, 0, who) % f.num_threads]
        if g is not None and (who == _MANY).any():
            warps, lanes = f.warp_in_cta[: f.num_threads], f.lane[: f.num_threads]
            read = self.readers[g][:, None] >> warps.astype(np.uint32) & np.uint32(1)
            if self.lanes_read is not None:
                read &= self.lanes_read[g][:, None] >> lanes.astype(np.uint32)
            bad = np.where(who == _MANY, (late & read.astype(np.bool_)).any(1), bad)
        return bad

    def access(self, op: MemOp, off: np.ndarray, size: int, idx: np.ndarray | None, store: bool, what: str) -> None:
        """Check an access against earlier ones to the same bytes, and record it."""
        thread, floor, stamp = self.frame.lanes, self.order.floor, self.order.stamp
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
                self._check_readers(op, g, off, thread, floor, what)
                self.writes[g] = mine
                self.reads[g] = -1
            else:
                self._note_read(g, thread, floor, mine, self.warp_bit if idx is None else self.warp_bit[idx], strong)

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
        if op.strong:
            bad &= (record & 1) == 0
        if not bad.any():
            return
        c = np.flatnonzero(bad)
        c = c[self._unordered(thread[c], record[c], g[c])]
        if len(c):
            self._report(op, int(thread[c[0]]), int(off[c[0]]), what, "read", int(record[c[0]]))

    def _note_read(
        self, g: np.ndarray, thread: np.ndarray, floor: np.ndarray, mine: np.ndarray, bit: np.ndarray, strong: int
    ) -> None:
        old = self.reads[g]
        if ((old == mine) | (old == (mine | _MANY << 1))).all() and (self.readers[g] & bit).all():
            return  # a loop that reads the same again
        live = old >= floor
        self._strong_reads |= bool(strong)
        if live.any():
            if self._strong_reads:  # a plain read is kept before a strong one: it may clash with more
                plain = (old & 1) == 0
                if strong and (live & plain).any():
                    rest = ~(live & plain)
                    if rest.any():
                        self._note_read(g[rest], thread[rest], floor[rest], mine[rest], bit[rest], strong)
                    return
                live &= plain | bool(strong)
            several = live & (_thread(old) != thread)
            if self.lanes_read is not None and several.any():  # what is ordered before this read need not be kept
                c = np.flatnonzero(several)
                several[c] = self._unordered(thread[c], old[c], g[c])
                live &= several | (_thread(old) == thread)
            new = np.where(several, mine | (_MANY << 1), mine)
            readers = np.where(live, self.readers[g], np.uint32(0)) | bit
        else:
            new, readers = mine, bit
        if self.lanes_read is not None:
            self.lanes_read[g] = np.where(live, self.lanes_read[g], np.uint32(0))
            np.bitwise_or.at(self.lanes_read, g, self.lane_bit[thread])
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
            self.writes[g] = self.order.stamp[lanes] | self._number(op)
            self.reads[g] = -1

    def _report(self, op: MemOp, lane: int, off: int, what: str, did: str, record: int) -> NoReturn:
        f, who = self.frame, record >> 1 & _MANY
        other = "several threads" if who == _MANY else f"thread {f.thread_coordinates(who)}"
        ins = self._ops[record >> _OP & _MOST_OPS].ins
        where = next(map(str, f.program.source(ins.line)), f"PTX line {ins.line}: {ins.text}")
        words = f"shared-memory race: {what} of a location {did} by {other} with no barrier in between ({where})"
        f.fail(RaceFault, words, op.ins, lane, *f.describe("shared", off, lane))


class GlobalRaces:
    """Detects conflicting accesses to global memory by different thread blocks of a launch.

    A record has, from its lowest bit, whether the access was strong; whether more lanes of the thread's warp made it,
    too; the thread; the thread block + 1; the time. 0 is no access.
    """

    def __init__(self, nbytes: int, granule: int, num_threads: int, num_ctas: int) -> None:
        self.shift = granule.bit_length() - 1
        self._cta = 2 + (num_threads - 1).bit_length()
        self._time = self._cta + num_ctas.bit_length()
        self._cta_bits = (1 << self._time) - (1 << self._cta)
        count = (nbytes >> self.shift) + 1
        self.writes = sparse_zeros(count, np.int64)
        self.reads = sparse_zeros(count, np.int64)  # the last ones,
        self.others = sparse_zeros(count, np.int64)  # and the last ones of another thread block than these
        self.flags: Flags = {}

    def begin(self, frame: Frame, order: Order) -> None:
        """Look at another batch from now on."""
        self.frame, self.order = frame, order
        self._block = (frame.cta + 1) << self._cta
        self._who = self._block | frame.thread << 2

    def _foreign(self, record: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Which records are of another thread block than this one, as its bits in a record."""
        other = record & self._cta_bits
        return (other != 0) & (other != block)

    def _fields(self, record: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Thread block, thread and time of accesses."""
        thread = record >> 2 & ((1 << (self._cta - 2)) - 1)
        return ((record & self._cta_bits) >> self._cta) - 1, thread, record >> self._time

    def access(self, op: MemOp, off: np.ndarray, size: int, idx: np.ndarray | None, store: bool) -> None:
        """Check an access against earlier ones to the same bytes, and record it."""
        lanes, block, who, now = self.frame.lanes, self._block, self._who, self.order.now
        if idx is not None:
            lanes, block, who, now = idx, block[idx], who[idx], now[idx]
        strong = int(op.strong)
        mine = (now << self._time) | who | strong
        for q in range(max(1, size >> self.shift)):
            g = (off >> self.shift) + q
            record = self.writes[g]
            self._check(op, off, lanes, block, record, "written")
            if "nc" in op.ins.parts and record.any():
                j = int(record.argmax())
                self._fail(op, off, lanes, j, int(record[j]), "read-only (.nc) load", "written")
            if store:
                self._check(op, off, lanes, block, self.reads[g], "read")
                self._check(op, off, lanes, block, self.others[g], "read")
                self.writes[g] = mine
                last = self.writes[g]
                if not strong and (last != mine).any():
                    lost = self._foreign(last, block)
                    if lost.any():
                        j = int(lost.argmax())
                        self._fail(op, off, lanes, j, int(last[j]), op.kind, "written")
                self.reads[g] = self.others[g] = 0
            else:
                self._note_read(g, lanes, block, mine, strong)

    def _note_read(self, g: np.ndarray, lanes: np.ndarray, block: np.ndarray, mine: np.ndarray, strong: int) -> None:
        old = self.reads[g]
        if strong:  # a plain read may clash with more than this one
            rest = (old == 0) | ((old & 1) != 0)
            g, lanes, block, mine, old = g[rest], lanes[rest], block[rest], mine[rest], old[rest]
        foreign = self._foreign(old, block)
        if not strong and foreign.any():
            foreign &= (old & 1) == 0
        if foreign.any():  # what is ordered before this read need not be kept
            c = np.flatnonzero(foreign)
            c = c[self._unordered(lanes[c], old[c])]
            self.others[g[c]] = old[c]
        self.reads[g] = mine
        last = self.reads[g]
        lost = last != mine  # several lanes of this load read one granule
        if lost.any():
            foreign = lost & self._foreign(last, block)
            self.others[g[foreign]] = mine[foreign]
            self.reads[g[lost & (last >> 7 == mine >> 7)]] |= 2  # but for the lane they are the same

    def _check(
        self, op: MemOp, off: np.ndarray, lanes: np.ndarray, block: np.ndarray, record: np.ndarray, did: str
    ) -> None:
        bad = self._foreign(record, block)
        if op.strong and bad.any():
            bad &= (record & 1) == 0
        if bad.any():
            c = np.flatnonzero(bad)
            c = c[self._unordered(lanes[c], record[c])]
            if len(c):
                self._fail(op, off, lanes, int(c[0]), int(record[c[0]]), op.kind, did)

    def _unordered(self, lanes: np.ndarray, record: np.ndarray) -> np.ndarray:
        """Which of the recorded accesses, of other thread blocks, race with one by `lanes` now."""
        bad = np.ones(len(lanes), np.bool_)
        if self.order.clocks is None or not self.order.clocks.learned:
            return bad
        known, (cta, thread, time) = self.order.clocks.known[lanes], self._fields(record)
        clocks = {id(clock): clock for clock in known if clock is not None}
        numbers = np.array([id(clock) for clock in known])
        for number, clock in clocks.items():
            mine = numbers == number
            for other in np.unique(cta[mine]).tolist():
                row = clock.get(other)
                if row is not None:
                    at = np.flatnonzero(mine & (cta == other))
                    whole = np.minimum.reduceat(row, np.arange(0, len(row), 32))
                    upto = np.where(record[at] & 2, whole[thread[at] >> 5], row[thread[at]])
                    bad[at] = time[at] >= upto
        return bad

    def _fail(
        self, op: MemOp, off: np.ndarray, lanes: np.ndarray, j: int, record: int, what: str, did: str
    ) -> NoReturn:
        number = ((record & self._cta_bits) >> self._cta) - 1
        other, lane = self.frame.cta_coordinates(number), int(lanes[j])
        words = f"global-memory race: {what} of a location {did} by thread block {other} in the same launch"
        self.frame.fail(RaceFault, words, op.ins, lane, *self.frame.describe("global", int(off[j]), lane))
