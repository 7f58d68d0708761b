"""Times decode, prefill and small calls on the CPU beside the machine's read bandwidth and other libraries."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from typing import Any

import numba
import numpy as np

import pagedkv

from ...layouts import KV_DTYPES
from ..contest import MOST_SPREAD, NOT_INSTALLED, Call, Contest, contest, interleaved, median, on_host
from ..problem import TOLERANCE, Cell
from ..report import Interrupted, Row
from .peers import COMPILED, FIRST, PACKAGES, SUBJECTS, HostProblem, as_tensor, torch_on

NUM_KV_HEADS = 8
CACHES = ("float32", "bfloat16", "float16", *KV_DTYPES)
SHAPES = ((8, 4096), (1, 16384), (64, 512))
GROUP_SIZES = (1, 4, 8)
FP8_TOLERANCE = 2e-2  # some round q to bfloat16
MOST_RUNS = 3
SUM_BYTES = 2 * 2**30
PREFILL_TOKENS, PREFILL_HEADS = 2048, 32
PREFILLS = (("float32", 1), ("bfloat16", 4))  # with so many query heads of a KV head
QUICK_SHAPE, QUICK_GROUP_SIZE, QUICK_SUM_BYTES = (2, 512), 4, 2**26
SMALL_LENGTH, SMALL_CALLS, SMALL_TURNS = 128, 20, 50
DRAFTS, DRAFTS_LENGTH = 8, 32768
READ = "read"
FIRST_CALL = """
import time, numpy as np, pagedkv
k = np.zeros((4, 16, 8, 128), np.float32)
q, tables, lens = np.zeros((1, 32, 128), np.float32), np.zeros((1, 4), np.int32), np.full(1, 20, np.int32)
starts = np.array([0, 1], np.int32)
begin = time.perf_counter()
if {decode}:
    pagedkv.decode_attention(q, k, k, tables, lens)
else:
    pagedkv.prefill_attention(q, k, k, tables, lens, starts)
print(time.perf_counter() - begin)
"""


@contextmanager
def pinned(num_threads: int) -> Iterator[None]:
    """Pin this thread, and those that it starts, to some cores, and let pagedkv use as many threads.

    What a contestant starts of its own inherits the cores; see peers.py for the number of its threads.
    """
    before, cores = pagedkv.get_num_threads(), None
    if hasattr(os, "sched_setaffinity"):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(cores)[:num_threads])
    pagedkv.set_num_threads(num_threads)
    try:
        yield
    finally:
        pagedkv.set_num_threads(before)
        if cores is not None:
            os.sched_setaffinity(0, cores)


def _reader(num_bytes: int, num_threads: int) -> Call:
    """Make a call that sums `num_bytes` bytes on all threads, to measure the machine's read bandwidth."""

    @numba.njit(nogil=True, fastmath=True)
    def total(values):
        result = np.float32(0)
        for i in range(values.size):
            result += values[i]
        return result

    executor = ThreadPoolExecutor(num_threads)
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), num_threads)
    return lambda: list(executor.map(total, parts))


def decode_cell(cache: str, group_size: int, num_seqs: int, length: int) -> Cell:
    """One token for each of `num_seqs` sequences; q has the cache's dtype, and is float32 over fp8."""
    kv_dtype = next((kind for kind in KV_DTYPES if kind == cache), None)
    heads = group_size * NUM_KV_HEADS, NUM_KV_HEADS
    return Cell("decode", (length,) * num_seqs, *heads, dtype="float32" if kv_dtype else cache, kv_dtype=kv_dtype)


def as_numpy(out: Any) -> Any:
    """Convert the output of a contestant to NumPy."""
    return out if isinstance(out, np.ndarray) else (out.float() if hasattr(out, "float") else out).numpy()


def compare(
    problem: HostProblem, subjects: Mapping[str, Callable[[], Call]], others: Mapping[str, Call], repeats: int
) -> Contest:
    """Time the contestants of a problem in turns with `others`, on the same cores.

    Raises
    ------
    RuntimeError
        pagedkv has no time.
    """
    result = contest(
        subjects,
        others,
        lambda out: problem.error_of(as_numpy(out)),
        FP8_TOLERANCE if problem.cell.kv_dtype else TOLERANCE[problem.cell.dtype],
        repeats,
        most_runs=MOST_RUNS,
    )
    if FIRST in result.notes:
        raise RuntimeError(f"pagedkv has no time in {problem.cell}: {result.notes[FIRST]}")
    return result


def _ms(result: Contest, name: str) -> float | None:
    seconds = result.seconds(name)
    return seconds and seconds * 1e3


def _samples(result: Contest, name: str) -> list[float] | None:
    times = result.times(name)
    return times and [seconds * 1e3 for seconds in times]


