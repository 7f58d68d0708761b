"""prefill_attention on a GPU: the rate of its products, and for a few tokens over a long context its bandwidth.

Products are counted by `workloads.Cell.num_flops`, traffic by `num_bytes`; all else is as in bench decode. *GB/s* and
*share* stand where keys are what takes long: in cells of at most FEW_TOKENS query tokens a sequence.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...reasons import NOT_INSTALLED
from ...report import Interrupted, Row
from ..frameworks import COPY_BYTES, QUICK_COPY_BYTES, Call, Gpu, open_gpu
from ..results import TOLERANCE, error_of, header, targets_of
from ..timing import READ, contest
from .peers import FIRST, FLASH_ATTENTION_2, SUBJECTS, Problem
from .workloads import GROUPS, Cell, HostProblem, cells, quick_cells

FEW_TOKENS = 16
H100_TFLOPS = 320.0


def measure(
    gpu: Gpu,
    cell: Cell,
    subjects: Mapping[str, Callable[[Problem], Call]],
    repeats: int,
    progress: Callable[[str], Any],
) -> list[Row]:
    """Measure every subject on a cell; returns a row for each.

    A subject that refuses the cell, or disagrees with the CPU backend in the rows that are compared, has the reason in
    its row and no time. Every value of a result must be finite.
    """
    where = f"prefill {cell.group}, B={len(cell.seq_lens)} n={cell.query_length} L={cell.length}"
    progress(where)
    host = HostProblem(cell)
    problem = Problem(gpu, host)

    def error(out: Any) -> float:
        rows = gpu.numpy(out).reshape(host.q.shape)
        return error_of(rows[host.checked], host.expected) if abs(rows).max() < float("inf") else float("inf")

    result = contest(
        gpu,
        {name: partial(subject, problem) for name, subject in subjects.items()},
        error,
        TOLERANCE[cell.dtype],
        repeats,
        lambda name: progress(f"{where}: {name}"),
    )
    first, rows = result.seconds(FIRST), []
    for name in subjects:
        own = result.seconds(name)
        columns = result.columns(name, cell.num_bytes, READ)
        if max(cell.query_lens) > FEW_TOKENS:
            columns |= {"GB/s": None, "share": None}
        rate = {"TFLOP/s": own and cell.num_flops / own / 1e12}
        compared = {f"x {FIRST}": own / first if own and first else None}
        rows.append(_shape(cell) | columns | rate | compared | result.note(name))
    del problem
    gpu.release()
    return rows


def _shape(cell: Cell) -> Row:
    return {
        "prefill": cell.group,
        "B": len(cell.seq_lens),
        "Hq": cell.num_heads,
        "Hkv": cell.num_kv_heads,
        "D": cell.head_dim,
        "n": cell.query_length,
        "L": cell.length,
        "P": cell.block_size,
        "q": cell.dtype,
        "kv": cell.kv_dtype or cell.dtype,
        "causal": "yes" if cell.causal else "no",
    }


def targets(rows: Sequence[Row], device: str) -> list[Row]:
    """The targets of prefill, and whether it reaches them; leaves out what was not measured."""
    prompts = [row for row in rows if row["prefill"] == "prompt" and row["us"] is not None]
    rates = [row["TFLOP/s"] for row in prompts if row["subject"] == FIRST and "H100" in device]
    beside = [row[f"x {FIRST}"] for row in prompts if row["subject"] == FLASH_ATTENTION_2 and row[f"x {FIRST}"]]
    shares = [
        row["share"]
        for row in rows
        if (row["prefill"], row["subject"], row["L"]) == ("verify", FIRST, "32768") and row["share"] is not None
    ]
    return targets_of(
        [
            ("prompt on an H100, best TFLOP/s", ">=", H100_TFLOPS, [max(rates)] if rates else []),
            (f"prompt, least time of {FLASH_ATTENTION_2} over {FIRST}'s", ">=", 0.95, beside),
            ("verify at 32768, share", ">=", 0.80, shares),
        ]
    )


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
        From `workloads.GROUPS`; all if None.
    subjects : sequence of str, optional
        From `peers.SUBJECTS`; all if None.

    Returns
    -------
    list of dict
        Device and versions; a row for each cell and subject, for one that is not installed in the first cell only;
        targets.

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
    try:
        for cell in quick_cells() if quick else cells():
            if groups is not None and cell.group not in groups:
                continue
            rows += measure(gpu, cell, chosen, repeats, progress)
            missing = {row["subject"] for row in rows if (row["note"] or "").endswith(NOT_INSTALLED)}
            chosen = {name: subject for name, subject in chosen.items() if name not in missing}
    except KeyboardInterrupt:
        raise Interrupted([first, *rows]) from None
    return [first, *rows, *([] if quick else targets(rows, str(first["device"])))]


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command line to those of all benches."""
    parser.add_argument("--quick", action="store_true", help="small cells")
    parser.add_argument(
        "--only", nargs="+", choices=GROUPS, dest="groups", metavar="GROUP", help=f"of {', '.join(GROUPS)}"
    )
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, metavar="NAME", help=f"of {', '.join(SUBJECTS)}")
