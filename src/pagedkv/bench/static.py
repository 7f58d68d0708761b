"""What can be counted about the CUDA kernels without a GPU: of their machine code, and of runs on the emulator."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from time import process_time
from typing import Any
from unittest.mock import patch

import numpy as np

from ..cuda.compiler import compile as compiling
from ..cuda.compiler import link as linking
from ..cuda.compiler.occupancy import occupancy
from ..cuda.compiler.ptx import TOOLS, Capability, external_functions, versions
from ..emulator import EmulatorDevice
from ..emulator.state.stats import BufferTraffic, LaunchStats
from .report import Row, median
from .sass import code_of, copies_of, loads_of, loop_of
from .variants import WORK, Variant, Work, quick_variants, variants

CAPABILITIES = ((8, 0), (9, 0), (10, 0))
COUNTED = EmulatorDevice.capability
SECTOR_BYTES = 32
ALIGNMENT = 256
UNIT_BYTES = 512  # of what a kernel reads: one 16-byte load of each lane of a warp
NARROWEST = 8  # bytes of a load of q, K or V
ATTENTION = ("v1", "v2", "split")


def _aligned(array: Any) -> Any:
    """A copy with the same strides, whose element 0 lies where a GPU's allocator puts it."""
    nbytes = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)) + array.itemsize
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    copy = np.ndarray(array.shape, array.dtype, memory, -memory.ctypes.data % ALIGNMENT, array.strides)
    copy[...] = array
    return copy


class _Device(EmulatorDevice):
    """Notes launches, and runs them on aligned copies if it has the emulator's own compute capability."""

    lineinfo = False  # as a GPU has them

    def __init__(self, capability: Capability) -> None:
        super().__init__(race=False, init_check=False, stats=True)
        self.capability = capability
        self.noted: list[tuple[compiling.CompiledKernel, int]] = []

    def address(self, name: str, array: Any) -> int:
        return super().address(name, _aligned(array))

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], args: Sequence[int | float], shared_bytes: int = 0
    ) -> None:
        self.noted.append((kernel, shared_bytes))
        if self.capability == COUNTED:
            super().launch(kernel, grid, args, shared_bytes)


@contextmanager
def _timed(module: Any, name: str) -> Iterator[list[tuple[tuple[Any, ...], float]]]:
    """The arguments and the processor seconds of each call of a function."""
    function, calls = getattr(module, name), []

    def timed(*args: Any) -> Any:
        start = process_time()
        result = function(*args)
        calls.append((args, process_time() - start))
        return result

    with patch.object(module, name, timed):
        yield calls


def measure(variant: Variant, capability: Capability, repeats: int = 9) -> Row:
    """One row: a kernel for one compute capability.

    Parameters
    ----------
    variant : Variant
    capability : tuple of int
    repeats : int
        Timed loads from disk.
    """
    work, entry = WORK[variant.kernel](variant), f"pagedkv_{variant.kernel}"
    device = _Device(capability)
    with (
        _timed(compiling, "_compile") as compiled,
        _timed(linking, "link") as linked,
        patch("pagedkv.emulator.device.EmulatorDevice", lambda: device),
    ):
        work.call()
        at = next(i for i, (kernel, _) in enumerate(device.noted) if kernel.entry == entry)
        kernel, dynamic = device.noted[at]
        resources = kernel.linked.resources()
    seconds = [time for args, time in compiled if args[-1] == entry] + [time for _, time in linked]
    static, warps = resources.shared_bytes, kernel.num_threads // 32
    blocks, limit = _occupancy(kernel, resources.registers, static + dynamic)
    code = code_of(kernel.cubin, entry)
    loads = _loads(code, tuple(work.read), capability)
    stats = device.launches[at] if device.launches else None
    row: Row = {
        "kernel": variant.kernel,
        "q" if variant.kernel in ATTENTION else "of": variant.kind,
        **({"kv": variant.kv_kind} if variant.kv_kind else {}),
        "D": variant.head_dim,
        **({"G": variant.group_size} if variant.kernel == "split" else {}),
        **({"P": variant.block_size} if variant.block_size else {}),
        "case": variant.options or "-",
        "cc": f"{capability[0]}.{capability[1]}",
        "registers": resources.registers,
        "spill B": resources.spill_bytes,
        "stack B": resources.stack_bytes,
        "static B": static,
        "dynamic B": dynamic,
        "blocks/SM": blocks,
        "limit": limit,
        "external": len(external_functions(kernel.ptx)),
    }
    for i, name in enumerate(work.read):
        row[f"{name} load B"], per_thread = loads[i]
        row[f"{name} in flight KiB"] = per_thread * 32 * warps * blocks / 1024
    row |= _counts(stats, work)
    if variant.kernel == "split":
        row["loop instr/512B"] = _loop_instructions(code, capability)
        row["partials"] = stats and _partials(stats) / work.read["KV"][1]
    row["compile s"] = sum(seconds) if compiled and linked else None
    return row | {"disk ms": _milliseconds_from_disk(kernel, repeats)}


