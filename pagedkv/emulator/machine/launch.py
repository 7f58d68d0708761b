"""A device that runs kernels: it checks a launch, and runs its thread blocks in batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import numpy as np

from ..errors import EmulatorError
from ..ptx.parse import Param
from ..ptx.types import SIZE
from ..state.faults import KernelFault
from ..state.footprint import FootprintRecorder
from ..state.frame import Frame
from ..state.memory import Buffer, Memory
from ..state.order import Order
from ..state.races import GlobalRaces, SharedRaces
from ..state.stats import LaunchStats, StatsRecorder
from ..state.warp_trace import Warp, require_warp
from ..translation.entry import Entry
from ..translation.mem_op import MemOp
from ..translation.scope import Scope
from .access import Access, TracedAccess
from .namespace import FUNCTIONS, operations
from .schedule import WarpScheduler
from .tracer import Tracer
from .warp_barriers import WarpBarriers
from .warpgroup import WarpgroupOps

MAX_THREADS = 1024
MAX_SHARED_BYTES = 227 * 1024
Dims = tuple[int, int, int]


def dims(sizes: int | Sequence[int], what: str) -> Dims:
    """Complete one to three positive sizes to three."""
    try:
        given = tuple(map(index, sizes if isinstance(sizes, Iterable) else (sizes,)))
    except TypeError:
        given = ()
    if not 1 <= len(given) <= 3 or min(given) < 1:
        raise EmulatorError(f"{what} must be one to three positive sizes, got {sizes!r}")
    x, y, z = given + (1,) * (3 - len(given))
    return x, y, z


def _at_least(least: int, value: int, what: str) -> int:
    try:
        if (number := index(value)) >= least:
            return number
    except TypeError:
        pass
    raise EmulatorError(f"{what} must be an integer >= {least}, got {value!r}")


def _parameter(param: Param, value: Any) -> bytes:
    """A kernel parameter as bytes."""
    if isinstance(value, Buffer):
        if value.freed:
            raise EmulatorError(f"parameter {param.name}: buffer {value.name!r} was freed")
        value = value.address
    is_float = isinstance(value, (float, np.floating))
    if isinstance(value, bytes):
        raw = value
    elif param.size != SIZE[param.type]:
        raise EmulatorError(f"parameter {param.name} is a {param.size}-byte structure: pass bytes")
    elif is_float != (param.type[0] == "f") and param.type[0] != "b":
        raise EmulatorError(f"parameter {param.name} is .{param.type}, got {type(value).__name__}")
    elif is_float:
        raw = np.array(value, f"f{param.size}").tobytes()
    else:
        low, high = -(1 << (8 * param.size - 1)), 1 << 8 * param.size
        if not low <= int(value) < high:
            raise EmulatorError(f"value {value} does not fit parameter {param.name} (.{param.type})")
        raw = (int(value) & (high - 1)).to_bytes(param.size, "little")
    if len(raw) != param.size:
        raise EmulatorError(f"parameter {param.name} has {param.size} bytes, got {len(raw)}")
    return raw


def _granule(scope: Scope, space: str) -> int:
    """Bytes of the kernel's smallest access to a space, the resolution of race detection."""
    ops = (op for op in scope.objects.values() if isinstance(op, MemOp) and op.space in (space, "generic"))
    return min([4, *(op.element for op in ops)])


