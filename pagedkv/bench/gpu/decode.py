"""Bench of decode_attention on a GPU: bandwidth of our kernels and of peers, and the cost of a launch.

`measure.sample` says what is timed, `Cell.num_bytes` what counts as traffic. Bandwidth is those bytes over the median
time. An empty launch and a kernel that only reads as many bytes take turns with the subjects of each cell. A subject's
*share* is the time of that read over its own.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..contest import interleaved, median, reason
from ..problem import BenchProblem, Cell
from ..report import Interrupted, Row
from . import measure
from .arrays import GpuProblem
from .decode_peers import FIRST, OURS, PEERS, SUBJECTS
from .device import COPY_BYTES, QUICK_COPY_BYTES, Gpu, open_gpu

CALLS_OF_A_GRAPH = 20
# (B, Hq, Hkv, D, L, P) of KernelBench-Hard's problem 03_paged_attention, which is bfloat16.
KERNELBENCH = (
    (8, 32, 8, 128, 1024, 16),
    (32, 32, 8, 128, 2048, 16),
    (4, 64, 8, 128, 4096, 16),
    (16, 32, 8, 128, 1535, 16),
    (8, 16, 4, 64, 2000, 16),
)


def _draw_lengths(num_seqs: int, longest: int) -> tuple[int, ...]:
    """Draw log-uniform lengths, the same at every call."""
    logarithms = np.random.default_rng(5).uniform(0, math.log(longest), num_seqs)
    return tuple(int(math.exp(x)) for x in logarithms)


def cells() -> list[Cell]:
    """All cells by group, the most important groups first."""
    return [
        *(Cell("headline", (length,) * 32) for length in (2048, 8192)),
        *(Cell("kernelbench", (n,) * b, h, hkv, d, p, "bfloat16") for b, h, hkv, d, n, p in KERNELBENCH),
        *(Cell("pages", (2048,) * 32, block_size=block_size) for block_size in (1, 16, 256)),
        *(Cell("heads", (2048,) * 32, num_kv_heads=num_kv_heads) for num_kv_heads in (32, 4, 2)),
        *(Cell("lengths", (2**n,) * 8) for n in range(7, 18, 2)),
        *(Cell("one", (length,)) for length in (1024, 8192, 131072)),
        *(
            Cell("serving", (1024 << n,) * num_seqs, dtype="bfloat16", kv_dtype=kv)
            for kv in (None, "fp8_e4m3")
            for num_seqs in (1, 8)
            for n in range(6)
        ),
        Cell("ragged", (*(1,) * 16, 100_000, *(1,) * 15)),
        Cell("ragged", _draw_lengths(32, 16384)),
        *(Cell("fp8", (length,) * 32, kv_dtype=kv) for kv in ("fp8_e4m3", "fp8_e5m2") for length in (2048, 8192)),
    ]


def quick_cells() -> list[Cell]:
    """A small cell of each kind, to see that everything runs."""
    return [
        Cell("lengths", (200,) * 4),
        Cell("lengths", (600,) * 4),
        Cell("ragged", (1, 700, 33, 1), 8, 2, 64),
        Cell("fp8", (200,) * 4, kv_dtype="fp8_e4m3"),
    ]


GROUPS = (*dict.fromkeys(cell.group for cell in cells()), "launch")


def launch_row(gpu: Gpu, name: str, problem: GpuProblem, repeats: int) -> Row:
    """Measure the cost of launching one of our kernels, beside the time of the kernel itself.

    *host us* and the columns beside it are the host's time for a call; *call us* is between two events around a call,
    *replay us* around the replay of a graph with one call, *kernel us* around the replay of a graph with 20 calls, over
    20. Each follows a flush. The problem's K and V must be larger than the GPU's cache, so that all 20 calls find it
    cold.
    """
    names = ("call us", "replay us", "kernel us", "replay adds us")
    row: Row = {"launch": name, **measure.host_columns([]), **dict.fromkeys(names)}
    try:
        call = SUBJECTS[name](problem)
        call()
        one, many = gpu.capture(call, 1), gpu.capture(call, CALLS_OF_A_GRAPH)
        samples = interleaved({"call": call, "replay": one, "kernel": many}, repeats, measure.on_gpu(gpu))
    except Exception as error:  # as in a contest
        return row | {"note": reason(error)}
    microseconds = {key: median([each.seconds for each in values]) * 1e6 for key, values in samples.items()}
    kernel = microseconds["kernel"] / CALLS_OF_A_GRAPH
    return row | {
        **measure.host_columns(samples["call"]),
        "call us": microseconds["call"],
        "replay us": microseconds["replay"],
        "kernel us": kernel,
        "replay adds us": microseconds["replay"] - kernel,
        "note": None,
    }


def means(rows: Sequence[Row]) -> list[Row]:
    """Geometric means of bandwidth shares over KernelBench-Hard's five shapes, for subjects timed in all of them."""
    result: list[Row] = []
    of_group = [row for row in rows if row["decode"] == "kernelbench"]
    for name in dict.fromkeys(row["subject"] for row in of_group):
        shares = [row["share"] for row in of_group if row["subject"] == name]
        timed = [share for share in shares if share is not None]
        mean = math.exp(sum(map(math.log, timed)) / len(timed)) if len(timed) == len(shares) else None
        result.append({"geometric mean": "kernelbench", "subject": name, "timed": len(timed), "share": mean})
    return result


