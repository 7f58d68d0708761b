"""Decode, prefill and small calls on the CPU against the machine's read bandwidth and other libraries, in one run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from typing import Any
from unittest.mock import patch

import numba
import numpy as np

import pagedkv

from ...cpu.attention import decode
from ..reasons import NOT_INSTALLED
from ..report import Interrupted, Row, median, spread
from .peers import COMPILED, FIRST, PACKAGES, SUBJECTS, as_tensor, torch_on
from .pinning import pinned
from .problem import DTYPES, HEAD_DIM, NUM_KV_HEADS, TOLERANCE, Problem, random_pages
from .timing import MOST_SPREAD, Call, Contest, contest, interleaved

SHAPES = ((8, 4096), (1, 16384), (64, 512))
GROUP_SIZES = (1, 4, 8)
SUM_BYTES = 2 * 2**30
PREFILL_TOKENS, PREFILL_HEADS = 2048, 32
PREFILLS = (("float32", 1), ("bfloat16", 4))  # with so many query heads of a KV head
GROWTH_LENGTHS = (4096, 16384)
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


def _reader(num_bytes: int, num_threads: int) -> Call:
    """A plain sum over so many bytes on all threads, to measure the machine's read bandwidth."""

    @numba.njit(nogil=True, fastmath=True)
    def total(values):
        result = np.float32(0)
        for i in range(values.size):
            result += values[i]
        return result

    executor = ThreadPoolExecutor(num_threads)
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), num_threads)
    return lambda: list(executor.map(total, parts))


def as_numpy(out: Any) -> Any:
    """The output of a contestant."""
    return out if isinstance(out, np.ndarray) else (out.float() if hasattr(out, "float") else out).numpy()


def _over(result: Contest, name: str, other: str) -> float | None:
    """How many times as long `name` takes as `other`."""
    one, two = result.median(name), result.median(other)
    return one / two if one and two else None


def _milliseconds(result: Contest, name: str) -> float | None:
    seconds = result.median(name)
    return seconds and seconds * 1e3


def _samples(result: Contest, name: str) -> list[float] | None:
    return [x * 1e3 for x in result.seconds[name]] if name in result.seconds else None


def _decode_rows(
    problem: Problem, subjects: Mapping[str, Any], read: Call, read_bytes: int, num_threads: int, repeats: int
) -> tuple[Row, list[Row]]:
    """The row of pagedkv, and one for each peer."""
    result = contest(
        {name: partial(make, problem, num_threads) for name, make in subjects.items()},
        {READ: read},
        lambda out: problem.error_of(as_numpy(out)),
        TOLERANCE[problem.dtype],
        repeats,
    )
    seconds, read_seconds = result.median(FIRST), result.median(READ)
    if seconds is None or read_seconds is None:
        raise RuntimeError(f"pagedkv has no time in {_name(problem)}: {result.notes.get(FIRST)}")
    bandwidth, read_bandwidth = problem.pages.nbytes / seconds / 1e9, read_bytes / read_seconds / 1e9
    cell: Row = {"G": problem.group_size, "B": problem.num_seqs, "L": problem.length}
    row = {
        "decode": problem.dtype,
        **cell,
        "ms": seconds * 1e3,
        "spread": spread(result.seconds[FIRST]),
        "KV GB/s": bandwidth,
        "read GB/s": read_bandwidth,
        "share": bandwidth / read_bandwidth,
        "Mtokens/s": problem.num_seqs * problem.length / seconds / 1e6,
        "SDPA ms": _milliseconds(result, "SDPA"),
        "gather+SDPA ms": _milliseconds(result, "gather + SDPA"),
        "x SDPA": _over(result, "SDPA", FIRST),
        "x gather": _over(result, "gather + SDPA", FIRST),
        "runs": result.runs,
        "noisy": "yes" if result.spread > MOST_SPREAD else "no",
        "samples ms": _samples(result, FIRST),
        "read samples ms": _samples(result, READ),
    }
    peers: list[Row] = [
        {
            "peer": name,
            "cache": problem.dtype,
            **cell,
            "ms": _milliseconds(result, name),
            "spread": spread(result.seconds[name]) if name in result.seconds else None,
            f"x {FIRST}": _over(result, name, FIRST),
            "error": result.errors.get(name),
            "note": result.notes.get(name),
            "samples ms": _samples(result, name),
        }
        for name in subjects
        if name != FIRST
    ]
    return row, peers