class Device(Memory):
    """Global memory, and launches of kernels on it.

    Parameters
    ----------
    memory_bytes : int
        Address space. It takes memory only where it is written: hundreds of GiB are fine on Linux.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda, types
    >>> from pagedkv.emulator import Device, Module
    >>> def double(x):
    ...     x[cuda.threadIdx.x] *= 2
    >>> ptx, _ = cuda.compile_ptx(double, types.void(types.CPointer(types.float32)), cc=(9, 0))
    >>> device = Device()
    >>> x = device.upload(np.arange(32, dtype=np.float32), "x")
    >>> stats = device.launch(Module(ptx).entry(), 1, 32, [x])
    >>> x.get()[:4]
    array([0., 2., 4., 6.], dtype=float32)
    """

    def launch(
        self,
        entry: Entry,
        grid: int | Sequence[int],
        num_threads: int | Sequence[int],
        args: Sequence[Any],
        shared_bytes: int = 0,
        *,
        race: bool = True,
        init_check: bool = True,
        global_race: bool = False,
        stats: bool = False,
        footprint: bool = False,
        trace: Warp | None = None,
        seed: int | None = None,
        batch_threads: int = 8192,
        step_limit: int | None = None,
        strict_shared_alignment: bool = False,
        max_shared_bytes: int = MAX_SHARED_BYTES,
        name: str | None = None,
    ) -> LaunchStats:
        """Run a kernel to completion.

        Parameters
        ----------
        entry : Entry
            The kernel, from `Module.entry`.
        grid, num_threads : int or sequence of up to three int
            Sizes of the grid and of a thread block.
        args : sequence
            A value for each parameter: a Buffer or an address for a pointer, a number, bytes for a structure.
        shared_bytes : int
            Dynamic shared memory of a thread block.
        race : bool
            Look for races on shared memory.
        init_check : bool
            Fault on reads of bytes that were never written.
        global_race : bool
            Look for conflicting accesses to global memory by different thread blocks.
        stats : bool
            Count memory traffic, sectors and wavefronts.
        footprint : bool
            Record which bytes of which buffer are read and written.
        trace : Warp, optional
            Record each instruction of this warp, if the launch has it.
        seed : int, optional
            Run thread blocks and warps in a random order; without a seed they run in lock-step.
        batch_threads : int
            Threads to simulate together.
        step_limit : int, optional
            Fault after this many steps of a batch.
        strict_shared_alignment : bool
            Give shared arrays no more than their declared alignment.
        max_shared_bytes : int
            Limit on a thread block's static and dynamic shared memory.
        name : str, optional
            The kernel's name in faults.

        Returns
        -------
        LaunchStats

        Raises
        ------
        EmulatorError
            Hardware would refuse the launch. The kernel's fault is a subclass.
        """
        sizes, threads = dims(grid, "grid"), dims(num_threads, "num_threads")
        shared_bytes = _at_least(0, shared_bytes, "shared_bytes")
        batch_threads = _at_least(1, batch_threads, "batch_threads")
        require_warp(trace)
        if step_limit is not None:
            step_limit = _at_least(1, step_limit, "step_limit")
        self._check(entry, sizes, threads, args, shared_bytes, max_shared_bytes)
        params = {param.name: _parameter(param, value) for param, value in zip(entry.params, args, strict=True)}
        traced = trace is not None and trace.is_in(sizes, threads)
        translation = entry.traced if traced else entry.translation
        scope = translation.scope
        for kind, value, _ in scope.constants:  # make module variables before statistics size their counters
            if kind == "symbol" and value[0] in entry.globals:
                self.module_symbol(entry.globals, value[0])
        num_ctas, per_cta = math.prod(sizes), math.prod(threads)
        rng = None if seed is None else np.random.default_rng(seed)
        name = name or entry.readable_name
        recorder = StatsRecorder(name, entry, self, stats)
        tracks = FootprintRecorder(self) if footprint else None
        tracer = Tracer(trace, name, entry, self) if trace is not None and traced else None
        global_races: GlobalRaces | None = None
        if global_race:
            global_races = GlobalRaces(self.extent, _granule(scope, "global"), per_cta, num_ctas)
        layout = entry.shared_strict if strict_shared_alignment else entry.shared
        per = max(1, batch_threads // per_cta)
        namespace: dict[str, Any] = {}
        scheduler: WarpScheduler | None = None
        shuffled = None if rng is None else rng.permutation(num_ctas)
        with np.errstate(all="ignore"):
            for first in range(0, num_ctas, per):
                ctas = (
                    np.arange(first, min(first + per, num_ctas)) if shuffled is None else shuffled[first : first + per]
                )
                frame = Frame(entry, self, sizes, threads, ctas, shared_bytes, layout, name)
                order, shared_races = None, None
                if race or global_race:
                    order = Order(frame, None if global_races is None else global_races.flags, translation.uses_flags)
                if race and order is not None:
                    shared_races = SharedRaces(frame, _granule(scope, "shared"), order, translation.orders_lanes)
                if global_races is not None and order is not None:
                    global_races.begin(frame, order)
                parts = (frame, self, init_check, order, shared_races, global_races, recorder, tracks, rng)
                access = Access(*parts) if tracer is None else TracedAccess(tracer, *parts)
                warp_barriers = WarpBarriers(frame, order)
                warpgroups = WarpgroupOps(frame, access, order) if translation.uses_wgmma else None
                reuse = scheduler is not None and scheduler.frame.num_lanes == frame.num_lanes
                bound = operations(frame, access, warp_barriers, warpgroups, order, params)
                bound.update(frame.namespace(scope, reuse))
                if tracer is not None:
                    bound.update(tracer.watch(frame))
                if reuse:  # same number of lanes: keep register arrays and compiled blocks
                    namespace.update(bound)
                else:
                    namespace = {**FUNCTIONS, **bound}
                    scheduler = WarpScheduler(frame, translation, namespace, recorder, rng, step_limit)
                assert scheduler is not None
                try:
                    scheduler.run(frame, order, warp_barriers)
                    if warpgroups is not None:
                        warpgroups.finish()
                except KernelFault as fault:
                    fault.trace = tracer.out if tracer else None
                    raise
        result = recorder.finish()
        result.footprint = tracks.finish() if tracks else None
        result.trace = tracer.out if tracer else None
        return result

    @staticmethod
    def _check(
        entry: Entry, grid: Dims, threads: Dims, args: Sequence[Any], shared_bytes: int, max_shared_bytes: int
    ) -> None:
        if math.prod(threads) > MAX_THREADS or threads[2] > 64:
            raise EmulatorError(f"a thread block has at most {MAX_THREADS} threads, 64 of them in z, got {threads}")
        if grid[0] >= 1 << 31 or max(grid[1:]) > 65535:
            raise EmulatorError(f"grid must be at most (2147483647, 65535, 65535), got {grid}")
        for key, sizes in entry.directives.items():
            limit, got = math.prod(sizes), math.prod(threads)
            if (key == "maxntid" and got > limit) or (key == "reqntid" and got != limit):
                raise EmulatorError(f"{threads} threads violate .{key} {sizes}")
        static = entry.shared.static_bytes
        if static + shared_bytes > max_shared_bytes:
            raise EmulatorError(
                f"{static} static and {shared_bytes} dynamic bytes of shared memory exceed {max_shared_bytes}"
            )
        if len(args) != len(entry.params):
            raise EmulatorError(f"{entry.readable_name} takes {len(entry.params)} parameters, got {len(args)}")