def targets(rows: Sequence[Row], launches: Sequence[Row]) -> list[Row]:
    """Compare `split` with its targets, leaving out those that were not measured."""
    own = [row for row in rows if row["subject"] == FIRST and row["us"] is not None]
    rivals = [row for row in rows if row["subject"] in PEERS and row[f"x {FIRST}"] is not None]
    pages = {row["P"]: row["us"] for row in own if row["decode"] == "pages"}
    mean = [row["share"] for row in means(rows) if row["subject"] == FIRST and row["share"] is not None]
    launch = [row for row in launches if row["launch"] == FIRST and row["note"] is None]
    found = [
        ("headline, least share", ">=", 0.92, [row["share"] for row in own if row["decode"] == "headline"]),
        ("kernelbench, geometric mean of shares", ">=", 0.80, mean),
        ("time of P = 1 over P = 16", "<=", 1.10, [pages[1] / pages[16]] if {1, 16} <= set(pages) else []),
        ("host us of a call", "<=", 15.0, [row["host us"] for row in launch]),
        ("us that a replay adds", "<=", 3.0, [row["replay adds us"] for row in launch]),
    ]
    result = measure.targets_of(found)
    if rivals:
        best = min(rivals, key=lambda row: row[f"x {FIRST}"])
        least, where = best[f"x {FIRST}"], " ".join(f"{best[key]}" for key in ("subject", *list(best)[:9]))
        result.append(measure.target(f"least time of a peer over {FIRST}'s", "> 1", least, least > 1, where))
    return result


def run(
    *,
    repeats: int = 9,
    progress: Callable[[str], Any] = print,
    quick: bool = False,
    groups: Sequence[str] | None = None,
    subjects: Sequence[str] | None = None,
) -> list[Row]:
    """Measure on the first GPU; `groups` are some of GROUPS, `subjects` of SUBJECTS, and all if None.

    Returns
    -------
    list of dict
        Device and versions; a row for each cell and subject, for one that is not installed in the first cell only;
        launches; geometric means; targets.

    Raises
    ------
    BackendUnavailableError
        There is no GPU, or a package that it needs is missing.
    Interrupted
        By Ctrl-C, with the rows of the finished cells.
    """
    gpu = open_gpu(QUICK_COPY_BYTES if quick else COPY_BYTES)
    chosen = {name: SUBJECTS[name] for name in SUBJECTS if subjects is None or name in subjects}
    progress("read, copy")
    rows, launches = [measure.header(gpu, repeats)], []
    among = quick_cells() if quick else cells()
    try:
        measure.measure_all(gpu, "decode", measure.only(groups, among), chosen, FIRST, repeats, progress, rows)
        if groups is None or "launch" in groups:
            progress("launch")
            problem = GpuProblem(gpu, BenchProblem(among[0]))
            launches += [launch_row(gpu, name, problem, repeats) for name in OURS if name in chosen]
    except KeyboardInterrupt:
        raise Interrupted([*rows, *means(rows[1:])]) from None
    return [*rows, *launches, *means(rows[1:]), *([] if quick else targets(rows[1:], launches))]


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command line to those of all benches."""
    measure.add_options(parser, GROUPS, SUBJECTS)
    parser.add_argument(
        "--plot",
        nargs="?",
        const="decode.png",
        metavar="PATH",
        help="also draw bandwidth over length, as PNG (without a path: decode.png)",
    )
