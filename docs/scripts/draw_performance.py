"""Chart and tables of performance.md, and the targets in machine-code.md: ``python docs/scripts/draw_performance.py``.

It writes them from docs/figures, and from the record of tests/machine_code. To publish a new run, put its JSON
(``python -m pagedkv bench ... --json``) beside the others, named by its date, and run this: of each bench the last file
by name counts. The tests compare the chart and the pages with what this writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draw_kernels import ACCENT, COLOURS, GREY, IMAGES, INK, LINE, WHITE, box, drawing, text, title

DOCS = Path(__file__).parents[1]
COUNTS = DOCS.parent / "tests" / "machine_code" / "record.json"
PAGES = (DOCS / "performance.md", DOCS / "development" / "machine-code.md")
GRID = "#e2e6eb"
TABLE = re.compile(r"(<!-- (\w+): written by draw_performance.py -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]

# The left column of targets, what each one counts, and those where the limit is the least and not the most.
TARGETS = {
    "spill B": ("v1, v2", "bytes spilled or on the stack"),
    "stack B": ("v1, v2", "bytes spilled or on the stack"),
    "K sectors": ("v1, v2", "sectors of K, over the fewest"),
    "V sectors": ("v1, v2", "sectors of V, over the fewest"),
    "K load B": ("v1, v2", "bytes of a load of K"),
    "split: spill B": ("split", "bytes spilled or on the stack"),
    "split: stack B": ("split", "bytes spilled or on the stack"),
    "split: KV sectors": ("split", "sectors of K and V, over the fewest"),
    "split: wavefronts": ("split", "passes over shared memory, over the fewest"),
    "split: thread blocks on a multiprocessor": ("split", "thread blocks on a multiprocessor"),
    "split: loop": ("split", "instructions in the loop"),
    "split: all, int8": ("split", "instructions in all, int8, D 128"),
    "split: all, 16 bits, G 1 to 16": ("split", "instructions in all, 16 bits, G 1 to 16"),
    "split: KV in flight KiB": ("split", "KiB in flight on a multiprocessor"),
    "split: short splits, all, 16 bits, G 1 to 16": ("split", "the same, with short splits"),
    "split: partials": ("split", "bytes of partial results, over K and V"),
    "split: short splits, partials": ("split", "the same, with short splits"),
    "prefill: spill B": ("prefill", "bytes spilled or on the stack"),
    "prefill: stack B": ("prefill", "bytes spilled or on the stack"),
    "prefill: thread blocks on a multiprocessor, D 128": ("prefill", "thread blocks on a multiprocessor, D 128"),
    "prefill: other instructions per mma, D 64": ("prefill", "other instructions for each mma, D 64"),
    "prefill: ldmatrix per mma, D 64": ("prefill", "ldmatrix for each mma, D 64"),
    "prefill: other instructions per mma, D 128": ("prefill", "other instructions for each mma, D 128"),
    "prefill: ldmatrix per mma, D 128": ("prefill", "ldmatrix for each mma, D 128"),
    "prefill: other instructions per mma, D 256": ("prefill", "other instructions for each mma, D 256"),
    "prefill: ldmatrix per mma, D 256": ("prefill", "ldmatrix for each mma, D 256"),
    "prefill: other instructions per mma, fp8, more": ("prefill", "more other instructions for each mma in fp8"),
    "prefill: wavefronts": ("prefill", "passes over shared memory, over the fewest"),
    "prefill: KV sectors": ("prefill", "sectors of K and V, over the fewest"),
    "prefill_split: spill B": ("prefill, few rows", "bytes spilled or on the stack"),
    "prefill_split: stack B": ("prefill, few rows", "bytes spilled or on the stack"),
    "prefill_split: loop, D 64 and 128": ("prefill, few rows", "instructions in the loop, D 64 and 128"),
    "prefill_split: wavefronts": ("prefill, few rows", "passes over shared memory, over the fewest"),
    "prefill_split: KV sectors": ("prefill, few rows", "sectors of K and V, over the fewest"),
    "prefill_split: partials": ("prefill, few rows", "bytes of partial results, over K and V"),
    "wgmma: spill B": ("prefill, wgmma", "bytes spilled or on the stack"),
    "wgmma: stack B": ("prefill, wgmma", "bytes spilled or on the stack"),
    "wgmma: moves": ("prefill, wgmma", "vector moves in the loop"),
    "wgmma: late MUFU": ("prefill, wgmma", "exponentials outside of the waits for products"),
    "wgmma: other/tile": ("prefill, wgmma", "other instructions for each tile and warp"),
    "wgmma: before wgmma": ("prefill, wgmma", "instructions from the barrier to the first product"),
    "wgmma: wavefronts": ("prefill, wgmma", "passes over shared memory, over the fewest"),
    "wgmma: KV sectors": ("prefill, wgmma", "sectors of K and V, over the fewest"),
    "wgmma: written sectors": ("prefill, wgmma", "sectors of the output, over the fewest"),
    "stretches: spill B": ("prefill, few KV heads", "bytes spilled or on the stack"),
    "stretches: stack B": ("prefill, few KV heads", "bytes spilled or on the stack"),
    "stretches: moves": ("prefill, few KV heads", "vector moves in the loop of wgmma"),
    "stretches: other/mma": ("prefill, few KV heads", "other instructions for each mma"),
    "stretches: other/tile": ("prefill, few KV heads", "other instructions for each tile and warp, wgmma"),
    "stretches: wavefronts": ("prefill, few KV heads", "passes over shared memory, over the fewest"),
    "stretches: KV sectors": ("prefill, few KV heads", "sectors of K and V, over the fewest"),
    "external": ("all", "calls of missing functions"),
}
AT_LEAST = {"K load B", "split: KV in flight KiB"} | {name for name in TARGETS if "thread blocks" in name}


def latest(bench: str) -> tuple[dict[str, str], list[Row]]:
    """The machine and the rows of the last run of a bench."""
    run = json.loads(max((DOCS / "figures").glob(f"{bench}-*.json")).read_text())
    return run["machine"], run["rows"]


def decode_rows() -> dict[tuple[str, int], list[Row]]:
    """The rows of `bench cpu` for decode, one for each shape, by cache and G."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in latest("cpu")[1]:
        if "decode" in row:
            found.setdefault((row["decode"], row["G"]), []).append(row)
    return found


