"""Timing of calls on a GPU, and the rows of a bench."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from ..contest import NOT_INSTALLED, Call, Contest, Sample, Timer, contest, interleaved, median, spread
from ..problem import TOLERANCE, BenchProblem, Cell
from ..report import Row
from .arrays import GpuProblem
from .device import TURNS, Gpu

READ, COPY, EMPTY = "read", "copy", "empty launch"
PERCENTILES = {"host us": 50, "host p10 us": 10, "host p90 us": 90, "host p99 us": 99}
SAMPLE_SECONDS = 1e-3
MOST_LAUNCHES = 50
FEW_TOKENS = 16  # query tokens of a sequence up to which reading K and V takes most of the time
# The peers' packages, for the versions in the header.
PACKAGES = (
    *("torch", "cupy", "triton", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "flashinfer-python"),
    *("flash-attn", "flash-attn-3", "vllm", "numba-cuda"),
)

Subjects = Mapping[str, Callable[[GpuProblem], Call]]


def sample(gpu: Gpu, call: Call, launches: int) -> Sample:
    """The mean time of launches, each timed between two events after a flush that is not timed.

    The flush keeps the GPU busy while the host enqueues the launch, so that no host time is measured.
    """
    intervals, late, on_host = [], 0, []
    for _ in range(launches):
        gpu.flush()
        start = gpu.record()
        on_host.append(host_time(call))
        stop = gpu.record()
        late += gpu.passed(start)
        intervals.append((start, stop))
    gpu.synchronize()
    total = sum(gpu.milliseconds(*interval) for interval in intervals) / 1e3
    calls, threads = zip(*on_host, strict=True)
    return Sample(total / launches, calls, threads, late / launches)


def host_time(call: Call) -> tuple[float, float]:
    """What a call takes on the host, and for how much of that its thread runs: the rest it waits."""
    thread, begin = thread_time(), perf_counter()
    call()
    end = perf_counter()
    return end - begin, thread_time() - thread


def host_columns(samples: Sequence[Sample]) -> Row:
    """Percentiles of what single calls take on the host, and the median of the time in which their threads ran."""
    if not samples:
        return dict.fromkeys((*PERCENTILES, "thread us"))
    calls, threads = (np.concatenate(of) * 1e6 for of in zip(*(each[1:3] for each in samples), strict=True))
    times = {name: float(np.percentile(calls, percent)) for name, percent in PERCENTILES.items()}
    return {**times, "thread us": float(np.median(threads))}


def on_gpu(gpu: Gpu) -> Timer:
    """Make a timer whose samples have as many launches as take about a millisecond, up to MOST_LAUNCHES."""

    def timer(call: Call) -> Callable[[], Sample]:
        sample(gpu, call, 1)
        launches = round(SAMPLE_SECONDS / max(sample(gpu, call, 2).seconds, 1e-9))
        return partial(sample, gpu, call, max(1, min(MOST_LAUNCHES, launches)))

    return timer


def columns(result: Contest, name: str, num_bytes: int | None, limit: str, least: float | None) -> Row:
    """The columns of a subject: its time, its error, its bandwidth, and its share of what READ or COPY would reach.

    Parameters
    ----------
    result : Contest
    name : str
    num_bytes : int or None
        What it has to move; None where arithmetic takes longer.
    limit : str
        READ or COPY.
    least : float or None
        The seconds in which that moves as many bytes.
    """
    seconds, samples = result.seconds(name), result.samples.get(name, [])
    empty = result.seconds(EMPTY)
    return {
        "subject": name,
        "us": seconds and seconds * 1e6,
        **host_columns(samples),
        "spread": result.spread(name),
        "GB/s": num_bytes / seconds / 1e9 if seconds and num_bytes else None,
        f"{limit} us": least and least * 1e6,
        f"{EMPTY} us": empty and empty * 1e6,
        "share": least / seconds if seconds and least else None,
        "late": sum(each.late for each in samples) / len(samples) if samples else None,
        "error": result.errors.get(name),
    }


def header(gpu: Gpu, repeats: int) -> Row:
    """The first row: device, driver and versions; a read and a copy of all bytes; an empty launch, and no launch."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    calls: dict[str, Call] = {READ: partial(gpu.read, gpu.copy_bytes, TURNS), COPY: gpu.copy}
    samples = interleaved(calls | {EMPTY: partial(gpu.read, 0)}, repeats, on_gpu(gpu))
    reads, copies, launches = ([each.seconds for each in of] for of in samples.values())
    measured = {
        "copy MiB": gpu.copy_bytes / 2**20,
        "read GB/s": gpu.copy_bytes / median(reads) / 1e9,
        "copy GB/s": 2 * gpu.copy_bytes / median(copies) / 1e9,
        "read spread": spread(reads),
        "copy spread": spread(copies),
        f"{EMPTY} us": median(launches) * 1e6,
        "empty us": median([sample(gpu, lambda: None, 1).seconds * 1e6 for _ in range(repeats)]),
    }
    return {**gpu.facts, **versions, **measured}


