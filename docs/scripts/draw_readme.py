"""The chart of README and the figures in its words: ``python docs/scripts/draw_readme.py`` draws the chart.

Both come from the last runs in docs/figures, as the pages of ``draw_performance.py`` and ``draw_gpu.py`` do. The tests
compare the chart with what this draws, and look in README for what ``figures()`` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from draw_gpu import DECODE, PREFILL, cells, decode_cells, timed
from draw_kernels import ACCENT, GREY, IMAGES, INK, LINE, WHITE, drawing, text, title
from draw_performance import GRID, column, decode_rows, latest, span

AHEAD, BEHIND = "#2f855a", ACCENT
# The same colours on dark pages: a picture follows what the reader prefers.
DARK = {WHITE: "#0d1117", "#ffffff": "#0d1117", INK: "#e6edf3", GREY: "#9da7b1", LINE: "#7d8590", GRID: "#2d333b"}
DARK |= {AHEAD: "#56b982", BEHIND: "#e0823d"}


class Comparison(NamedTuple):
    """How many times as long others take, in every cell that was measured."""

    other: str
    what: str
    times: list[float]


def manager_times(*, decode: bool) -> list[float]:
    """vLLM's memory manager: decode steps, or prompts."""
    rows = [row for row in latest("managers")[1] if row["manager"].startswith("decode step") == decode]
    return [row["vLLM us"] / row["pagedkv us"] for row in rows]


def cpu_times(peer: str) -> list[float]:
    """A peer of `bench cpu`: decode."""
    rows = [row for row in latest("cpu")[1] if row.get("peer") == peer]
    return column(rows, "x pagedkv")


def sdpa_times() -> list[float]:
    """SDPA on the CPU: decode over dense K and V."""
    return [value for rows in decode_rows().values() for value in column(rows, "x SDPA")]


def model_times() -> list[float]:
    """transformers' continuous batching of a small model, over `Engine`."""
    return [row["times"] for row in latest("transformers")[1] if row["transformers"] == "Engine"]


def gpu_decode_times(subject: str) -> list[float]:
    """A peer on the GPU: decode."""
    return [cell[subject]["us"] / cell[DECODE]["us"] for cell in decode_cells() if subject in cell]


def instruction_times(subject: str) -> list[float]:
    """A backend of SDPA on the GPU: prefill, over the instruction that pagedkv takes for the head size."""
    found: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in latest("gpu-speeds")[1]:
        if row["speed"] == "prefill":
            cell = (row["num_seqs"], row["length"], row["head_dim"])
            found.setdefault(cell, {})[row["subject"]] = row["TFLOP/s"]
    return [of["mma" if cell[2] == 64 else "wgmma"] / of[subject] for cell, of in found.items()]


def cudnn_times() -> list[float]:
    """SDPA by cuDNN on the GPU: prefill, in both benches that have it."""
    pairs = [(cell["SDPA"]["us"], cell[PREFILL]["us"]) for cell in cells(timed("gpu-prefill"))]
    return [theirs / ours for theirs, ours in pairs] + instruction_times("SDPA cuDNN")


def comparisons() -> dict[str, dict[str, Comparison]]:
    """The rows of the chart, by machine and by a name for each."""
    return {
        "a CPU": {
            "manager": Comparison("vLLM's memory manager", "decode step", manager_times(decode=True)),
            "SDPA": Comparison("torch SDPA, dense", "decode", sdpa_times()),
            "vLLM": Comparison("vLLM's CPU kernel, paged", "decode", cpu_times("vLLM")),
            "onnxruntime": Comparison("onnxruntime, dense", "decode", cpu_times("onnxruntime")),
            "models": Comparison("transformers' own batching", "small model", model_times()),
        },
        "one H200": {
            "FlashAttention": Comparison("FlashAttention 2 (torch), dense", "prefill", instruction_times("SDPA flash")),
            "Triton": Comparison("our kernel in Triton, paged", "decode", gpu_decode_times("Triton")),
            "SDPA, decode": Comparison("torch SDPA (cuDNN), dense", "decode", gpu_decode_times("SDPA")),
            "SDPA, prefill": Comparison("torch SDPA (cuDNN), dense", "prefill", cudnn_times()),
        },
    }