def span(values: list[float]) -> str:
    """The least and the greatest, to two digits; one number where they round to the same."""
    return " to ".join(dict.fromkeys(f"{value:.2g}" for value in (min(values), max(values))))


def column(rows: list[Row], name: str) -> list[float]:
    """What stands in a column, in those rows that have it."""
    return [row[name] for row in rows if row[name] is not None]


def short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown: the first column to the left, the others to the right if they hold a number."""
    numbers = [any(cell[:1].isdigit() for cell in cells) for cells in zip(*rows, strict=True)]
    rule = ["---:" if number and i else "---" for i, number in enumerate(numbers)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *rows))


def taken(bench: str) -> str:
    """When and where the figures of a bench were taken."""
    it, _ = latest(bench)
    return f"{it['date']}: {it['cores']} cores of an {it['processor']}"


def machine() -> str:
    """Where and with what the figures were taken."""
    it, _ = latest("cpu")
    reads = [row["read GB/s"] for rows in decode_rows().values() for row in rows]
    return (
        f"{taken('cpu')} that read {span(reads)} GB/s, "
        f"Python {it['python']}, NumPy {it['numpy']}, numba {it['numba']}, torch {it['torch']}.\n"
    )


def decode() -> str:
    """Decode on the CPU by cache and G: the least and the greatest of the shapes."""
    lines = []
    for (cache, group), rows in decode_rows().items():
        torch = [column(rows, "x SDPA"), column(rows, "x gather")]
        lines.append(
            [cache, str(group), span(column(rows, "share")), span(column(rows, "Mtokens/s"))]
            + [span(values) if values else "-" for values in torch]
        )
    every = [row for rows in decode_rows().values() for row in rows]
    return (
        table(["cache", "G", "share of read bandwidth", "Mtokens/s", "SDPA, times", "gather + SDPA, times"], lines)
        + f"\nSDPA takes {span(column(every, 'x SDPA'))} times as long on dense, contiguous K and V, and "
        + f"{span(column(every, 'x gather'))} times as long if it gathers the pages first.\n"
    )


def peers() -> str:
    """How many times as long others take for a decode: the least and the greatest of the shapes and of G."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in latest("cpu")[1]:
        if "peer" in row and "SDPA" not in row["peer"] and row["x pagedkv"] is not None:
            cache = row["cache"].partition("_")[0]
            if cache == "float32":
                cache += ", G = 1" if row["G"] == 1 else ", G = 4 and 8"
            found.setdefault(row["peer"], {}).setdefault(cache, []).append(row["x pagedkv"])
    caches = list(dict.fromkeys(cache for times in found.values() for cache in times))
    lines = [
        [peer, *(span(times[cache]) if cache in times else "-" for cache in caches)] for peer, times in found.items()
    ]
    return table(["times as long", *caches], lines)


