"""The counts of machine code: all kernels and compute capabilities, in several processes, with the targets."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any
from unittest.mock import patch

from ...compiler import compile as compiling
from ...compiler.ptx import TOOLS, Capability, versions
from ..report import Row
from .measure import measure
from .targets import targets
from .variants import Variant, quick_variants, variants

# In a new process: seconds to import the compiler, to compile a first kernel, and to load it from disk.
FRESH = """
import json, time
start = time.process_time()
import numba.cuda, cuda.core
from pagedkv.bench.static.measure import Variant, measure
imported = time.process_time()
row = measure(Variant("v1", "float16", "float16", 128, 16), (9, 0), 1, cold=True)
print(json.dumps([imported - start, row["compile s"], row["disk ms"]]))
"""


def _fresh_row() -> Row:
    """Time the first kernel of a new process with an empty disk cache."""
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "PAGEDKV_CACHE_DIR": directory}
        command = [sys.executable, "-c", FRESH]
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    imported, compiled, loaded = json.loads(output)
    return {"new process": "v1", "import s": imported, "compile s": compiled, "disk ms": loaded}


def rows(
    repeats: int,
    progress: Callable[[str], Any],
    capabilities: Sequence[Capability],
    *,
    quick: bool,
    cold: bool,
    processes: int,
) -> list[Row]:
    """Compile the kernels, count their machine code, and run those for 9.0 on the emulator; arguments as for `run`.

    Returns
    -------
    list of dict
        For each variant and compute capability: registers; bytes of spills, stack and shared memory; resident thread
        blocks of a multiprocessor and their limit; bytes of a load and KiB in flight on a multiprocessor; sectors and
        shared wavefronts over the minimum; warp instructions for every 512 bytes read; processor time to compile and
        to load. Then the first kernel of a new process, unless `quick`; the targets; versions of the compiler.
    """
    wanted = quick_variants() if quick else variants()
    jobs = [(variant, cc) for variant in wanted for cc in capabilities if variant.suits(cc)]
    with tempfile.TemporaryDirectory() as directory:
        environment = {"PAGEDKV_CACHE_DIR": directory} if cold else {}
        with patch.dict(os.environ, environment), patch.dict(compiling._load_or_compile.made, {}, clear=cold):
            counted = _measure_all(jobs, repeats, progress, processes, cold=cold)
    tools = zip(TOOLS, versions()[1:], strict=True)
    compilers: list[Row] = [{"compiler": tool, "version": version} for tool, version in tools if version]
    return counted + ([] if quick else [_fresh_row()]) + targets(counted) + compilers


def _measure_all(
    jobs: list[tuple[Variant, Capability]], repeats: int, progress: Callable[[str], Any], processes: int, *, cold: bool
) -> list[Row]:
    def tell(done: int, job: tuple[Variant, Capability]) -> None:
        progress(f"static, {done + 1} of {len(jobs)}: {job[0].kernel} for {job[1][0]}.{job[1][1]}")

    if processes == 1:
        rows = []
        for i, job in enumerate(jobs):
            tell(i, job)
            rows.append(measure(*job, repeats, cold=cold))
        return rows
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(measure, *job, repeats, cold=cold): job for job in jobs}
        for i, future in enumerate(as_completed(futures)):
            tell(i, futures[future])
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)
