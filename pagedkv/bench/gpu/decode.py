"""decode_attention on a GPU: bandwidth of our kernels and of peers against that of reading, and costs of a launch.

`samples.sample` documents what is timed, `workloads.Cell.num_bytes` what counts as traffic. Bandwidth is those bytes
over the median time. A kernel that only reads 1 GiB, and a copy of 1 GiB within the device, take turns with the
subjects of each cell; the copy's bandwidth counts reads and writes. A subject's *share* is its own bandwidth over that
of the read.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..reasons import NOT_INSTALLED, reason
from ..report import Interrupted, Row, median
from .frameworks import COPY_BYTES, QUICK_COPY_BYTES, Call, Gpu, open_gpu
from .peers import FIRST, OURS, PEERS, SUBJECTS, Problem
from .results import TOLERANCE, error_of, header, target, targets_of
from .samples import interleaved
from .timing import READ, contest
from .workloads import GROUPS, Cell, HostProblem, cells, only, quick_cells

CALLS_OF_A_GRAPH = 20


def measure(
    gpu: Gpu,
    cell: Cell,
    subjects: Mapping[str, Callable[[Problem], Call]],
    repeats: int,
    progress: Callable[[str], Any],
) -> list[Row]:
    """Measure every subject on a cell; returns a row for each.

    A subject that refuses the cell, or disagrees with the CPU backend, has the reason in its row and no time.
    """
    where = f"decode {cell.group}, B={len(cell.seq_lens)} L={cell.length}"
    progress(where)
    host = HostProblem(cell)
    problem = Problem(gpu, host)
    result = contest(
        gpu,
        {name: partial(subject, problem) for name, subject in subjects.items()},
        lambda out: error_of(gpu.numpy(out), host.expected),
        TOLERANCE[cell.dtype],
        repeats,
        lambda name: progress(f"{where}: {name}"),
    )
    first, rows = result.seconds(FIRST), []
    for name in subjects:
        own = result.seconds(name)
        compared = {f"x {FIRST}": own / first if own and first else None}
        columns = result.columns(name, cell.num_bytes, READ)
        rows.append(_shape(cell) | columns | compared | result.note(name))
    del problem
    gpu.release()
    return rows


def _shape(cell: Cell) -> Row:
    return {
        "decode": cell.group,
        "B": len(cell.seq_lens),
        "Hq": cell.num_heads,
        "Hkv": cell.num_kv_heads,
        "D": cell.head_dim,
        "L": cell.length,
        "P": cell.block_size,
        "q": cell.dtype,
        "kv": cell.kv_dtype or cell.dtype,
    }


def launch_row(gpu: Gpu, name: str, problem: Problem, repeats: int) -> Row:
    """Measure what a launch of one of our kernels costs beside the kernel itself.

    *host us* is the host's time for a call; *call us* is between two events around a call, *replay us* around the
    replay of a graph with one call, *kernel us* around the replay of a graph with 20 calls, over 20. Each follows a
    flush. The problem's K and V must be larger than the GPU's cache, so that all 20 calls find it cold.
    """
    row: Row = {"launch": name, **dict.fromkeys(("host us", "call us", "replay us", "kernel us", "replay adds us"))}
    try:
        call = SUBJECTS[name](problem)
        call()
        one, many = gpu.capture(call, 1), gpu.capture(call, CALLS_OF_A_GRAPH)
        samples = interleaved(gpu, {"call": call, "replay": one, "kernel": many}, repeats)
    except Exception as error:  # as in `measure`
        return row | {"note": reason(error)}
    microseconds = {key: median([each.milliseconds for each in values]) * 1e3 for key, values in samples.items()}
    kernel = microseconds["kernel"] / CALLS_OF_A_GRAPH
    return row | {
        "host us": median([each.host_us for each in samples["call"]]),
        "call us": microseconds["call"],
        "replay us": microseconds["replay"],
        "kernel us": kernel,
        "replay adds us": microseconds["replay"] - kernel,
        "note": None,
    }


def means(rows: Sequence[Row]) -> list[Row]:
    """Geometric means of shares over KernelBench-Hard's five shapes, for subjects timed in all of them."""
    result: list[Row] = []
    of_group = [row for row in rows if row["decode"] == "kernelbench"]
    for name in dict.fromkeys(row["subject"] for row in of_group):
        shares = [row["share"] for row in of_group if row["subject"] == name]
        timed = [share for share in shares if share is not None]
        mean = math.exp(sum(map(math.log, timed)) / len(timed)) if len(timed) == len(shares) else None
        result.append({"geometric mean": "kernelbench", "subject": name, "timed": len(timed), "share": mean})
    return result


def targets(rows: Sequence[Row], launches: Sequence[Row]) -> list[Row]:
    """The targets of `split`, and whether it reaches them; leaves out what was not measured."""
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
    result = targets_of(found)
    if rivals:
        best = min(rivals, key=lambda row: row[f"x {FIRST}"])
        least, where = best[f"x {FIRST}"], " ".join(f"{best[key]}" for key in ("subject", *list(best)[:9]))
        result.append(target(f"least time of a peer over {FIRST}'s", "> 1", least, least > 1, where))
    return result


def run(
    *,
    repeats: int = 9,
    progress: Callable[[str], Any] = print,
    quick: bool = False,
    groups: Sequence[str] | None = None,
    subjects: Sequence[str] | None = None,
) -> list[Row]:
    """Measure on the first GPU.

    Parameters
    ----------
    repeats : int
        Samples of each subject of a cell.
    progress : callable
        Called with what is being measured.
    quick : bool
        A few small cells, to see that everything runs.
    groups : sequence of str, optional
        From `workloads.GROUPS`, and "launch"; all if None.
    subjects : sequence of str, optional
        From `peers.SUBJECTS`; all if None.

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
    first = header(gpu, repeats)
    rows: list[Row] = []
    launches: list[Row] = []
    among = quick_cells() if quick else cells()
    try:
        for cell in only(groups, among):
            rows += measure(gpu, cell, chosen, repeats, progress)
            missing = {row["subject"] for row in rows if (row["note"] or "").endswith(NOT_INSTALLED)}
            chosen = {name: subject for name, subject in chosen.items() if name not in missing}
        if groups is None or "launch" in groups:
            progress("launch")
            problem = Problem(gpu, HostProblem(among[0]))
            launches += [launch_row(gpu, name, problem, repeats) for name in OURS if name in chosen]
    except KeyboardInterrupt:
        raise Interrupted([first, *rows, *means(rows)]) from None
    return [first, *rows, *launches, *means(rows), *([] if quick else targets(rows, launches))]


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command line to those of all benches."""
    parser.add_argument("--quick", action="store_true", help="small cells")
    parser.add_argument(
        "--only", nargs="+", choices=CHOICES, dest="groups", metavar="GROUP", help=f"of {', '.join(CHOICES)}"
    )
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, metavar="NAME", help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--plot", metavar="PATH", help="also draw bandwidth over length, as PNG")


CHOICES = (*GROUPS, "launch")
