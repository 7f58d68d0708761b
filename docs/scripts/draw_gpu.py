"""The chart and the tables of performance.md that were measured on a GPU: ``python docs/scripts/draw_gpu.py``.

They are of the last files by name of docs/figures/gpu-*.json, each of which is what a step of ``.ci/gpu second`` has
printed. The tests compare the chart and the page with what this writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from draw_kernels import ACCENT, COLOURS, GREY, IMAGES, INK, WHITE, box, drawing, text, title
from draw_performance import DOCS, axis, dot, latest, short, table, with_tables

PAGES = (DOCS / "performance.md",)
TABLE = re.compile(r"(<!-- (\w+): written by draw_gpu.py -->\n).*?(<!-- end -->)", re.DOTALL)
DECODE, PREFILL = "split NHD", "prefill NHD"  # what the times of others are put over
# By what `bench decode` calls them: what the pages call them, and how the chart draws them. Of the two forms of SDPA it
# is the one that people call.
PEERS = {
    "SDPA": ("SDPA, dense", ACCENT),
    "Triton": ("Triton, paged", WHITE),
    "FlexAttention": ("FlexAttention, dense", INK),
    "cuDNN": ("cuDNN, paged", COLOURS[0]),
    "FlashInfer": ("FlashInfer", COLOURS[1]),
    "FlashInfer fa2": ("FlashInfer fa2", "#7fbf8c"),
    "FlashInfer fa3": ("FlashInfer fa3", "#3f8f55"),
    "FlashInfer XQA": ("FlashInfer XQA", "#1f5f33"),
    "FlashAttention 2": ("FlashAttention 2", COLOURS[3]),
    "FlashAttention 3": ("FlashAttention 3", "#a45fc0"),
    "vLLM Triton": ("vLLM, Triton", GREY),
}
LEGEND = 4  # peers in a line

Row = dict[str, Any]


def timed(*benches: str) -> list[Row]:
    """The rows of cells in the last runs of benches; without those that have no time."""
    rows = [row for bench in benches for row in latest(bench)[1]]
    return [row for row in rows if row.get("us") and "subject" in row]


def cell_of(row: Row) -> tuple[Any, ...]:
    """What says which cell a row is of."""
    return tuple(row.get(name) for name in ("B", "Hq", "Hkv", "D", "n", "L", "P", "q", "kv", "causal"))


def cells(rows: list[Row]) -> list[dict[str, Row]]:
    """The rows of each cell, by subject."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(cell_of(row), {}).setdefault(row["subject"], row)
    return list(found.values())


def decode_cells() -> list[dict[str, Row]]:
    rows = timed("gpu-decode", "gpu-peers", "gpu-compiled")
    return [cell for cell in cells(rows) if DECODE in cell]


def peers() -> dict[str, tuple[str, str]]:
    """Those of PEERS that were timed in a cell."""
    timed_in = {subject for cell in decode_cells() for subject in cell}
    return {subject: how for subject, how in PEERS.items() if subject in timed_in}


def gpu() -> str:
    """The GPU, and with what the figures were taken."""
    it, (head, *_) = latest("gpu-decode")
    names = {"torch": head["torch"], "Triton": head["triton"], "NumPy": it["numpy"], "numba": it["numba"]}
    return (
        f"{it['date']}: an {head['device']}, driver {head['driver']}, CUDA {head['CUDA']}, Python {it['python']}, "
        f"{', '.join(f'{name} {version}' for name, version in names.items())}. A kernel that only reads 1 GiB "
        f"does so at {head['read GB/s']:.0f} GB/s.\n"
    )


def times(cell: dict[str, Row], subject: str, own: str) -> str:
    """How many times as long a subject takes."""
    return f"{cell[subject]['us'] / cell[own]['us']:.2f}" if subject in cell else "-"


def decode() -> str:
    """Decode: time, bandwidth, and how many times as long others take."""
    lines, others = [], peers()
    for cell in decode_cells():
        row = cell[DECODE]
        lines.append(
            [f"{row['B']} x {row['L']}", f"{row['Hq']} / {row['Hkv']}", str(row["D"]), row["kv"]]
            + [short(row["us"]), f"{row['GB/s']:.0f}", f"{row['share']:.2f}"]
            + [times(cell, subject, DECODE) for subject in others]
        )
    # Older runs have no read of the same bytes: their share is that of a read of 1 GiB.
    read = "a read of the same bytes" if all("read us" in row for row in timed("gpu-decode")) else "a read"
    header = ["B x L", "heads", "D", "cache", "us", "GB/s", f"share of {read}"]
    return table([*header, *(f"{name}, times" for name, _ in others.values())], lines)