def _name(problem: Problem) -> str:
    return f"decode {problem.dtype} G={problem.group_size} (B, L)=({problem.num_seqs}, {problem.length})"


def _prefill_row(
    repeats: int, num_threads: int, num_tokens: int, num_heads: int, dtype: str = "float32", group_size: int = 1
) -> Row:
    num_kv_heads = num_heads // group_size
    pages = random_pages(dtype, num_tokens, num_kv_heads)
    tables = np.random.default_rng(1).permutation(pages.shape[1]).astype(np.int32)[None]
    q = np.random.default_rng(2).standard_normal((num_tokens, num_heads, HEAD_DIM), np.float32).astype(DTYPES[dtype])
    out = np.empty_like(q)
    lens, starts = np.full(1, num_tokens, np.int32), np.array([0, num_tokens], np.int32)
    # The last token sees all of them.
    last = pagedkv.reference.decode_attention(q[-1:], pages[0], pages[1], tables, lens).astype(np.float32)

    def own() -> Call:
        return lambda: pagedkv.prefill_attention(q, pages[0], pages[1], tables, lens, starts, out=out)

    def sdpa() -> Call:
        torch = torch_on(num_threads)
        by_token = (x.reshape(num_tokens, -1, HEAD_DIM) for x in (q, pages[0][tables[0]], pages[1][tables[0]]))
        dense = [as_tensor(torch, np.ascontiguousarray(x.swapaxes(0, 1)))[None] for x in by_token]
        attention = torch.nn.functional.scaled_dot_product_attention
        return lambda: attention(*dense, is_causal=True, enable_gqa=group_size > 1)[0].transpose(0, 1)

    def error_of(result: Any) -> float:
        return float(np.abs(as_numpy(result)[-1:] - last).max() / np.abs(last).max())

    result = contest({FIRST: own, "SDPA": sdpa}, {}, error_of, TOLERANCE[dtype], repeats)
    if FIRST in result.notes:
        raise RuntimeError(f"pagedkv has no time in prefill: {result.notes[FIRST]}")
    flops = 2 * num_tokens * (num_tokens + 1) * HEAD_DIM * num_heads
    return {
        "prefill": dtype,
        "heads": num_heads,
        "G": group_size,
        "tokens": num_tokens,
        "ms": _milliseconds(result, FIRST),
        "GFLOP/s": flops / median(result.seconds[FIRST]) / 1e9,
        "SDPA ms": _milliseconds(result, "SDPA"),
        "time / SDPA": _over(result, FIRST, "SDPA"),
        "note": result.notes.get("SDPA"),
        "samples ms": _samples(result, FIRST),
    }


