"""Bench of prefill_attention on a GPU: its FLOP/s, and its bandwidth for a few tokens over a long context.

Products are counted by `Cell.num_flops`, traffic by `num_bytes`; all else is as in bench decode. *GB/s* and *share*
stand where keys are what takes long: in cells of at most `measure.FEW_TOKENS` query tokens a sequence.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import Any

from ..problem import Cell
from ..report import Interrupted, Row
from . import measure
from .device import COPY_BYTES, QUICK_COPY_BYTES, open_gpu
from .prefill_peers import FIRST, FLASH_ATTENTION_2, SUBJECTS

H100_TFLOPS = 320.0


def _equal_cell(group: str, num_seqs: int, query_len: int, length: int, **sizes: Any) -> Cell:
    return Cell(group, (length,) * num_seqs, query_lens=(query_len,) * num_seqs, **sizes)


def _mixed_cell(chunk: int, cached: int, num_steps: int, length: int, **sizes: Any) -> Cell:
    """A batch of a chunk behind cached tokens and decode steps of sequences of one length."""
    lens, query_lens = (cached + chunk, *(length,) * num_steps), (chunk, *(1,) * num_steps)
    return Cell("mixed", lens, query_lens=query_lens, **sizes)


def cells() -> list[Cell]:
    """All cells by group, the most important groups first."""
    return [
        *(_equal_cell("prompt", 16384 // length, length, length) for length in (1024, 4096, 16384)),
        _equal_cell("prompt", 4, 4096, 4096, dtype="bfloat16"),
        *(
            _equal_cell("verify", num_seqs, n, length)
            for num_seqs, n, length in ((4, 8, 32768), (32, 4, 8192), (1, 16, 131072))
        ),
        _equal_cell("chunk", 1, 2048, 32768),
        _equal_cell("chunk", 4, 512, 8192),
        *(
            _equal_cell("chunk", 1, 512, cached + 512, num_heads=4 * num_kv_heads, num_kv_heads=num_kv_heads)
            for num_kv_heads in (8, 1)
            for cached in (8192, 32768)
        ),
        _mixed_cell(2048, 6144, 64, 4096),
        *(
            _equal_cell("dims", 4, 4096, 4096, head_dim=d, num_heads=h, num_kv_heads=h // 4)
            for d, h in ((64, 32), (256, 16))
        ),
        *(_equal_cell("heads", 4, 4096, 4096, num_kv_heads=num_kv_heads) for num_kv_heads in (32, 2)),
        *(_equal_cell("pages", 4, 4096, 4096, block_size=block_size) for block_size in (1, 256)),
        _equal_cell("full", 4, 4096, 4096, causal=False),
        _equal_cell("fp8", 4, 4096, 4096, kv_dtype="fp8_e4m3"),
        _equal_cell("fp8", 4, 8, 32768, kv_dtype="fp8_e4m3"),
    ]


def quick_cells() -> list[Cell]:
    """A small cell of each kind, to see that everything runs."""
    small = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    return [
        _equal_cell("prompt", 2, 300, 300, **small),
        _equal_cell("verify", 2, 8, 700, **small),
        _equal_cell("chunk", 2, 100, 300, **small),
        _mixed_cell(100, 40, 3, 70, **small),
        _equal_cell("full", 1, 130, 130, causal=False, **small),
        _equal_cell("fp8", 2, 100, 300, kv_dtype="fp8_e4m3", **small),
    ]


GROUPS = tuple(dict.fromkeys(cell.group for cell in cells()))


def targets(rows: Sequence[Row], device: str) -> list[Row]:
    """Compare prefill with its targets, leaving out those that were not measured."""
    prompts = [row for row in rows if row["prefill"] == "prompt" and row["us"] is not None]
    rates = [row["TFLOP/s"] for row in prompts if row["subject"] == FIRST and "H100" in device]
    beside = [row[f"x {FIRST}"] for row in prompts if row["subject"] == FLASH_ATTENTION_2 and row[f"x {FIRST}"]]
    shares = [
        row["share"]
        for row in rows
        if (row["prefill"], row["subject"], row["L"]) == ("verify", FIRST, "32768") and row["share"] is not None
    ]
    return measure.targets_of(
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
    """Measure on the first GPU; `groups` are some of GROUPS, `subjects` of SUBJECTS, and all if None.

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
    rows = [measure.header(gpu, repeats)]
    among = measure.only(groups, quick_cells() if quick else cells())
    try:
        measure.measure_all(gpu, "prefill", among, chosen, FIRST, repeats, progress, rows)
    except KeyboardInterrupt:
        raise Interrupted(rows) from None
    return [*rows, *([] if quick else targets(rows[1:], str(rows[0]["device"])))]


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command line to those of all benches."""
    measure.add_options(parser, GROUPS, SUBJECTS)