def measure(
    gpu: Gpu, operation: str, cell: Cell, subjects: Subjects, first: str, repeats: int, progress: Callable[[str], Any]
) -> list[Row]:
    """Measure every subject on a cell, in turns with an empty launch and a read of the same bytes; a row for each.

    A subject that refuses the cell, or disagrees with the CPU backend in the rows that are compared, has the reason in
    its row and no time. `first` is the subject that the times of the others are put over.
    """
    shape = cell.columns(operation)
    where = " ".join(f"{name}={shape[name]}" for name in ("B", "n", "L") if name in shape)
    host = BenchProblem(cell)
    problem = GpuProblem(gpu, host)
    num_bytes, others = None, {EMPTY: partial(gpu.read, 0)}
    if max(cell.query_lens) <= FEW_TOKENS:
        num_bytes, read_bytes = cell.num_bytes, min(cell.num_bytes, gpu.copy_bytes)
        others[READ] = partial(gpu.read, read_bytes)
    result = contest(
        {name: partial(subject, problem) for name, subject in subjects.items()},
        others,
        lambda out: host.error_of(gpu.numpy(out)),
        TOLERANCE[cell.dtype],
        repeats,
        timer=on_gpu(gpu),
        progress=lambda name: progress(f"{operation} {cell.group}, {where}: {name}"),
    )
    # A read of more than the buffer has takes as much longer.
    reads, rows = result.seconds(READ), []
    least = reads * num_bytes / read_bytes if reads and num_bytes else None
    for name in subjects:
        seconds = result.seconds(name)
        rate = {"TFLOP/s": seconds and cell.num_flops / seconds / 1e12} if operation == "prefill" else {}
        compared = {f"x {first}": result.over(name, first), "note": result.notes.get(name)}
        rows.append(shape | columns(result, name, num_bytes, READ, least) | rate | compared)
    del problem
    gpu.release()
    return rows


def measure_all(
    gpu: Gpu,
    operation: str,
    cells: Iterable[Cell],
    subjects: Subjects,
    first: str,
    repeats: int,
    progress: Callable[[str], Any],
    rows: list[Row],
) -> None:
    """Add the rows of each cell to `rows`; a subject that is not installed has a row in the first cell only."""
    for cell in cells:
        of_cell = measure(gpu, operation, cell, subjects, first, repeats, progress)
        missing = {row["subject"] for row in of_cell if (row["note"] or "").endswith(NOT_INSTALLED)}
        subjects = {name: subject for name, subject in subjects.items() if name not in missing}
        rows += of_cell


def only(wanted: Sequence[str] | None, among: Sequence[Cell]) -> list[Cell]:
    """The cells of the chosen groups; all if None."""
    return [cell for cell in among if wanted is None or cell.group in wanted]


def targets_of(found: Iterable[tuple[str, str, float, Sequence[float]]]) -> list[Row]:
    """Make rows for targets (name, ">=" or "<=", limit, values) by their worst value; none without values."""
    result = []
    for name, sign, limit, values in found:
        if values:
            worst = max(values) if sign == "<=" else min(values)
            reached = worst <= limit if sign == "<=" else worst >= limit
            result.append(target(name, f"{sign} {limit:g}", worst, reached, "-"))
    return result


def target(name: str, limit: str, measured: float, reached: bool, where: str) -> Row:
    """Make a row with a target, the measured figure, whether it is enough, and where it was measured."""
    return {"target": name, "limit": limit, "measured": measured, "reached": "yes" if reached else "no", "where": where}


def add_options(parser: ArgumentParser, groups: Sequence[str], subjects: Iterable[str]) -> None:
    """Add the options that the benches of attention share."""
    names = list(subjects)
    parser.add_argument("--quick", action="store_true", help="small cells")
    parser.add_argument(
        "--only", nargs="+", choices=groups, dest="groups", metavar="GROUP", help=f"of {', '.join(groups)}"
    )
    parser.add_argument("--subjects", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