def prefill() -> str:
    """Prefill beside SDPA, which picks its backend and has as few KV heads: FLOP/s, and the times of SDPA."""
    lines = []
    for cell in cells(timed("gpu-prefill")):
        row = cell[PREFILL]
        what = [f"{row['B']} x {row['n']}", str(row["D"]), row["kv"], short(row["us"])]
        rates = [f"{cell[subject]['TFLOP/s']:.0f}" for subject in (PREFILL, "SDPA")]
        lines.append([*what, *rates, times(cell, "SDPA", PREFILL)])
    return table(["B x L", "D", "cache", "us", "TFLOP/s", "SDPA, TFLOP/s", "SDPA, times"], lines)


def instructions() -> str:
    """FLOP/s of prefill with either instruction, and of two backends of SDPA, which have 32 KV heads."""
    found: dict[str, dict[str, float]] = {}
    for row in latest("gpu-speeds")[1]:
        if row["speed"] == "prefill":
            cell = f"{row['num_seqs']} x {row['length']}, D {row['head_dim']}, {row['kind']}"
            found.setdefault(cell, {})[row["subject"]] = row["TFLOP/s"]
    subjects = ("mma", "wgmma", "SDPA flash", "SDPA cuDNN")
    return table(
        ["B x L", *subjects], [[cell, *(f"{of[name]:.0f}" for name in subjects)] for cell, of in found.items()]
    )


def launch() -> str:
    """What a call costs besides its kernel."""
    (row,) = (row for row in latest("gpu-launch")[1] if "launch" in row)
    names = ("host us", "call us", "replay us", "kernel us", "replay adds us")
    return table(list(names), [[f"{row[name]:.1f}" for name in names]])


TABLES: dict[str, Callable[[], str]] = {
    "gpu": gpu,
    "gpu_decode": decode,
    "gpu_prefill": prefill,
    "gpu_instructions": instructions,
    "gpu_launch": launch,
}


def chart() -> str:
    """Decode on the GPU: the bandwidth of pagedkv as bars, that of others as dots."""
    found, others = decode_cells(), peers()
    left, wide, high = 190, 500, 19
    top = 84 + high * ((len(others) - 1) // LEGEND)
    head = latest("gpu-decode")[1][0]
    most = 1000 * -(-head["read GB/s"] // 1000)
    bottom = top + high * len(found)

    def at(value: float) -> float:
        return left + wide * value / most

    parts = [title(20, 28, f"Decode on an {head['device']}: GB/s of K and V"), box(20, 40, 12, 10, COLOURS[2])]
    parts.append(text(38, 49, "pagedkv, paged", 11, fill=GREY))
    for i, (name, fill) in enumerate(others.values()):
        x, y = 150 + 150 * (i % LEGEND), 45 + high * (i // LEGEND)
        parts += [dot(x, y, fill), text(x + 10, y + 4, name, 11, fill=GREY)]
    parts += axis(
        left, wide, top - 8, bottom + 6, [most * i / 5 for i in range(6)], "GB/s; dashed: a kernel that only reads"
    )
    reads = at(head["read GB/s"])
    parts.append(f'<path d="M{reads:.4g} {top - 8} V{bottom + 6}" stroke="{INK}" stroke-dasharray="3 3"/>')
    for i, cell in enumerate(found):
        row, y = cell[DECODE], top + high * i
        words = f"{row['B']} x {row['L']}, {row['kv']}, G {row['Hq'] // row['Hkv']}"
        parts.append(text(left - 6, y + 13, words, 11, "end", GREY))
        parts.append(box(left, y + 2, round(at(row["GB/s"]) - left, 1), high - 4, COLOURS[2]))
        for subject, (_, fill) in others.items():
            if subject in cell:
                parts.append(dot(at(cell[subject]["GB/s"]), y + high / 2, fill))
    return drawing(bottom + 58, parts)


DRAWINGS: dict[str, Callable[[], str]] = {"gpu.svg": chart}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), TABLE, TABLES), encoding="utf-8")