def _occupancy(kernel: compiling.CompiledKernel, registers: int, shared_bytes: int) -> tuple[int, str]:
    """Resident blocks of a multiprocessor, and what allows no more of them."""
    capability, num_threads = kernel.capability, kernel.num_threads
    alone = {
        "registers": occupancy(capability, registers, num_threads, 0),
        "shared": occupancy(capability, 1, num_threads, shared_bytes),
        "threads": occupancy(capability, 1, num_threads, 0),
    }
    blocks = occupancy(capability, registers, num_threads, shared_bytes)
    return blocks, "+".join(name for name, most in alone.items() if most == blocks)


def _loads(code: bytes, columns: tuple[str, ...], capability: Capability) -> list[tuple[int, int]]:
    """Bytes of one load, and of all in flight in a thread, by column: the narrowest of K and of V, else the widest.

    Copies to shared memory, where there are any, are all of K and V. v1, v2 and split read q, K and V with loads of at
    least 8 bytes. v1 and v2 read nothing else so, and barriers stand between the three; what is not so is 0.
    """
    copies = copies_of(code, capability)
    if copies is not None:
        return [(copies.widest, copies.in_flight)]
    if columns != ("K", "V"):
        loads = loads_of(code, NARROWEST if columns == ("KV",) else 1)
        return [(max(x.widest for x in loads), max(x.in_flight for x in loads))]
    loads = loads_of(code, NARROWEST)
    return [(x.narrowest, x.in_flight) for x in loads[1:]] if len(loads) == 3 else [(0, 0)] * 2


def _loop_instructions(code: bytes, capability: Capability) -> float | None:
    """Warp instructions for each 512 bytes that the inner loop asks for."""
    loop = loop_of(code, capability, NARROWEST)
    return loop and loop.instructions * UNIT_BYTES / (32 * loop.bytes_loaded)


def _partials(stats: LaunchStats) -> int:
    """Bytes of partial results that kernel split writes and reads."""
    buffers = [stats.buffers.get(name, BufferTraffic()) for name in ("split_sums", "split_states")]
    return sum(buffer.bytes_read + buffer.bytes_written for buffer in buffers)


def _counts(stats: LaunchStats | None, work: Work) -> Row:
    """Of the emulator; None for another compute capability than its own."""
    row: Row = {}
    nbytes = 0
    for name, (buffers, least) in work.read.items():
        row[f"{name} sectors"] = stats and _sectors(stats, buffers, "sectors_read") * SECTOR_BYTES / least
        nbytes += least
    if work.written:
        buffers, least = work.written
        row["written sectors"] = stats and _sectors(stats, buffers, "sectors_written") * SECTOR_BYTES / least
    row["wavefronts"] = stats and (
        stats.shared_wavefronts / stats.shared_wavefronts_min if stats.shared_requests else None
    )
    return row | {"instr/512B": stats and stats.total_warp_instructions * UNIT_BYTES / nbytes}


def _sectors(stats: LaunchStats, buffers: tuple[str, ...], which: str) -> int:
    return sum(getattr(stats.buffers.get(name, BufferTraffic()), which) for name in buffers)


def _milliseconds_from_disk(kernel: compiling.CompiledKernel, repeats: int) -> float | None:
    """Processor time to load PTX and machine code; None for a kernel that is not kept on disk."""
    key = next(key for key, value in compiling._compiled.items() if value is kernel)
    if getattr(key[1], "score_mod", None) is not None:
        return None
    times = []
    for _ in range(repeats):
        start = process_time()
        compiling._load_or_compile(*key).linked  # noqa: B018
        times.append((process_time() - start) * 1000)
    return median(times)


# A new process: seconds to import the compiler, to get a first call's kernels, and the times of measure().
FRESH = """
import json, time
start = time.process_time()
import numba.cuda, cuda.core
from pagedkv.bench import static
imported = time.process_time()
row = static.measure(static.Variant("v1", "float16", "float16", 128, 16), (9, 0), 1)
print(json.dumps([imported - start, row["compile s"], row["disk ms"]]))
"""


def _fresh_row() -> Row:
    """The first kernel of a new process, with nothing on disk."""
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "PAGEDKV_CACHE_DIR": directory}
        command = [sys.executable, "-c", FRESH]
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    imported, compiled, loaded = json.loads(output)
    return {"new process": "v1", "import s": imported, "compile s": compiled, "disk ms": loaded}