def calls() -> str:
    """Prefill, several query tokens, and what the first call costs."""
    _, rows = latest("cpu")
    lines = []
    for row in rows:
        if "prefill" in row:
            heads = f"{row['heads']} heads" + (f", G = {row['G']}" if row.get("G", 1) > 1 else "")
            what = f"prefill of {row['tokens']} tokens, {heads}, {row['prefill']}"
            lines.append([what, f"{row['ms']:.0f} ms; SDPA {row['SDPA ms']:.0f} ms"])
        if "verification" in row:
            what = f"{row['tokens']} query tokens behind {row['L']}, G = {row['G']}, {row['verification']}"
            lines.append([what, f"{row['ms']:.0f} ms; {row['ratio']:.2g} times a decode"])
        if "first call" in row:
            words = f"{row['cold s']:.1f} s to compile; {row['from disk s']:.2g} s from disk"
            lines.append([f"first {row['first call']} of a process", words])
    return table(["", "time"], lines)


def transformers() -> str:
    """Models of transformers with pagedkv and with sdpa."""
    lines = []
    for row in latest("transformers")[1]:
        seconds = [f"{row[name]:.2f} s" for name in ("pagedkv s", "sdpa s")]
        lines.append([row["transformers"], *seconds, f"{row['times']:.2f}"])
    return table(["", "pagedkv", "sdpa", "sdpa, times as long"], lines) + f"\n{taken('transformers')}.\n"


def memory() -> str:
    """The memory manager beside lists of Python, in microseconds for all sequences together."""
    rows = [row for row in latest("memory")[1] if "operation" in row]
    sizes = sorted({row["num_seqs"] for row in rows})
    header = ["operation", *(f"{who}, {size}" for size in sizes for who in ("pagedkv", "lists"))]
    lines: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row["num_seqs"]):
        cells = lines.setdefault(row["operation"], [row["operation"]])
        cells += [short(row["pagedkv_us"]), short(row["lists_us"])]
    return table(header, list(lines.values())) + f"\n{taken('memory')}.\n"


def managers() -> str:
    """The memory manager beside those of vLLM and nano-vLLM, in microseconds."""
    lines = []
    for row in latest("managers")[1]:
        us = [row[f"{who} us"] for who in ("vLLM", "nano-vLLM", "pagedkv")]
        times = [other and other / us[-1] for other in us[:-1]]
        lines.append([row["manager"], *("-" if us is None else f"{us:.0f}" for us in us)])
        lines[-1] += ["-" if it is None else f"{it:.2g}" for it in times]
    return table(["", "vLLM 0.32.0", "nano-vLLM", "pagedkv", "vLLM / pagedkv", "nano-vLLM / pagedkv"], lines)


def targets() -> str:
    """What the CUDA kernels are to reach, and the worst variant of each count."""
    lines = []
    for row in json.loads(COUNTS.read_text())["rows"]:
        if "target" in row:
            kernels, count = TARGETS[row["target"]]
            limit = f"{'≥' if row['target'] in AT_LEAST else '≤'} {row['limit']:g}"
            lines.append([kernels, count, limit, short(row["worst"])])
    once = [list(line) for line in dict.fromkeys(map(tuple, lines))]  # spills and stack, where they are alike
    return table(["kernels", "count", "target", "worst"], once)


# What the page for users says of the counts: parts of their names, and the words of a column.
COMMON = {
    ("spill B", "stack B"): "bytes spilled or on the stack",
    ("sectors",): "sectors of K and V, over the fewest",
    ("wavefronts",): "passes over shared memory, over the fewest",
}


def static() -> str:
    """The counts that the CUDA kernels share: the worst variant of each kernel."""
    rows = [row for row in json.loads(COUNTS.read_text())["rows"] if "target" in row]
    lines = []
    for kernels in dict.fromkeys(kernels for kernels, _ in TARGETS.values() if not kernels.startswith("all")):
        own = [row for row in rows if TARGETS[row["target"]][0] == kernels]
        line = [kernels, str(max(row["rows"] for row in own))]
        for names in COMMON:
            worst = [row["worst"] for row in own if row["target"].endswith(names)]
            line.append(short(max(worst)) if worst else "-")
        lines.append(line)
    kept = sum(row["misses"] == 0 for row in rows)
    most = next(short(row["worst"]) for row in rows if row["target"] == "split: all, 16 bits, G 1 to 16")
    return (
        table(["kernels", "variants", *COMMON.values()], lines)
        + f"\nEvery variant keeps {kept} of {len(rows)} targets. In 16 bits, G up to 16, split takes at most {most} "
        + "warp instructions\nfor 512 bytes of K and V; an H100 has time for about 150 while it reads that much.\n"
    )


TABLES: dict[str, Callable[[], str]] = {
    "machine": machine,
    "decode": decode,
    "peers": peers,
    "calls": calls,
    "transformers": transformers,
    "memory": memory,
    "managers": managers,
    "static": static,
    "targets": targets,
}