def figures() -> list[str]:
    """What README says in words, with the figures that belong there."""
    times = {name: span(row.times) for rows in comparisons().values() for name, row in rows.items()}
    prefill = {row["subject"]: row["TFLOP/s"] for row in latest("gpu-speeds")[1] if row.get("length") == 16384}
    decode = max(decode_cells(), key=lambda cell: cell[DECODE]["GB/s"])
    (launch,) = (row for row in latest("gpu-launch")[1] if "launch" in row)
    return [
        f"{times['manager']} times as fast as vLLM's, of a prompt {span(manager_times(decode=False))} times",
        f"{times['SDPA']} times as fast as torch's SDPA",
        f"{times['vLLM']} times as fast as vLLM's CPU kernel",
        f"onnxruntime's takes {times['onnxruntime']} times as long",
        f"{times['models']} times as fast as transformers' own",
        f"{times['FlashAttention']} times as fast as FlashAttention 2",
        f"{times['SDPA, prefill']} times as fast as cuDNN",
        f"{decode[DECODE]['GB/s']:.0f} GB/s, {decode[DECODE]['share']:.2f} of what a kernel that only reads gets",
        f"in Triton {decode['Triton']['GB/s']:.0f}",
        f"SDPA on dense K and V {decode['SDPA']['GB/s']:.0f}",
        f"{prefill['wgmma']:.0f} TFLOP/s, SDPA by cuDNN {prefill['SDPA cuDNN']:.0f}",
        f"{launch['host us']:.1f} us of the host",
    ]


def chart() -> str:
    """How many times as fast pagedkv is as others: a bar for each, from the worst cell to the best, on a log scale."""
    groups, left, wide, top, high = comparisons(), 330, 360, 70, 20
    least, most = 0.5, 64.0
    bottom = top + sum(high * (len(rows) + 1) for rows in groups.values())

    def at(value: float) -> float:
        return round(left + wide * math.log(value / least) / math.log(most / least), 1)

    parts = [
        title(20, 28, "How many times as fast as others pagedkv is"),
        text(20, 47, "solid: the worst case measured; pale: the best", 11, fill=GREY),
        text(at(1) - 6, top - 12, "slower", 11, "end", BEHIND),
        text(at(1) + 6, top - 12, "faster", 11, fill=AHEAD),
    ]
    for tick in (0.5, 1, 2, 4, 8, 16, 32, 64):
        parts += [
            f'<path d="M{at(tick)} {top - 4} V{bottom + 4}" stroke="{INK if tick == 1 else GRID}"/>',
            text(at(tick), bottom + 18, f"{tick:g}", 11, "middle", GREY),
        ]
    y = top
    for machine, rows in groups.items():
        parts.append(text(20, y + 15, f"on {machine}", 12, font_weight="bold"))
        y += high
        for row in rows.values():
            worst, best = min(row.times), max(row.times)
            colour = AHEAD if worst > 0.99 else BEHIND if best < 1 else GREY
            parts += [
                text(left - 96, y + 14, row.other, 12, "end"),
                text(left - 88, y + 14, row.what, 11, fill=GREY),
                bar(at(worst), at(best), y, colour, 0.4),
                bar(at(1), at(min(max(1, worst), best)), y, colour, 1),
                text(at(max(best, 1)) + 6, y + 14, span(row.times), 12),
            ]
            y += high
    return for_the_dark(drawing(bottom + 30, parts))


def bar(start: float, end: float, y: float, colour: str, opacity: float) -> str:
    """A bar between two places, whichever is left."""
    x, width = min(start, end), abs(end - start)
    return f'<rect x="{x:g}" y="{y + 4}" width="{width:g}" height="12" fill="{colour}" opacity="{opacity:g}"/>'


def for_the_dark(svg: str) -> str:
    """The drawing with a style that turns its colours over where the reader prefers dark pages."""
    names = [(name, old, new) for name in ("fill", "stroke") for old, new in DARK.items()]
    rules = " ".join(f'[{name}="{old}"] {{ {name}: {new} }}' for name, old, new in names)
    return svg.replace("<defs>", f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>\n<defs>", 1)


DRAWINGS: dict[str, Callable[[], str]] = {"readme.svg": chart}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
    print(*figures(), sep="\n")