def _split_targets(rows: list[Row]) -> list[tuple[str, list[Row], str, float, int]]:
    """Of kernel split: a name, the rows, a column, its limit, and 1 where that is the most and -1 where the least."""
    split = [row for row in rows if row["kernel"] == "split"]
    usual = [row for row in split if row["cc"] == "9.0" and row["D"] in (64, 128, 256) and row["case"] == "-"]
    half = [row for row in usual if row["kv"] in ("float16", "bfloat16")]
    fp8, single = ([row for row in usual if row["kv"].startswith(kind)] for kind in ("fp8", "float32"))
    loops = [
        *(("16 bits, G 1 to 8", half, 0, 8, 14.0), ("16 bits, G 9 to 16", half, 8, 16, 20.0)),
        *(("fp8, G 1 to 8", fp8, 0, 8, 34.0), ("fp8, G 9 to 16", fp8, 8, 16, 45.0)),
        *(("float32, G 1", single, 0, 1, 18.0), ("float32, G 4", single, 1, 4, 55.0)),
    ]
    return [
        *((f"split: {name}", split, name, 0, 1) for name in ("spill B", "stack B")),
        ("split: KV sectors", usual, "KV sectors", 1.01, 1),
        ("split: wavefronts", usual, "wavefronts", 1.1, 1),
        *(
            (f"split: loop, {name}", [row for row in among if low < row["G"] <= high], "loop instr/512B", limit, 1)
            for name, among, low, high, limit in loops
        ),
        ("split: all, 16 bits, G 1 to 16", [row for row in half if row["G"] <= 16], "instr/512B", 30.0, 1),
        ("split: KV in flight KiB", usual, "KV in flight KiB", 64, -1),
        ("split: partials", usual, "partials", 0.04, 1),
        ("split: compile s", split, "compile s", 5.0, 1),
    ]


def targets(rows: list[Row]) -> list[Row]:
    """What is to be reached, the worst row, and whether it does.

    By v1 and v2 at P in {8, 16, 32} and D <= 256; by split for 9.0 at D in {64, 128, 256}, in machine code and PTX.
    """
    grid = [row for row in rows if row["kernel"] in ("v1", "v2") and row["P"] <= 32 and row["D"] <= 256]
    most = {"spill B": 0, "stack B": 0, "K sectors": 1.05, "V sectors": 1.05}
    wanted = [(name, grid, name, float(limit), 1) for name, limit in most.items()]
    wanted += [("K load B", grid, "K load B", 16, -1), *_split_targets(rows)]
    wanted += [("external", rows, "external", 0, 1), ("disk ms", rows, "disk ms", 30.0, 1)]
    wanted += [("compile s", [row for row in rows if row["kernel"] != "split"], "compile s", 3.0, 1)]
    result = []
    for label, among, name, limit, sign in wanted:
        having = [row for row in among if row.get(name) is not None]
        worst = max(having, key=lambda row: sign * row[name], default=None)
        if worst is not None:
            reached = "yes" if sign * worst[name] <= sign * limit else "no"
            misses = sum(sign * row[name] > sign * limit for row in having)
            where = " ".join(
                str(worst[key]) for key in ("kernel", "q", "of", "kv", "D", "G", "P", "case", "cc") if key in worst
            )
            result.append(
                {"target": label, "limit": limit, "worst": worst[name], "reached": reached, "misses": misses}
                | {"rows": len(having), "worst row": where}
            )
    return result


def run(
    *,
    repeats: int = 9,
    progress: Callable[[str], Any] = print,
    capabilities: Sequence[Capability] = CAPABILITIES,
    quick: bool = False,
    cold: bool = False,
    processes: int = 2,
) -> list[Row]:
    """Compile the kernels, count them, and run those for 9.0 on the emulator; no GPU is used.

    Parameters
    ----------
    repeats : int
        Loads of each kernel from disk that are timed.
    progress : callable
        Told what is being measured.
    capabilities : sequence of (int, int)
    quick : bool
        One variant of each kernel.
    cold : bool
        Compile everything, in an empty cache directory, instead of taking what is on disk.
    processes : int
        1 for none but this one.

    Returns
    -------
    list of dict
        Of each variant and compute capability: registers, bytes of spills, of the stack and of shared memory, resident
        blocks of a multiprocessor and what limits them, bytes of a load, KiB of loads in flight on a multiprocessor,
        sectors and shared wavefronts over the minimum, warp instructions for each 512 bytes that are read, processor
        time to compile and to load; then, unless `quick`, the first kernel of a new process; then what `targets` says,
        and the versions of the compiler.
    """
    jobs = [(variant, cc) for variant in (quick_variants() if quick else variants()) for cc in capabilities]
    with tempfile.TemporaryDirectory() as directory:
        environment = {"PAGEDKV_CACHE_DIR": directory} if cold else {}
        with patch.dict(os.environ, environment), patch.dict(compiling._compiled, {}, clear=cold):
            rows = _measure_all(jobs, repeats, progress, processes)
    tools = zip(TOOLS, versions()[1:], strict=True)
    compilers: list[Row] = [{"compiler": tool, "version": version} for tool, version in tools if version]
    return rows + ([] if quick else [_fresh_row()]) + targets(rows) + compilers


def _measure_all(
    jobs: list[tuple[Variant, Capability]], repeats: int, progress: Callable[[str], Any], processes: int
) -> list[Row]:
    def tell(done: int, job: tuple[Variant, Capability]) -> None:
        progress(f"static, {done + 1} of {len(jobs)}: {job[0].kernel} for {job[1][0]}.{job[1][1]}")

    if processes == 1:
        rows = []
        for i, job in enumerate(jobs):
            tell(i, job)
            rows.append(measure(*job, repeats))
        return rows
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(measure, *job, repeats): job for job in jobs}
        for i, future in enumerate(as_completed(futures)):
            tell(i, futures[future])
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)