def with_tables(page: str, place: re.Pattern[str], tables: dict[str, Callable[[], str]]) -> str:
    """The page with its tables written anew, each in its place."""
    return place.sub(lambda match: match[1] + "\n" + tables[match[2]]() + "\n" + match[3], page)


def axis(left: float, width: float, top: float, bottom: float, ticks: list[float], words: str) -> list[str]:
    """Grid lines with their numbers, and what they count."""
    parts = []
    for tick in ticks:
        x = left + width * tick / ticks[-1]
        parts += [
            f'<path d="M{x:g} {top:g} V{bottom:g}" stroke="{GRID if tick else LINE}"/>',
            text(x, bottom + 16, f"{tick:g}", 11, "middle", GREY),
        ]
    return [*parts, text(left + width / 2, bottom + 36, words, 12, "middle", GREY)]


def reach(values: list[float], at: Callable[[float], float], y: float) -> str:
    """A line from the least to the greatest."""
    return f'<path d="M{at(min(values)):.4g} {y:g} H{at(max(values)):.4g}" stroke="{INK}" stroke-width="1.4"/>'


def dot(x: float, y: float, fill: str) -> str:
    return f'<circle cx="{x:.4g}" cy="{y:g}" r="4" fill="{fill}" stroke="{ACCENT}" stroke-width="1.6"/>'


def performance() -> str:
    """Decode on the CPU: the share of the read bandwidth, and how many times longer torch takes."""
    found = decode_rows()
    caches = list(dict.fromkeys(cache for cache, _ in found))
    colours = dict(zip(dict.fromkeys(group for _, group in found), COLOURS, strict=False))
    left, right, top, high, gap = 122, 440, 96, 17, 12
    # The longest share, and its number behind it, end before the chart on the right begins.
    wide = 270 / max(max(column(rows, "share")) for rows in found.values())
    height = high * len(found) + gap * (len(caches) - 1)
    most = 5 * -(-max(max(column(rows, "x gather"), default=0.0) for rows in found.values()) // 5)

    def share_at(value: float) -> float:
        return left + wide * value

    def times_at(value: float) -> float:
        return right + 290 * value / most

    parts = [
        title(20, 28, "Decode on the CPU: share of the read bandwidth"),
        text(20, 48, "G: query heads per KV head", 11, fill=GREY),
        text(20, 64, "bar: the median of three shapes; line: all of them", 11, fill=GREY),
        title(right, 28, "Time of torch over time of pagedkv"),
        *(dot(right + 6, 46, ACCENT), text(right + 16, 50, "SDPA on dense K and V", 11, fill=GREY)),
        *(dot(right + 156, 46, WHITE), text(right + 166, 50, "gather, then SDPA", 11, fill=GREY)),
        *axis(left, wide, top - 8, top + height + 6, [0, 0.2, 0.4, 0.6, 0.8, 1], "a float32 sum of a large array = 1"),
        *axis(right, 290, top - 8, top + height + 6, [5.0 * i for i in range(int(most) // 5 + 1)], "times as long"),
        f'<path d="M{times_at(1):g} {top - 8} v{height + 14}" stroke="{INK}" stroke-dasharray="3 3"/>',
        text(times_at(1) - 4, top - 14, "pagedkv = 1", 11, fill=GREY),
    ]
    y = float(top)
    for cache in caches:
        groups = [group for name, group in found if name == cache]
        parts.append(text(20, y + high * len(groups) / 2 + 4, cache, 12))
        if not column(found[cache, groups[0]], "x SDPA"):
            words = f"SDPA takes no {cache.partition('_')[0]}"
            parts.append(text(right + 30, y + high * len(groups) / 2 + 4, words, 11, fill=GREY))
        for group in groups:
            rows, middle = found[cache, group], y + high / 2
            shares = sorted(column(rows, "share"))
            share = shares[len(shares) // 2]
            parts += [
                text(left - 6, middle + 4, f"G {group}", 11, "end", GREY),
                box(left, y + 2, round(wide * share, 1), high - 4, colours[group]),
                reach(shares, share_at, middle),
                text(share_at(shares[-1]) + 6, middle + 4, f"{share:.2f}", 11),
            ]
            for name, fill in (("x SDPA", ACCENT), ("x gather", WHITE)):
                if times := sorted(column(rows, name)):
                    parts += [reach(times, times_at, middle), dot(times_at(times[len(times) // 2]), middle, fill)]
            y += high
        y += gap
    return drawing(top + height + 58, parts)


DRAWINGS: dict[str, Callable[[], str]] = {"performance.svg": performance}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), TABLE, TABLES), encoding="utf-8")