def _decode_rows(
    cell: Cell, subjects: Mapping[str, Any], read: Call, read_bytes: int, num_threads: int, repeats: int
) -> tuple[Row, list[Row]]:
    """Measure decode; return a row for pagedkv, and one for each peer."""
    problem = HostProblem(cell)
    made = {name: partial(make, problem, num_threads) for name, make in subjects.items()}
    result = compare(problem, made, {READ: read}, repeats)
    (seconds, read_seconds), num_seqs = (median(result.times(name) or []) for name in (FIRST, READ)), len(problem.q)
    bandwidth, read_bandwidth = cell.num_bytes / seconds / 1e9, read_bytes / read_seconds / 1e9
    shape: Row = {"G": cell.group_size, "B": num_seqs, "L": problem.length}
    row = {
        "decode": cell.kv_kind,
        **shape,
        "ms": seconds * 1e3,
        "spread": result.spread(FIRST),
        "KV GB/s": bandwidth,
        "read GB/s": read_bandwidth,
        "share": bandwidth / read_bandwidth,
        "Mtokens/s": num_seqs * problem.length / seconds / 1e6,
        "SDPA ms": _ms(result, "SDPA"),
        "gather+SDPA ms": _ms(result, "gather + SDPA"),
        "x SDPA": result.over("SDPA", FIRST),
        "x gather": result.over("gather + SDPA", FIRST),
        "runs": result.runs,
        "noisy": "yes" if max(result.spread(name) or 0 for name in result.samples) > MOST_SPREAD else "no",
        "samples ms": _samples(result, FIRST),
        "read samples ms": _samples(result, READ),
    }
    peers: list[Row] = [
        {
            "peer": name,
            "cache": cell.kv_kind,
            **shape,
            "ms": _ms(result, name),
            "spread": result.spread(name),
            f"x {FIRST}": result.over(name, FIRST),
            "error": result.errors.get(name),
            "note": result.notes.get(name),
            "samples ms": _samples(result, name),
        }
        for name in subjects
        if name != FIRST
    ]
    return row, peers


def _prefill_row(
    repeats: int, num_threads: int, num_tokens: int, num_heads: int, dtype: str = "float32", group_size: int = 1
) -> Row:
    """Measure prefill of a whole prompt."""
    heads = num_heads, num_heads // group_size
    cell = Cell("prompt", (num_tokens,), *heads, dtype=dtype, query_lens=(num_tokens,))
    problem = HostProblem(cell)

    def own() -> Call:
        out, (k, v), tables = np.empty_like(problem.q), problem.kv, problem.block_tables
        lens, starts = problem.seq_lens, problem.query_starts
        return lambda: pagedkv.prefill_attention(problem.q, k, v, tables, lens, starts, out=out)

    def sdpa() -> Call:
        torch = torch_on(num_threads)
        k, v = (as_tensor(torch, x) for x in problem.dense())
        q = as_tensor(torch, np.ascontiguousarray(problem.q.swapaxes(0, 1)))[None]
        attention = torch.nn.functional.scaled_dot_product_attention
        return lambda: attention(q, k, v, is_causal=True, enable_gqa=group_size > 1)[0].transpose(0, 1)

    result = compare(problem, {FIRST: own, "SDPA": sdpa}, {}, repeats)
    return {
        "prefill": dtype,
        "heads": num_heads,
        "G": group_size,
        "tokens": num_tokens,
        "ms": _ms(result, FIRST),
        "GFLOP/s": cell.num_flops / median(result.times(FIRST) or []) / 1e9,
        "SDPA ms": _ms(result, "SDPA"),
        "time / SDPA": result.over(FIRST, "SDPA"),
        "note": result.notes.get("SDPA"),
        "samples ms": _samples(result, FIRST),
    }


