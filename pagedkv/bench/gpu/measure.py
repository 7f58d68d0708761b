"""Timing of calls on a GPU, and the rows of a bench."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

from ..contest import NOT_INSTALLED, Call, Contest, Sample, Timer, contest, interleaved, median, spread
from ..problem import TOLERANCE, BenchProblem, Cell
from ..report import Row
from .arrays import GpuProblem
from .device import Gpu

READ, COPY = "read", "copy"
SAMPLE_SECONDS = 1e-3
MOST_LAUNCHES = 50
FEW_TOKENS = 16  # query tokens of a sequence up to which reading K and V takes most of the time
# The peers' packages, for the versions in the header.
PACKAGES = ("torch", "cupy", "triton", "flashinfer-python", "flash-attn", "flash-attn-3", "vllm", "numba-cuda")

Subjects = Mapping[str, Callable[[GpuProblem], Call]]


def sample(gpu: Gpu, call: Call, launches: int) -> Sample:
    """The mean time of launches, each timed between two events after a flush that is not timed.

    The flush keeps the GPU busy while the host enqueues the launch, so that no host time is measured.
    """
    intervals, late, host_seconds = [], 0, 0.0
    for _ in range(launches):
        gpu.flush()
        start = gpu.record()
        begin = perf_counter()
        call()
        host_seconds += perf_counter() - begin
        stop = gpu.record()
        late += gpu.passed(start)
        intervals.append((start, stop))
    gpu.synchronize()
    total = sum(gpu.milliseconds(*interval) for interval in intervals) / 1e3
    return Sample(total / launches, host_seconds / launches, late / launches)


def on_gpu(gpu: Gpu) -> Timer:
    """Make a timer whose samples have as many launches as take about a millisecond, up to MOST_LAUNCHES."""

    def timer(call: Call) -> Callable[[], Sample]:
        sample(gpu, call, 1)
        launches = round(SAMPLE_SECONDS / max(sample(gpu, call, 2).seconds, 1e-9))
        return partial(sample, gpu, call, max(1, min(MOST_LAUNCHES, launches)))

    return timer


def contest_on(
    gpu: Gpu,
    subjects: Mapping[str, Callable[[], Call]],
    error_of: Callable[[Any], float],
    tolerance: float,
    repeats: int,
    progress: Callable[[str], Any],
) -> Contest:
    """Run a contest in which a read and a copy on the device take turns with the subjects."""
    others = {READ: gpu.read, COPY: gpu.copy}
    return contest(subjects, others, error_of, tolerance, repeats, timer=on_gpu(gpu), progress=progress)


def columns(gpu: Gpu, result: Contest, name: str, num_bytes: int | None, limit: str) -> Row:
    """The columns of a subject: time, error, bandwidth for `num_bytes`, and its share of that of READ or COPY.

    Without `num_bytes`, where arithmetic takes longer, there is no bandwidth.
    """
    seconds, samples = result.seconds(name), result.samples.get(name)
    bandwidth = num_bytes / seconds / 1e9 if seconds and num_bytes else None
    moved = {READ: gpu.copy_bytes, COPY: 2 * gpu.copy_bytes}
    limits = {of: nbytes / taken / 1e9 for of, nbytes in moved.items() if (taken := result.seconds(of))}
    return {
        "subject": name,
        "us": seconds and seconds * 1e6,
        "host us": median([each.host_seconds for each in samples]) * 1e6 if samples else None,
        "spread": result.spread(name),
        "GB/s": bandwidth,
        "read GB/s": limits.get(READ),
        "copy GB/s": limits.get(COPY),
        "share": bandwidth / limits[limit] if bandwidth and limit in limits else None,
        "late": sum(each.late for each in samples) / len(samples) if samples else None,
        "error": result.errors.get(name),
    }


def header(gpu: Gpu, repeats: int) -> Row:
    """The first row: device, driver and versions, bandwidths of a read and a copy, time between two events."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    samples = interleaved({READ: gpu.read, COPY: gpu.copy}, repeats, on_gpu(gpu))
    reads, copies = ([each.seconds for each in of] for of in samples.values())
    measured = {
        "copy MiB": gpu.copy_bytes / 2**20,
        "read GB/s": gpu.copy_bytes / median(reads) / 1e9,
        "copy GB/s": 2 * gpu.copy_bytes / median(copies) / 1e9,
        "read spread": spread(reads),
        "copy spread": spread(copies),
        "empty us": median([sample(gpu, lambda: None, 1).seconds * 1e6 for _ in range(repeats)]),
    }
    return {**gpu.facts, **versions, **measured}


def measure(
    gpu: Gpu, operation: str, cell: Cell, subjects: Subjects, first: str, repeats: int, progress: Callable[[str], Any]
) -> list[Row]:
    """Measure every subject on a cell; returns a row for each.

    A subject that refuses the cell, or disagrees with the CPU backend in the rows that are compared, has the reason in
    its row and no time. `first` is the subject that the times of the others are put over.
    """
    shape = cell.columns(operation)
    where = " ".join(f"{name}={shape[name]}" for name in ("B", "n", "L") if name in shape)
    host = BenchProblem(cell)
    problem = GpuProblem(gpu, host)
    result = contest_on(
        gpu,
        {name: partial(subject, problem) for name, subject in subjects.items()},
        lambda out: host.error_of(gpu.numpy(out)),
        TOLERANCE[cell.dtype],
        repeats,
        lambda name: progress(f"{operation} {cell.group}, {where}: {name}"),
    )
    num_bytes, rows = cell.num_bytes if max(cell.query_lens) <= FEW_TOKENS else None, []
    for name in subjects:
        seconds = result.seconds(name)
        rate = {"TFLOP/s": seconds and cell.num_flops / seconds / 1e12} if operation == "prefill" else {}
        compared = {f"x {first}": result.over(name, first), "note": result.notes.get(name)}
        rows.append(shape | columns(gpu, result, name, num_bytes, READ) | rate | compared)
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