def _small_call_row(repeats: int) -> Row:
    """Microseconds of a small call, and of one whose kernel is left out: the least mean of SMALL_CALLS in a row.

    So few fit in the time that a shared machine leaves a program alone. The first layer of a model has lengths that
    differ from those of the call before; the other layers make the same call again.
    """
    problem = Problem("float32", 4, 1, SMALL_LENGTH)
    (k, v), q, tables = problem.pages, problem.q, problem.block_tables
    lens = cycle(problem.seq_lens - np.arange(SMALL_LENGTH // 2, dtype=np.int32)[:, None])
    calls: dict[str, Call] = {
        "us": lambda: pagedkv.decode_attention(q, k, v, tables, next(lens)),
        "again us": lambda: pagedkv.decode_attention(q, k, v, tables, problem.seq_lens),
    }

    def least() -> dict[str, float]:
        seconds = interleaved({name: partial(_repeat, calls[name]) for name in calls}, repeats * SMALL_TURNS, pause=0)
        return {name: min(seconds[name]) / SMALL_CALLS * 1e6 for name in calls}

    row: Row = {"small call": "float32", "G": 4, "L": SMALL_LENGTH, **least()}
    with patch.object(decode, "run", lambda *args, **options: None):
        return row | {f"without kernel {name}": value for name, value in least().items()}


def _repeat(call: Callable[[], Any]) -> None:
    for _ in range(SMALL_CALLS):
        call()


def _drafts_row(repeats: int) -> Row:
    """Verification of a few tokens behind a long context, beside the decode of one."""
    problem = Problem("bfloat16", 4, 1, DRAFTS_LENGTH)
    q, starts = np.resize(problem.q, (DRAFTS, *problem.q.shape[1:])), np.array([0, DRAFTS], np.int32)
    (k, v), tables, lens = problem.pages, problem.block_tables, problem.seq_lens
    calls: dict[str, Call] = {
        "decode": SUBJECTS[FIRST](problem, 1),
        "drafts": lambda: pagedkv.prefill_attention(q, k, v, tables, lens, starts),
    }
    medians = {name: median(values) for name, values in interleaved(calls, repeats).items()}
    return {
        "verification": problem.dtype,
        "G": problem.group_size,
        "tokens": DRAFTS,
        "L": DRAFTS_LENGTH,
        "ms": medians["drafts"] * 1e3,
        "decode ms": medians["decode"] * 1e3,
        "ratio": medians["drafts"] / medians["decode"],
    }


def _growth_row(repeats: int) -> Row:
    calls: dict[str, Callable[[], Any]] = {}
    for length in GROWTH_LENGTHS:
        pages = random_pages("float32", length)
        tables = np.random.default_rng(1).permutation(pages.shape[1]).astype(np.int32)[None]
        q = np.zeros((1, NUM_KV_HEADS, HEAD_DIM), np.float32)
        arguments = (q, pages[0], pages[1], tables, np.full(1, length, np.int32))
        calls[f"L {length} ms"] = partial(pagedkv.decode_attention, *arguments)
    medians = {name: median(values) * 1e3 for name, values in interleaved(calls, repeats * 3).items()}
    short, long = medians.values()
    return {"growth": "float32", **medians, "ratio": long / short}


def _first_call_row(operation: str) -> Row:
    """Seconds of a process' first call, with nothing compiled, then with the kernels that it kept on disk."""
    program = FIRST_CALL.format(decode=operation == "decode")
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "PAGEDKV_CACHE_DIR": directory}
        cold, cached = (
            float(
                subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout
            )
            for _ in range(2)
        )
    return {"first call": operation, "cold s": cold, "from disk s": cached}


def _header(num_threads: int) -> Row:
    """The threads, the cores and the versions of the peers that are installed."""
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
    dtypes: tuple[str, ...] = tuple(DTYPES),
    progress: Callable[[str], Any] = print,
    quick: bool = False,
    one_thread: bool = False,
) -> list[Row]:
    """Measure everything, or with `quick` see that it runs; a row's first column says what it measures.

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
            for row, of_peers in _decode(repeats, dtypes, num_threads, progress, quick):
                rows.append(row)
                peers += of_peers
            if quick:
                rest.append(_prefill_row(repeats, num_threads, num_tokens=128, num_heads=4))
            else:
                progress("prefill, small calls, verification, growth, first call")
                sizes = num_threads, PREFILL_TOKENS, PREFILL_HEADS
                rest += [_prefill_row(max(3, repeats // 2), *sizes, dtype, G) for dtype, G in PREFILLS]
                rest += [_small_call_row(repeats), _drafts_row(repeats), _growth_row(repeats)]
                rest += [_first_call_row(operation) for operation in ("decode", "prefill")]
        except KeyboardInterrupt:
            raise Interrupted([header, *rows, *peers, *rest]) from None
    return [header, *rows, *peers, *rest]


def _decode(
    repeats: int, dtypes: tuple[str, ...], num_threads: int, progress: Callable[[str], Any], quick: bool
) -> Iterator[tuple[Row, list[Row]]]:
    """The rows of each cell; a peer that is not installed has one in the first."""
    sum_bytes = QUICK_SUM_BYTES if quick else SUM_BYTES
    read, subjects = _reader(sum_bytes, num_threads), dict(SUBJECTS)
    cells = [(dtype, G, shape) for dtype in dtypes for G in GROUP_SIZES for shape in SHAPES]
    if quick:
        cells = [("float32", QUICK_GROUP_SIZE, QUICK_SHAPE)]
        subjects = {name: make for name, make in subjects.items() if name not in COMPILED}
    for dtype, group_size, shape in cells:
        problem = Problem(dtype, group_size, *shape)
        progress(_name(problem))
        row, peers = _decode_rows(problem, subjects, read, sum_bytes, num_threads, repeats)
        for peer in peers:
            if (peer["note"] or "").endswith(NOT_INSTALLED):
                del subjects[peer["peer"]]
        yield row, peers
