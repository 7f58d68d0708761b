"""The schedule of a batch's basic blocks, through divergence and reconvergence.

Every lane has a block number. The lowest runnable block executes for all lanes at it, so lanes reconverge in layout
order. With a seed, random subsets of warps run ahead until they block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ptx.instruction import Instruction
from ..state.faults import KernelFault, SyncFault, TrapFault
from ..state.frame import Frame, Mask
from ..state.order import Order
from ..state.stats import StatsRecorder
from ..translation.translate import Translation
from .barriers import Barrier, Barriers, Reduction
from .warp_barriers import WarpBarriers

_REROLL = 1 / 16  # a seeded run's chance, at each step, to pick another subset of warps
_MOST_VARIANTS = 20_000  # cached lookups of masked code

BlockCode = Callable[[Mask], None]


@dataclass(eq=False)
class _End:
    """How a block ends, and for which lanes it waits before it begins."""

    kind: str  # fall, bra, cbra, ret, trap, bar
    target: int
    pred: np.ndarray | None
    negated: bool
    sync: str | None
    count: int  # instructions
    ins: Instruction
    barrier: Barrier | None = None
    member: np.ndarray | None = None  # member mask of a block that does not wait for the full warp

    def taken(self, m: np.ndarray) -> np.ndarray:
        """The lanes of `m` that take the jump, trap or barrier."""
        return m if self.pred is None else m & (self.pred ^ self.negated)


class WarpScheduler:
    """Runs the batches of a launch that have the same number of lanes."""

    def __init__(
        self,
        frame: Frame,
        translation: Translation,
        ns: dict[str, Any],
        recorder: StatsRecorder,
        rng: np.random.Generator | None,
        step_limit: int | None,
    ) -> None:
        self.frame, self.translation, self.ns = frame, translation, ns
        self.recorder, self.rng, self.step_limit = recorder, rng, step_limit
        self.blocks = translation.program.blocks
        self.exit = len(self.blocks)  # block number of lanes that have exited
        self._ends = [self._end(i) for i in range(len(self.blocks))]
        self._codes: dict[tuple[int, int | None], BlockCode] = {}
        self._masked_codes: dict[tuple[int, bytes], BlockCode] = {}

    # -- ends of blocks
    def _end(self, i: int) -> _End:
        block, program = self.blocks[i], self.translation.program
        last = block.instructions[-1]
        head, names = last.parts[0], self.translation.scope.python_name
        end = _End("fall", i + 1, None, last.negated, block.sync, len(block.instructions), last)
        if head == "bra":
            end.kind, end.target = ("cbra" if last.pred else "bra"), program.labels[last.operands[0]]
        elif head in ("ret", "exit"):
            end.kind, end.target = ("cbra" if last.pred else "ret"), self.exit
        elif head in ("trap", "brx"):
            end.kind = "trap"
        elif head in ("bar", "barrier") and last.parts[1] not in ("warp", "cluster"):
            end.kind, end.barrier = "bar", self._barrier(last)
        if last.pred and head in ("bra", "ret", "exit", "trap", "bar", "barrier"):
            end.pred = self.ns[f"{names[last.pred]}_p"]
        if block.sync not in (None, "full"):
            mask = block.sync
            if mask in program.registers:
                end.member = self.ns[f"{names[mask]}_u32"]
            else:
                end.member = np.full(self.frame.num_lanes, int(mask, 0) & 0xFFFFFFFF, np.uint32)
        return end

    def _barrier(self, ins: Instruction) -> Barrier:
        names = self.translation.scope.python_name
        operands = list(ins.operands)
        reduction = None
        if "red" in ins.parts:
            dest, pred = operands.pop(0), operands.pop()
            what = next(q for q in ins.parts if q in ("popc", "and", "or"))
            target = self.ns[f"{names[dest]}_{'u32' if what == 'popc' else 'p'}"]
            reduction = Reduction(what, target, self.ns[f"{names[pred.lstrip('!')]}_p"], pred.startswith("!"))

        def read(operand: str) -> int | np.ndarray:
            return self.ns[f"{names[operand]}_u32"] if operand in names else int(operand, 0)

        number, count = ([read(operand) for operand in operands] + [0, 0])[:2]
        arrive = "arrive" in ins.parts
        fixed = isinstance(number, int) and isinstance(count, int) and count in (0, self.frame.num_threads)
        return Barrier(number, count, arrive, reduction, fixed and not arrive)

    def _code(self, i: int, keep: int | None) -> BlockCode:
        code = self._codes.get((i, keep))
        if code is None:
            scope: dict[str, Any] = {}
            exec(self.translation.code(i, keep), self.ns, scope)
            code = self._codes[i, keep] = scope["block"]
        return code

    def _masked_code(self, i: int, lanes: int) -> BlockCode:
        """The variant of block i for `lanes` active lanes, which depends on where the other lanes are."""
        occupied = self._counts[:-1] > 0
        occupied[i] = self._counts[i] != lanes  # lanes that are held back at this block need their registers, too
        key = (i, occupied.tobytes())
        code = self._masked_codes.get(key)
        if code is None:
            code = self._code(i, self.translation.liveness.kept(i, np.flatnonzero(occupied).tolist()))
            if len(self._masked_codes) > _MOST_VARIANTS:
                self._masked_codes.clear()
            self._masked_codes[key] = code
        return code

    # -- execution
    def run(self, frame: Frame, order: Order | None, warp_barriers: WarpBarriers) -> None:
        """Run one batch to completion."""
        self._warp_barriers = warp_barriers
        self.frame, lanes = frame, frame.num_lanes
        self._pc = np.zeros(lanes, np.int32)
        self._barriers = Barriers(frame, order, self._pc, self.blocks)
        self._chosen: np.ndarray | None = None
        self._run(lanes)
        self.recorder.out.barriers += self._barriers.completed

    def _run(self, lanes: int) -> None:
        out, pc = self.recorder.out, self._pc
        count_warps = self.recorder.memory
        cur, m, steps = 0, None, 0
        if self.rng is not None and (start := self._choose()):
            cur, m = start
        while True:
            end = self._ends[cur]
            steps += 1
            out.blocks_executed += 1
            if self.step_limit is not None and steps > self.step_limit:
                self.frame.fail(KernelFault, f"step limit of {self.step_limit} reached; still running", end.ins)
            if m is None:
                self._code(cur, None)(None)
                out.thread_instructions += end.count * lanes
                if count_warps:
                    self.recorder.block_warps[cur] += self.frame.num_warps
                following = self._uniform_successor(end, cur) if self.rng is None else None
                if following == self.exit:
                    return
                if following is not None:
                    cur = following
                    continue
                pc[:] = cur
                m = np.ones(lanes, np.bool_)
            else:
                active = int(np.count_nonzero(m))
                self._masked_code(cur, active)(m)
                out.thread_instructions += end.count * active
                if count_warps:
                    self.recorder.block_warps[cur] += self._active_warps(m)
            self._advance(end, cur, m)
            chosen = self._choose()
            if chosen is None:
                return
            cur, m = chosen

    def _uniform_successor(self, end: _End, cur: int) -> int | None:
        """The next block if the whole batch goes to it, else None."""
        if end.kind == "fall":
            return cur + 1
        if end.kind in ("bra", "ret"):
            return end.target
        if end.kind == "cbra" and end.pred is not None:
            taken = int(np.count_nonzero(end.pred))
            taken = self.frame.num_lanes - taken if end.negated else taken
            return cur + 1 if taken == 0 else end.target if taken == self.frame.num_lanes else None
        if end.barrier is not None and end.barrier.simple and end.pred is None:
            self._barriers.whole(end.barrier)
            return cur + 1
        return None

    def _active_warps(self, m: np.ndarray) -> int:
        if self.frame.whole_warps:
            return int(np.count_nonzero(m.view(np.uint64).reshape(-1, 4).any(1)))
        return len(np.unique(self.frame.warp[m]))

    def _advance(self, end: _End, cur: int, m: np.ndarray) -> None:
        """Move the lanes that executed a block to their next ones."""
        if end.kind in ("bra", "ret"):
            np.putmask(self._pc, m, end.target)
            return
        if end.kind == "cbra" and end.pred is not None:
            np.putmask(self._pc, m, np.where(end.pred ^ end.negated, np.int32(end.target), np.int32(cur + 1)))
            return
        part = end.taken(m)
        if end.kind == "trap" and part.any():
            self.frame.fail(TrapFault, "the kernel trapped", end.ins, int(part.argmax()))
        np.putmask(self._pc, m, cur + 1)
        if end.barrier is not None:
            self._barriers.reach(end.barrier, cur, part, fair=self.rng is not None)

    def _choose(self) -> tuple[int, Mask] | None:
        """The next block and its lanes, whose mask is None for all; None once every lane has exited."""
        waiting = self._barriers.waiting
        while True:
            key = self._pc
            self._counts = np.bincount(key, minlength=self.exit + 1)
            if waiting.any():
                key = np.where(waiting, np.int32(self.exit), key)
            if self.rng is not None:
                key = self._subset(key)
            while (block := int(key.min())) != self.exit:
                m = key == block
                if self._ends[block].sync:
                    bad = self._not_converged(block, m)
                    if bad is not None:
                        key = np.where(bad, np.int32(self.exit), key)
                        m &= ~bad
                        if not m.any():
                            continue
                return block, (None if self._counts[block] == self.frame.num_lanes and m.all() else m)
            if self.rng is not None and self._let_other_warps_run():
                continue
            if self._counts[self.exit] == self.frame.num_lanes:
                return None
            self._barriers.release()

    def _subset(self, key: np.ndarray) -> np.ndarray:
        """Hide the lanes of warps outside the random subset."""
        assert self.rng is not None
        runnable = key != self.exit
        if not runnable.any():
            return key
        keep = self._chosen is not None and self.rng.random() > _REROLL
        while not keep or self._chosen is None or not (runnable & self._chosen).any():
            pick = self.rng.random(self.frame.num_warps) < self.rng.choice((0.1, 0.5, 0.9))
            self._chosen, keep = pick[self.frame.warp], True
        return np.where(self._chosen, key, np.int32(self.exit))

    def _let_other_warps_run(self) -> bool:
        """Let all warps run if the random subset is stuck, and return whether that adds any."""
        if self._chosen is not None and not self._chosen.all():
            self._chosen = np.ones(self.frame.num_lanes, np.bool_)
            return True
        self._chosen = None
        return False

    def _masks_of_lanes(self, lanes: np.ndarray) -> np.ndarray:
        """The lanes of each warp that are in `lanes`, as bit masks."""
        f = self.frame
        masks = np.zeros(f.num_warps, np.uint32)
        np.bitwise_or.at(masks, f.warp[lanes], np.left_shift(np.uint32(1), f.lane[lanes].astype(np.uint32)))
        return masks

    def _not_converged(self, block: int, m: np.ndarray) -> np.ndarray | None:
        """The lanes of `m` whose warp operation still waits for members; None if there are none."""
        f, member = self.frame, self._ends[block].member
        passed = self._warp_barriers.passed if self.blocks[block].at_any_barrier else None
        if passed is not None and passed.any() and (m & passed).any():
            held = m & ~passed  # these have arrived since
            return held if held.any() else None
        if f.whole_warps and member is None:
            w = m.view(np.uint64).reshape(-1, 4)
            full = (w == 0x0101010101010101).all(1)
            if (full == w.any(1)).all():
                return None
            need, ok = f.exists, np.repeat(full, 32)
        else:
            need = f.exists if member is None else member & f.exists
            ok = (need & ~self._masks_of_lanes(m)[f.warp]) == 0
        bad = m & ~ok
        if not bad.any():
            return None
        if self._counts[self.exit]:
            exited = self._masks_of_lanes(self._pc == self.exit)
            missing = bad & ((need & exited[f.warp]) != 0)
            if missing.any():
                ins = self.blocks[block].instructions[0]
                f.fail(SyncFault, "warp operation names lanes that have exited", ins, int(missing.argmax()))
        if passed is not None:
            self._open_warp_barriers()
            bad &= ~passed
        return bad if bad.any() else None

    def _open_warp_barriers(self) -> None:
        """Open each bar.warp.sync whose members have all arrived at one, at this block or at others."""
        here = self._barriers.waiting | self._warp_barriers.passed
        waiting, need = np.zeros(self.frame.num_lanes, np.bool_), self.frame.exists.copy()
        for i in np.flatnonzero(self._counts[:-1]).tolist():
            if self.blocks[i].at_any_barrier:
                at = (self._pc == i) & ~here
                waiting |= at
                if (member := self._ends[i].member) is not None:
                    need[at] &= member[at]
        self._warp_barriers.meet(waiting, need)
