"""Race detectors, for shared memory inside a thread block and for global memory between thread blocks.

Both have a record of the last write and of the last reads for each granule, the size of the kernel's smallest access,
so that half-words written by different lanes do not clash. Two accesses race if one of them is a store, not both are
morally strong, and `Order` does not know that one comes before the other. Morally strong are strong accesses of one
size whose scopes include each other's thread: between thread blocks, those of .cta scope never are.

A strong store does not replace the record of another thread's store that nothing orders before it: `Unordered` keeps
that one for weak accesses to come. An atomic does replace it: it reads what it replaces, so that what comes after the
one comes after the other, by observation order.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from ..translation.mem_op import MemOp
from .faults import RaceFault
from .frame import WARP_SIZE, Frame
from .memory import sparse_zeros
from .order import LANE, TIME, Flags, Order
from .unordered import SEVERAL, STRONG_CLASS, Unordered

# A record in shared memory is time << TIME | op << _OP | thread << LANE | SEVERAL | the strong class.
_OP = 24
UNFENCED = np.int64(2**63 - 1)  # no fence.proxy.async has come after a write
_MANY = (1 << (_OP - LANE)) - 1  # instead of a thread: several readers
_MOST_OPS = (1 << (TIME - _OP)) - 1


def _thread(record: np.ndarray) -> np.ndarray:
    return record >> LANE & _MANY


class SharedRaces:
    """Detects conflicting accesses to shared memory by threads that nothing orders.

    Parameters
    ----------
    frame : Frame
    granule : int
        Bytes of a record.
    order : Order
    by_lane : bool
        Whether to keep which lanes have read, for kernels that order single threads and not only whole warps.
    """

    def __init__(self, frame: Frame, granule: int, order: Order, by_lane: bool) -> None:
        self.frame, self.order, self.shift = frame, order, granule.bit_length() - 1
        count = len(frame.shared) >> self.shift
        self.writes = np.full(count, -1, np.int64)
        self.reads = np.full(count, -1, np.int64)
        # By warp, its last read: one of several readers may be known to have read when others have not.
        self.read_by = sparse_zeros(frame.warps_per_cta * count, np.int64).reshape(frame.warps_per_cta, count)
        self.readers = np.zeros(count, np.uint32)  # bit mask of the warps that read since the last write
        self.lanes_read = np.zeros(count, np.uint32) if by_lane else None  # and of the lanes in them
        self.warp_bit = np.left_shift(np.uint32(1), frame.warp_in_cta.astype(np.uint32))
        self.lane_bit = np.left_shift(np.uint32(1), frame.lane.astype(np.uint32))
        self.fences: np.ndarray | None = None  # by granule, if Proxies keeps them
        self._strong_reads = False
        self._several = Unordered()
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
            bad &= ~many
            for x in range(f.warps_per_cta):
                has = many & ((self.readers[g] >> np.uint32(x)) & np.uint32(1)).astype(np.bool_)
                bad |= has & (self.read_by[x, g] >> TIME >= np.where(w == x, own, order.seen[cta, w, x]))
        if order.precise and bad.any():
            c = np.flatnonzero(bad)
            bad[c] = self._unordered_threads(lane[c], when[c], who[c], None if g is None else g[c])
        return bad

    def _unordered_threads(
        self, lane: np.ndarray, when: np.ndarray, who: np.ndarray, g: np.ndarray | None
    ) -> np.ndarray:
        """As `_unordered`, from what threads know of single threads."""
        f, k = self.frame, np.arange(len(lane))
        rows = self.order.rows(lane)
        late = when[:, None] >= rows
        late[k, lane % f.num_threads] = False
        bad = late[k, np.where(who == _MANY, 0, who) % f.num_threads]
        if g is not None and (who == _MANY).any():
            warps, lanes = f.warp_in_cta[: f.num_threads], f.lane[: f.num_threads]
            late = rows <= (self.read_by[:, g][warps].T >> TIME)
            late[k, lane % f.num_threads] = False
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
        strong_class = op.strong_class
        mine = stamp | (self._number(op) | strong_class)
        first = off >> self.shift
        for q in range(max(1, size >> self.shift)):
            g = first + q if q else first
            record = self.writes[g]
            bad = record >= floor
            if bad.any():
                bad &= _thread(record) != thread
            if strong_class:
                bad &= (record & STRONG_CLASS) != strong_class
            if bad.any():
                c = np.flatnonzero(bad)
                c = c[self._unordered(thread[c], record[c])]
                if len(c):
                    self._report(op, int(thread[c[0]]), int(off[c[0]]), what, "written", int(record[c[0]]))
            if found := self._several.racing(g, thread, record, strong_class, self._would_race):
                j, other = found
                self._report(op, int(thread[j]), int(off[j]), what, "written", other)
            if not store:
                bit = self.warp_bit if idx is None else self.warp_bit[idx]
                self._note_read(g, thread, floor, mine, bit, strong_class)
                continue
            self._check_readers(op, g, off, thread, floor, what)
            if self.fences is not None:
                self.fences[g] = UNFENCED
            if not strong_class:
                self.writes[g], self.reads[g] = mine, -1
                continue
            if op.kind == "store":
                self._several.store(self.writes, g, thread, mine, self._would_race)
            else:
                self.writes[g] = mine | self._several.atomic(record)
            # Weak reads come before; strong ones may still clash with a weak store.
            weak = (self.reads[g] & STRONG_CLASS) == 0
            self.reads[g[weak]] = -1

    def _would_race(self, lane: np.ndarray, record: np.ndarray) -> np.ndarray:
        return (_thread(record) != lane) & self._unordered(lane, record)

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
        if op.strong_class:
            bad &= (record & STRONG_CLASS) != op.strong_class
        if not bad.any():
            return
        c = np.flatnonzero(bad)
        c = c[self._unordered(thread[c], record[c], g[c])]
        if len(c):
            self._report(op, int(thread[c[0]]), int(off[c[0]]), what, "read", int(record[c[0]]))

    def _note_read(
        self, g: np.ndarray, thread: np.ndarray, floor: np.ndarray, mine: np.ndarray, bit: np.ndarray, strong_class: int
    ) -> None:
        old = self.reads[g]
        if ((old == mine) | (old == (mine | _MANY << LANE))).all() and (self.readers[g] & bit).all():
            return  # a loop that reads the same again
        live = old >= floor
        self._strong_reads |= bool(strong_class)
        if live.any():
            if self._strong_reads:  # a plain read is kept before a strong one: it may clash with more
                plain = (old & STRONG_CLASS) == 0
                if strong_class and (live & plain).any():
                    rest = ~(live & plain)
                    if rest.any():
                        self._note_read(g[rest], thread[rest], floor[rest], mine[rest], bit[rest], strong_class)
                    return
                live &= plain | bool(strong_class)
            several = live & (_thread(old) != thread)
            if self.lanes_read is not None and several.any():  # drop what is ordered before this read
                c = np.flatnonzero(several)
                several[c] = self._unordered(thread[c], old[c], g[c])
                live &= several | (_thread(old) == thread)
            new = np.where(several, mine | (_MANY << LANE), mine)
            readers = np.where(live, self.readers[g], np.uint32(0)) | bit
        else:
            new, readers = mine, bit
        if self.lanes_read is not None:
            self.lanes_read[g] = np.where(live, self.lanes_read[g], np.uint32(0))
            np.bitwise_or.at(self.lanes_read, g, self.lane_bit[thread])
        self.reads[g], self.readers[g] = new, readers
        self.read_by[self.frame.warp_in_cta[thread], g] = mine
        lost = self.reads[g] != new  # several lanes of this load read one granule
        if lost.any():
            self.reads[g[lost]] |= _MANY << LANE
            missing = (self.readers[g] & bit) == 0
            if missing.any():
                np.bitwise_or.at(self.readers, g[missing], bit[missing])

    def record_write(self, op: MemOp, off: np.ndarray, size: int, lanes: np.ndarray) -> None:
        """Record a completed cp.async as a write, now, by the thread that issued it."""
        for q in range(max(1, size >> self.shift)):
            g = (off >> self.shift) + q
            self.writes[g] = self.order.stamp[lanes] | self._number(op)
            self.reads[g] = -1
            if self.fences is not None:
                self.fences[g] = UNFENCED

    # -- queries of Proxies
    def writer(self, g: np.ndarray) -> np.ndarray:
        """The lane that was the last to write each granule."""
        return _thread(self.writes[g])

    def is_after(self, lanes: np.ndarray, record: np.ndarray) -> np.ndarray:
        """Which records do not come before an access that these lanes would make now."""
        late = record >= self.order.floor[lanes]
        c = np.flatnonzero(late & (record != UNFENCED))
        late[c] = self._would_race(lanes[c], record[c])
        return late

    def is_unordered(self, lane: int, g: np.ndarray) -> np.ndarray:
        """Which of the last writes to these granules do not come before an access that a lane would make now."""
        return self.is_after(np.full(len(g), lane), self.writes[g])

    def writer_line(self, g: int) -> str:
        """The line of the instruction that was the last to write a granule."""
        return self._line(int(self.writes[g]))

    def _line(self, record: int) -> str:
        ins = self._ops[record >> _OP & _MOST_OPS].ins
        return next(map(str, self.frame.program.source(ins.line)), f"PTX line {ins.line}: {ins.text}")

    def _report(self, op: MemOp, lane: int, off: int, what: str, did: str, record: int) -> NoReturn:
        f, who = self.frame, record >> LANE & _MANY
        other = "several threads" if who == _MANY else f"thread {f.thread_coordinates(who)}"
        words = f"shared-memory race: {what} of a location {did} by {other} with no barrier in between"
        words += f" ({self._line(record)})"
        f.fail(RaceFault, words, op.ins, lane, *f.describe("shared", off, lane))


class GlobalRaces:
    """Detects conflicting accesses to global memory by different thread blocks of a launch.

    A record has, from its lowest bit:

    * the class of a strong access, 0 if its scope is a thread block;
    * SEVERAL: of reads, by more lanes of the warp; of stores, that earlier ones are in `Unordered`;
    * the thread; the thread block + 1; whether it is a read-only load, whose record stays, as nothing may store there
      any more; the time.

    0 is no access.
    """

    def __init__(self, nbytes: int, granule: int, num_threads: int, num_ctas: int) -> None:
        self.shift = granule.bit_length() - 1
        self._cta = LANE + (num_threads - 1).bit_length()
        self._read_only = 1 << self._cta + num_ctas.bit_length()
        self._cta_bits = self._read_only - (1 << self._cta)
        self._time = self._read_only.bit_length()
        count = (nbytes >> self.shift) + 1
        self.writes = sparse_zeros(count, np.int64)
        self.reads = sparse_zeros(count, np.int64)  # the last ones,
        self.others = sparse_zeros(count, np.int64)  # and the last ones of another thread block than these
        self.flags: Flags = {}
        self._several = Unordered()

    def begin(self, frame: Frame, order: Order) -> None:
        """Begin another batch."""
        self.frame, self.order = frame, order
        self._block = (frame.cta + 1) << self._cta
        self._who = self._block | frame.thread << LANE

    def _foreign(self, record: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Which records are of other thread blocks than this one, which is given as its bits in a record."""
        other = record & self._cta_bits
        return (other != 0) & (other != block)

    def _fields(self, record: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The thread block, thread and time of accesses."""
        thread = record >> LANE & ((1 << (self._cta - LANE)) - 1)
        return ((record & self._cta_bits) >> self._cta) - 1, thread, record >> self._time

    def access(self, op: MemOp, off: np.ndarray, size: int, idx: np.ndarray | None, store: bool) -> None:
        """Check an access against earlier ones to the same bytes, and record it."""
        lanes, block, who, now = self.frame.lanes, self._block, self._who, self.order.now
        if idx is not None:
            lanes, block, who, now = idx, block[idx], who[idx], now[idx]
        strong_class = op.strong_class if op.grid else 0
        mine = (now << self._time) | who | strong_class
        for q in range(max(1, size >> self.shift)):
            g = (off >> self.shift) + q
            record = self.writes[g]
            self._check(op, off, lanes, block, self._several.plain(record), strong_class, "written")
            if found := self._several.racing(g, lanes, record, strong_class, self._would_race_blocks):
                self._fail(op, off, lanes, *found, op.kind, "written")
            if op.read_only:
                if record.any():
                    j = int(record.argmax())
                    self._fail(op, off, lanes, j, int(record[j]), "read-only (.nc) load", "written")
                self.reads[g] = mine | self._read_only
                continue
            if not store:
                self._note_read(g, lanes, block, mine, strong_class)
                continue
            read = self.reads[g]
            if (constant := read & self._read_only).any():
                j = int(constant.argmax())
                self._fail(op, off, lanes, j, int(read[j]), op.kind, "read as read-only (.nc)")
            self._check(op, off, lanes, block, read, strong_class, "read")
            self._check(op, off, lanes, block, self.others[g], strong_class, "read")
            if strong_class and op.kind == "store":
                self._several.store(self.writes, g, lanes, mine, self._would_race)
            else:
                self.writes[g] = mine | self._several.atomic(record) if strong_class else mine
            if not strong_class:
                last = self.writes[g]
                if (last != mine).any() and (lost := self._foreign(last, block)).any():
                    j = int(lost.argmax())
                    self._fail(op, off, lanes, j, int(last[j]), op.kind, "written")
            for reads in (self.reads, self.others):  # strong reads may still clash with a weak store
                reads[g] = np.where(reads[g] & STRONG_CLASS, reads[g], 0) if strong_class else 0

    def _note_read(
        self, g: np.ndarray, lanes: np.ndarray, block: np.ndarray, mine: np.ndarray, strong_class: int
    ) -> None:
        old = self.reads[g]
        # A plain read may clash with more than a strong one, and a read-only load with any store.
        replaced = (old == 0) | (old & STRONG_CLASS != 0) if strong_class else old & self._read_only == 0
        if not replaced.all():
            g, lanes, block, mine, old = g[replaced], lanes[replaced], block[replaced], mine[replaced], old[replaced]
        foreign = self._foreign(old, block)
        if not strong_class and foreign.any():
            foreign &= (old & STRONG_CLASS) == 0
        if foreign.any():  # drop what is ordered before this read
            c = np.flatnonzero(foreign)
            c = c[self._unordered(lanes[c], old[c])]
            self.others[g[c]] = old[c]
        self.reads[g] = mine
        last = self.reads[g]
        lost = last != mine  # several lanes of this load read one granule
        if lost.any():
            foreign = lost & self._foreign(last, block)
            self.others[g[foreign]] = mine[foreign]
            self.reads[g[lost & (last >> LANE + 5 == mine >> LANE + 5)]] |= SEVERAL  # the same but for the lane

    def _check(
        self,
        op: MemOp,
        off: np.ndarray,
        lanes: np.ndarray,
        block: np.ndarray,
        record: np.ndarray,
        strong_class: int,
        did: str,
    ) -> None:
        bad = self._foreign(record, block)
        if strong_class and bad.any():
            bad &= (record & STRONG_CLASS) != strong_class
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
                    whole = np.minimum.reduceat(row, np.arange(0, len(row), WARP_SIZE))
                    upto = np.where(record[at] & SEVERAL, whole[thread[at] // WARP_SIZE], row[thread[at]])
                    bad[at] = time[at] >= upto
        return bad

    def _would_race(self, lanes: np.ndarray, record: np.ndarray) -> np.ndarray:
        cta, thread, time = self._fields(record)
        late = time >= self.order.rows(lanes)[np.arange(len(lanes)), thread]
        own = late & (thread != self.frame.thread[lanes])
        return np.where(cta == self.frame.cta[lanes], own, self._unordered(lanes, record))

    def _would_race_blocks(self, lanes: np.ndarray, record: np.ndarray) -> np.ndarray:
        return self._foreign(record, self._block[lanes]) & self._unordered(lanes, record)

    def _fail(
        self, op: MemOp, off: np.ndarray, lanes: np.ndarray, j: int, record: int, what: str, did: str
    ) -> NoReturn:
        number = ((record & self._cta_bits) >> self._cta) - 1
        other, lane = self.frame.cta_coordinates(number), int(lanes[j])
        words = f"global-memory race: {what} of a location {did} by thread block {other} in the same launch"
        self.frame.fail(RaceFault, words, op.ins, lane, *self.frame.describe("global", int(off[j]), lane))
