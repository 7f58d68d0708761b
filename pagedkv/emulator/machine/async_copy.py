"""cp.async: a copy becomes visible when the thread that issued it waits for its group.

Until then it may read its source at any time, since it is no part of the thread's program order (PTX ISA,
"Asynchronous Operations"). It counts as a read when it is issued, and again when the thread waits for it; nothing may
store there in between.
"""

from __future__ import annotations

import numpy as np

from ..ptx.instruction import Instruction
from ..ptx.types import GLOBAL_BASE
from ..state.faults import RaceFault
from ..state.frame import Frame, Mask
from ..state.memory import INITIALISED, PENDING
from ..state.races import GlobalRaces
from ..translation.mem_op import MemOp
from .access import Access
from .copies import Copies


class AsyncCopies:
    """Unfinished copies: their destination bytes are PENDING, and any access to these is a fault.

    They are in `Access.copies`, since any store to their source bytes is a fault, too.
    """

    def __init__(self, frame: Frame, access: Access) -> None:
        self.frame, self.access = frame, access
        self.open_group = np.zeros(frame.num_lanes, np.int64)

    def copy(
        self, load: MemOp, store: MemOp, dst: np.ndarray, src: np.ndarray, limit: np.ndarray | None, m: Mask
    ) -> None:
        """Start a copy for each lane; it reads `limit` bytes and fills the rest with zeros."""
        f, acc = self.frame, self.access
        lanes = f.lanes if m is None else np.flatnonzero(m)
        off, _ = acc.shared_offsets(store, dst, m, False, True)  # checked as a store
        if off is None:
            return
        size = store.size
        amount = np.full(len(lanes), size) if limit is None else np.minimum(limit[lanes].astype(np.int64), size)
        source = (src[lanes] - np.uint64(GLOBAL_BASE)).view(np.int64)
        if int(np.bitwise_or.reduce(source)) & (size - 1):  # must be aligned even where nothing is read
            acc.check(load, "global", acc.memory.space, source, 1 << 62, lanes, True)
        data = np.zeros((len(lanes), size), np.uint8)
        full = amount == size
        if full.any():
            goff, _ = acc.global_offsets(load, src, self._mask(lanes[full]), True, False)
            assert goff is not None
            data[full] = acc.memory.space.data[goff[:, None] + np.arange(size)]
        byte = MemOp(load.ins, "load", "global", 1)
        for q in range(size):
            part = ~full & (amount > q)
            if part.any():
                goff, _ = acc.global_offsets(byte, src + np.uint64(q), self._mask(lanes[part]), True, False)
                assert goff is not None
                data[part, q] = acc.memory.space.data[goff]
        copies = Copies(load, store, lanes, off, source, amount, data, self.open_group[lanes])
        self._check_overlap(copies, load.ins)
        f.shared.shadow[copies.destination] = PENDING
        acc.copies.append(copies)

    def _mask(self, lanes: np.ndarray) -> Mask:
        mask = np.zeros(self.frame.num_lanes, np.bool_)
        mask[lanes] = True
        return None if mask.all() else mask

    def _check_overlap(self, copies: Copies, ins: Instruction) -> None:
        """Fault if two copies of one instruction have the same destination."""
        order = np.argsort(copies.offsets, kind="stable")
        same = np.diff(copies.offsets[order]) == 0
        if same.any():
            j = int(order[int(same.argmax()) + 1])
            lane = int(copies.lanes[j])
            where = self.frame.describe("shared", int(copies.offsets[j]), lane)
            self.frame.fail(RaceFault, "two threads copy to one shared location", ins, lane, *where)

    def commit(self, m: Mask) -> None:
        """Close the open group of each lane."""
        self.open_group[slice(None) if m is None else m] += 1

    def wait(self, m: Mask, keep: int | None) -> None:
        """Complete all but the last `keep` groups of each lane; with None all copies, committed or not."""
        f, acc = self.frame, self.access
        remaining = []
        for copies in acc.copies:
            done = np.ones(len(copies.lanes), np.bool_) if m is None else m[copies.lanes]
            if keep is not None:
                done = done & (copies.group < self.open_group[copies.lanes] - keep)
            if done.any():
                ready = copies.where(done)
                f.shared.data[ready.destination] = ready.data
                f.shared.shadow[ready.destination] = INITIALISED
                if acc.shared_races is not None:
                    acc.shared_races.record_write(ready.store, ready.offsets, ready.store.size, ready.lanes)
                if acc.global_races is not None:
                    self._read_again(ready, acc.global_races)
            if not done.all():
                remaining.append(copies.where(~done))
        acc.copies = remaining

    @staticmethod
    def _read_again(copies: Copies, races: GlobalRaces) -> None:
        size = copies.load.size
        full = copies.amounts == size
        if full.any():
            races.access(copies.load, copies.sources[full], size, copies.lanes[full], False)
        for q in range(size) if not full.all() else ():
            part = ~full & (copies.amounts > q)
            if part.any():
                races.access(copies.load, copies.sources[part] + q, 1, copies.lanes[part], False)
