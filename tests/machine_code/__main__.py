"""Count the machine code of the CUDA kernels, and what they do on the emulator.

    python -m tests.machine_code [--cc 8.0 9.0 10.0] [--quick] [--json]

Prints a row for each variant and compute capability: registers; bytes of spills, stack and shared memory; resident
thread blocks of a multiprocessor and what limits them; bytes of a load and KiB in flight on a multiprocessor; sectors
and wavefronts over the fewest; warp instructions for every 512 bytes read. Then the targets, and the versions of the
compiler. `record.json` is what ``--json`` printed for all variants.
"""

from __future__ import annotations

import multiprocessing
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from pagedkv.bench.report import Row, as_json, as_table
from pagedkv.compiler.ptx import TOOLS, Capability, versions

from .measure import measure
from .targets import targets
from .variants import Variant, quick_variants, variants

CAPABILITIES = ((8, 0), (9, 0), (10, 0))
NAMED = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)


def rows(
    wanted: Sequence[Variant],
    capabilities: Sequence[Capability] = CAPABILITIES,
    progress: Callable[[str], Any] = print,
    processes: int = 2,
) -> list[Row]:
    """A row for each variant and capability for which it has a kernel; the targets; the compiler's versions."""
    jobs = [(variant, cc) for variant in wanted for cc in capabilities if variant.suits(cc)]
    counted = _measure_all(jobs, progress, processes)
    tools = zip(TOOLS, versions()[1:], strict=True)
    compilers: list[Row] = [{"compiler": tool, "version": version} for tool, version in tools if version]
    return counted + targets(counted) + compilers


def _measure_all(
    jobs: Sequence[tuple[Variant, Capability]], progress: Callable[[str], Any], processes: int
) -> list[Row]:
    def tell(done: int, job: tuple[Variant, Capability]) -> None:
        progress(f"{done + 1} of {len(jobs)}: {job[0].kernel} for {job[1][0]}.{job[1][1]}")

    if processes == 1:
        counted = []
        for i, job in enumerate(jobs):
            tell(i, job)
            counted.append(measure(*job))
        return counted
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(measure, *job): job for job in jobs}
        for i, future in enumerate(as_completed(futures)):
            tell(i, futures[future])
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)


def _capability(text: str) -> Capability:
    for major, minor in CAPABILITIES:
        if text == f"{major}.{minor}":
            return major, minor
    raise ArgumentTypeError(f"must be of {NAMED}, got {text}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = ArgumentParser(prog="python -m tests.machine_code", description="Count the machine code of CUDA kernels.")
    help_cc = f"compute capabilities, of {NAMED} (default: all)"
    parser.add_argument("--cc", nargs="+", type=_capability, default=CAPABILITIES, metavar="CC", help=help_cc)
    parser.add_argument("--quick", action="store_true", help="one variant of each kernel")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    found = rows(
        quick_variants() if options.quick else variants(), options.cc, lambda text: print(text, file=sys.stderr)
    )
    print((as_json if options.json else as_table)(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