def _small_call_row(repeats: int) -> Row:
    """Measure the microseconds of a small call: the least mean of SMALL_CALLS calls in a row.

    So few fit in the time that a shared machine leaves a program alone. The first layer of a model has lengths that
    differ from those of the call before; the other layers make the same call again.
    """
    problem = HostProblem(decode_cell("float32", 4, 1, SMALL_LENGTH))
    q, (k, v), tables, lens = problem.q, problem.kv, problem.block_tables, problem.seq_lens
    changing = cycle(lens - np.arange(SMALL_LENGTH // 2, dtype=np.int32)[:, None])
    calls: dict[str, Call] = {
        "us": lambda: [pagedkv.decode_attention(q, k, v, tables, next(changing)) for _ in range(SMALL_CALLS)],
        "again us": lambda: [pagedkv.decode_attention(q, k, v, tables, lens) for _ in range(SMALL_CALLS)],
    }
    samples = interleaved(calls, repeats * SMALL_TURNS, partial(on_host, pause=0))
    least = {name: min(each.seconds for each in of) / SMALL_CALLS * 1e6 for name, of in samples.items()}
    return {"small call": "float32", "G": 4, "L": SMALL_LENGTH, **least}


def _drafts_row(repeats: int) -> Row:
    """Measure verification of a few draft tokens behind a long context, beside decode of one token."""
    cell = Cell("verify", (DRAFTS_LENGTH,), 4 * NUM_KV_HEADS, NUM_KV_HEADS, dtype="bfloat16", query_lens=(DRAFTS,))
    problem = HostProblem(cell)
    q, (k, v), tables, lens = problem.q, problem.kv, problem.block_tables, problem.seq_lens
    out = np.empty_like(q[-1:])
    calls: dict[str, Call] = {
        "decode": lambda: pagedkv.decode_attention(q[-1:], k, v, tables, lens, out=out),
        "drafts": lambda: pagedkv.prefill_attention(q, k, v, tables, lens, problem.query_starts),
    }
    medians = {
        name: median([each.seconds for each in samples]) for name, samples in interleaved(calls, repeats).items()
    }
    return {
        "verification": cell.dtype,
        "G": cell.group_size,
        "tokens": DRAFTS,
        "L": DRAFTS_LENGTH,
        "ms": medians["drafts"] * 1e3,
        "decode ms": medians["decode"] * 1e3,
        "ratio": medians["drafts"] / medians["decode"],
    }


def _first_call_row(operation: str) -> Row:
    """Measure the first call of a process, with nothing compiled, and with kernels kept on disk."""
    command = [sys.executable, "-c", FIRST_CALL.format(decode=operation == "decode")]
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "PAGEDKV_CACHE_DIR": directory}
        cold, cached = (
            float(subprocess.run(command, env=environment, capture_output=True, check=True).stdout) for _ in range(2)
        )
    return {"first call": operation, "cold s": cold, "from disk s": cached}


def _header(num_threads: int) -> Row:
    """Describe the threads, the cores and the versions of installed peers."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    row: Row = {"threads": num_threads, "pinned to": None if cores is None else " ".join(map(str, cores))}
    for package in PACKAGES:
        try:
            row[package] = version(package)
        except PackageNotFoundError:
            continue
    return row


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command line to those of all benches."""
    parser.add_argument(
        "--quick", action="store_true", help="small decode and prefill calls in float32, in seconds once compiled"
    )
    parser.add_argument("--one-thread", action="store_true", help="one core and one thread for all")


def run(
    *,
    repeats: int = 9,
    progress: Callable[[str], Any] = print,
    quick: bool = False,
    one_thread: bool = False,
) -> list[Row]:
    """Measure everything, or with `quick` check that it runs; the first column of a row says what it measures.

    Raises
    ------
    Interrupted
        By Ctrl-C, with the rows of the finished cells.
    """
    num_threads = 1 if one_thread else pagedkv.get_num_threads()
    with pinned(num_threads):
        rows, peers, rest = [], [], []
        try:
            header = _header(num_threads)
            for row, of_peers in _decode(repeats, num_threads, progress, quick):
                rows.append(row)
                peers += of_peers
            if quick:
                rest.append(_prefill_row(repeats, num_threads, num_tokens=128, num_heads=4))
            else:
                progress("prefill, small calls, verification, first call")
                sizes = num_threads, PREFILL_TOKENS, PREFILL_HEADS
                rest += [_prefill_row(max(3, repeats // 2), *sizes, dtype, G) for dtype, G in PREFILLS]
                rest += [_small_call_row(repeats), _drafts_row(repeats)]
                rest += [_first_call_row(operation) for operation in ("decode", "prefill")]
        except KeyboardInterrupt:
            raise Interrupted([header, *rows, *peers, *rest]) from None
    return [header, *rows, *peers, *rest]


def _decode(
    repeats: int, num_threads: int, progress: Callable[[str], Any], quick: bool
) -> Iterator[tuple[Row, list[Row]]]:
    """Measure all decode cells; a peer that is not installed has a row in the first cell only."""
    sum_bytes = QUICK_SUM_BYTES if quick else SUM_BYTES
    read, subjects = _reader(sum_bytes, num_threads), dict(SUBJECTS)
    cells = [decode_cell(cache, G, *shape) for cache in CACHES for G in GROUP_SIZES for shape in SHAPES]
    if quick:
        cells = [decode_cell("float32", QUICK_GROUP_SIZE, *QUICK_SHAPE)]
        subjects = {name: make for name, make in subjects.items() if name not in COMPILED}
    for cell in cells:
        progress(f"decode {cell.kv_kind} G={cell.group_size} (B, L)=({len(cell.seq_lens)}, {cell.seq_lens[0]})")
        row, peers = _decode_rows(cell, subjects, read, sum_bytes, num_threads, repeats)
        for peer in peers:
            if (peer["note"] or "").endswith(NOT_INSTALLED):
                del subjects[peer["peer"]]
        yield row, peers
