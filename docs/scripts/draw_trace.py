"""The drawings and tables of explanation/memory_waste.md, and pictures of a pool for memory.md and the front page.

``python docs/scripts/draw_trace.py`` writes them. Tables and chart are of the last of docs/figures/trace-*.json by name
(``python -m pagedkv trace --json``). The moving picture is of a small run, which this simulates, and the pools are of
small caches. The tests compare files and page with what this writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from draw_kernels import ACCENT, COLOURS, GREY, IMAGES, INK, LINE, WHITE, arrow, box, drawing, text, title
from draw_performance import latest, table, with_tables

from pagedkv import PagedKVCache, trace
from pagedkv.trace.plot import COLOURS as KINDS

PAGES = (Path(__file__).parents[1] / "explanation" / "memory_waste.md",)
TABLE = re.compile(r"(<!-- (\w+): written by draw_trace.py -->\n).*?(<!-- end -->)", re.DOTALL)
WORDS = {
    "tokens": "tokens",
    "reserved": "reserved",
    "internal": "internal fragmentation",
    "external": "external fragmentation",
}
# A colour for each request that runs, full and pale.
HUES = (
    *(("#2f6f9f", "#cfe0ec"), ("#c9772b", "#f3ddc6"), ("#3f8f5a", "#d0e7d8"), ("#9a4f96", "#e8d5e7")),
    *(("#b5483a", "#f1d3cf"), ("#7a6a1e", "#e6e0bd"), ("#3b7f86", "#cde4e6"), ("#6b5bb0", "#dcd8ee")),
)

Row = dict[str, Any]


def name_of(row: Row) -> str:
    return f"paged, P = {row['P']}" if row["P"] else row["manager"]


def waste() -> str:
    """What each manager made of the memory."""
    header = ["", "P", *(f"{kind} %" for kind in (*WORDS, "waste")), "at once", "steps", "table entries"]
    lines = []
    for row in latest("trace")[1][1:]:
        shares = [f"{row[f'{kind} %']:.1f}" for kind in (*WORDS, "waste")]
        rest = [f"{row['at once']:.1f}", str(row["steps"]), str(row["table entries"] or "-")]
        lines.append([row["manager"], str(row["P"] or "-"), *shares, *rest])
    return table(header, lines)


def preempted() -> str:
    """What paging pays for admitting sequences without reserving room for them."""
    [row] = [row for row in latest("trace")[1] if row.get("P") == 16]
    requests = latest("trace")[1][0]
    stored = requests["requests"] * (requests["mean prompt"] + requests["mean output"])
    return (
        f"Here, at P = 16, sequences were preempted {row['preempted']} times, and computed {row['recomputed']} tokens "
        f"again, {100 * row['recomputed'] / stored:.0f} % of what the requests have.\n"
    )


TABLES: dict[str, Callable[[], str]] = {"waste": waste, "preempted": preempted}


def legend(x: float, y: float) -> list[str]:
    parts = []
    for kind, words in WORDS.items():
        parts += [
            f'<rect x="{x:g}" y="{y - 9:g}" width="11" height="11" fill="{KINDS[kind]}"/>',
            text(x + 16, y, words, 11),
        ]
        x += 46 + 6.2 * len(words)
    return parts


def area(row: Row, x: float, y: float, width: float, height: float, most: int, memory: int) -> list[str]:
    """The kinds of slots over time, one upon the other."""
    at = [*row["steps over time"], row["steps"]]
    below = np.zeros(len(at) - 1)
    parts = [f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{WHITE}" stroke="{LINE}"/>']

    def edge(values: np.ndarray) -> list[str]:
        """A step for each stretch of time, from left to right."""
        return [
            f"{x + width * step / most:.1f} {y + height * (1 - value / memory):.1f}"
            for (begin, end), value in zip(pairwise(at), values, strict=True)
            for step in (begin, end)
        ]

    for kind in WORDS:
        above = below + np.array(row[f"{kind} over time"])
        if above.sum() > below.sum():
            parts.append(f'<path d="M{" L".join(edge(above) + edge(below)[::-1])}z" fill="{KINDS[kind]}"/>')
        below = above
    return parts


def memory_waste() -> str:
    """Shares of the slots as bars, and the slots over time."""
    requests, *rows = latest("trace")[1]
    left, wide, top, high = 156, 434, 80, 21
    parts = [
        title(20, 28, f"What {requests['memory']:,} slots held during {requests['requests']:,} requests"),
        *legend(20, 50),
        text(660, 70, "waste", 11, "end", GREY),
        text(740, 70, "at once", 11, "end", GREY),
    ]
    for i, row in enumerate(rows):
        x, y = float(left), top + high * i
        parts.append(text(left - 8, y + 13, name_of(row), 12, "end"))
        for kind in WORDS:
            width = wide * row[f"{kind} %"] / 100
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{high - 5}" fill="{KINDS[kind]}"/>')
            x += width
        parts += [
            text(660, y + 13, f"{row['waste %']:.1f} %", 12, "end"),
            text(740, y + 13, f"{row['at once']:.1f}", 12, "end"),
        ]
    top += high * len(rows) + 38
    most = max(row["steps"] for row in rows)
    parts.append(title(20, top - 12, "The same over time: all slots, until the last request has ended"))
    chosen = [row for row in rows if row["P"] in (None, 16)]
    for i, row in enumerate(chosen):
        x, width = 20 + 182 * i, 170
        parts += [
            text(x, top + 10, name_of(row), 12),
            *area(row, x, top + 18, width, 90, most, requests["memory"]),
            text(
                x + width * row["steps"] / most,
                top + 122,
                f"{row['steps']:,} steps",
                10,
                "end" if i == 0 else "middle",
                GREY,
            ),
        ]
    return drawing(top + 136, parts)


MEMORY, MAX_LEN, BLOCK_SIZE, COLUMNS, FRAMES, SECONDS = 512, 128, 16, 64, 48, 19.2
REQUESTS = trace.log_normal(48, prompt_mean=14, output_mean=30, sigma=0.7, max_len=MAX_LEN, seed=4)


def owners_over_time(manager: Any) -> tuple[list[np.ndarray], list[int]]:
    """For each step, who has each slot (2 * request, + 1 if it is empty, -1 if it is free), and how many are done."""
    steps, done = [], [0]

    def watch(running: np.ndarray, seqs: np.ndarray, lens: np.ndarray) -> None:
        slots = np.full(MEMORY, -1)
        for request, seq, length, held in zip(running, seqs.tolist(), lens, manager.held(seqs), strict=True):
            if isinstance(manager, trace.Paged):
                [blocks] = manager.table.block_tables([seq])
                own = (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()
            else:
                own = np.arange(seq, seq + held)
            slots[own] = 2 * request + (np.arange(held) >= length)
        steps.append(slots)
        done.append(done[-1] + np.count_nonzero(lens == REQUESTS.seq_lens[running]))

    trace.simulate(REQUESTS, manager, watch)
    return steps, done


def picture(slots: np.ndarray, x: float, y: float, cell: float, high: float) -> str:
    """Runs of slots with the same owner, a path for each colour."""
    paths: dict[str, list[str]] = {}
    for row, line in enumerate(slots.reshape(-1, COLUMNS).tolist()):
        column = 0
        for owner, run in groupby(line):
            length = len(list(run))
            if owner >= 0:
                place = f"M{x + cell * column:g} {y + high * row:g}h{cell * length:g}v{high - 2:g}h{-cell * length:g}z"
                paths.setdefault(HUES[owner // 2 % len(HUES)][owner % 2], []).append(place)
            column += length
    return "".join(f'<path fill="{colour}" d="{"".join(places)}"/>' for colour, places in sorted(paths.items()))


def memory_run(only: int | None = None) -> str:
    """A small run in contiguous memory, a buddy allocator's and in blocks, moving; or one frame of it."""
    managers = {
        f"contiguous, {MAX_LEN} each": trace.Contiguous(MEMORY, MAX_LEN),
        "buddy, oracle": trace.Buddy(MEMORY),
        f"paged, P = {BLOCK_SIZE}": trace.Paged(MEMORY, BLOCK_SIZE),
    }
    runs = {name: owners_over_time(manager) for name, manager in managers.items()}
    last = len(runs[f"paged, P = {BLOCK_SIZE}"][0])
    cell, high, top = 3.5, 15, 92
    parts = [
        # The picture stands still for those who ask their system for that.
        "<style>.f{visibility:hidden}#still{visibility:visible}@media (prefers-reduced-motion:no-preference)"
        f"{{.f,#still{{visibility:hidden;animation:f {SECONDS:g}s step-end infinite}}}}"
        f"@keyframes f{{0%{{visibility:visible}}{100 / FRAMES:.4f}%,to{{visibility:hidden}}}}</style>",
        title(20, 28, f"{len(REQUESTS.seq_lens)} requests in {MEMORY} slots, a row for {COLUMNS} of them"),
        text(
            20,
            48,
            "A colour is a request: full where a slot holds a token, pale where it is kept empty.",
            11,
            fill=GREY,
        ),
    ]
    for i, name in enumerate(runs):
        x, rows = 20 + 248 * i, MEMORY // COLUMNS
        parts.append(text(x, top - 12, name, 12, font_weight="bold"))
        lines = "".join(
            f"M{x} {top + high * row}h{cell * COLUMNS:g}v{high - 2}h-{cell * COLUMNS:g}z" for row in range(rows)
        )
        parts.append(f'<path d="{lines}" fill="{WHITE}" stroke="{LINE}" stroke-width=".5"/>')
    for frame in range(FRAMES) if only is None else [only]:
        step = round(frame * (last - 1) / (FRAMES - 1))
        which = "id" if frame == FRAMES // 3 else "class"
        delay = f' style="animation-delay:{SECONDS * frame / FRAMES:g}s"' if only is None else ""
        shown = [f'<g {which}="{"still" if which == "id" else "f"}"{delay}>' if only is None else "<g>"]
        shown.append(text(740, 28, f"step {step + 1}", 12, "end"))
        for i, (steps, done) in enumerate(runs.values()):
            x = 20 + 248 * i
            slots = steps[step]
            running = {owner // 2 for owner in slots.tolist() if owner >= 0}
            held, full = np.count_nonzero(slots >= 0), np.count_nonzero((slots >= 0) & (slots % 2 == 0))
            words = f"{len(running)} run, {done[step]} done; {full} tokens in {held} slots"
            shown += [picture(slots, x, top, cell, high), text(x, top + high * rows + 16, words, 11, fill=INK)]
        parts.append("".join([*shown, "</g>"]))
    # The edges of blocks, over the paths of all frames.
    edges = "".join(
        f"M{516 + cell * BLOCK_SIZE * i:g} {top}v{high * rows - 2}" for i in range(1, COLUMNS // BLOCK_SIZE)
    )
    parts.append(f'<path d="{edges}" stroke="{WHITE}" stroke-width="1.5"/>')
    return drawing(top + high * rows + 34, parts)


def pool_map() -> str:
    """What a notebook shows of a cache with a shared prompt, sequences of many lengths, and holes."""
    cache = PagedKVCache(num_layers=1, num_blocks=256, block_size=16, num_kv_heads=1, head_dim=8)
    seqs = [cache.add(length).seq for length in (300, 70, 410, 130, 25, 560, 90, 240)]
    cache.append(cache.fork(seqs[2], 3), 40)
    cache.free([seqs[1], seqs[5]])
    picture = cache._repr_html_()
    svg = picture[picture.index("<svg") : picture.index("</svg>") + 6].replace("<svg ", '<svg x="26" y="16" ', 1)
    return drawing(80, [svg])


def paging() -> str:
    """For the front page: two texts with a common beginning, their block tables, and the pool, of a real cache."""
    texts = [text.split() for text in ("The cat sat on the mat and slept all day", "The cat sat on my new sofa")]
    size, wide, high = 4, 64, 22
    cache = PagedKVCache(num_layers=1, num_blocks=8, block_size=size, num_kv_heads=1, head_dim=8)
    others = [cache.add(size).seq for _ in range(3)]
    cache.free([others[0], others[2]])  # so that blocks do not lie in order
    ids = {word: i for i, word in enumerate(sorted({*texts[0], *texts[1]}))}
    tables = []
    for words in texts:
        seq = cache.add([ids[word] for word in words]).seq
        cache.commit(seq)
        tables.append(cache.batch([seq]).block_tables[0].tolist())
    shared = {*tables[0]} & {*tables[1]}
    colours = {block: COLOURS[3 if block in shared else row] for row in range(2) for block in tables[row]}
    content = {block: texts[row][size * i :][:size] for row in range(2) for i, block in enumerate(tables[row])}
    parts = [title(20, 30, f"sequences of tokens, in blocks of {size}"), title(20, 176, "block tables")]
    for row, (name, words) in enumerate(zip("AB", texts, strict=True)):
        y, first = 48 + 50 * row, 20 + 380 * row
        parts += [text(20, y + 20, name, 14, font_weight="bold"), text(first, 212, name, 14, font_weight="bold")]
        for i, word in enumerate(words):
            parts.append(box(44 + wide * i + 6 * (i // size), y, wide, 30, colours[tables[row][i // size]]))
            parts.append(text(76 + wide * i + 6 * (i // size), y + 20, word, 13, "middle"))
        for i, block in enumerate(tables[row]):
            x, below = first + 46 + 44 * i, 70 + 88 * block
            parts.append(box(x - 22, 192, 44, 30, colours[block], INK))
            parts.append(text(x, 212, block, 13, "middle"))
            parts.append(arrow(f"M{x} 224 C {x} 258, {below} 236, {below} 268"))
    for block in range(8):
        x = 28 + 88 * block
        parts.append(text(x + 42, 286, f"block {block}", 12, "middle", GREY))
        for i in range(size):
            word = dict(enumerate(content.get(block, []))).get(i, "")
            parts.append(box(x, 292 + high * i, 84, high, colours[block] if word else WHITE))
            parts.append(text(x + 42, 308 + high * i, word, 13, "middle"))
        parts.append(box(x, 292, 84, high * size, "none", ACCENT if block in shared else INK))
    parts.append(title(20, 408, "the pool: blocks of keys and values, anywhere; A and B share the framed one"))
    return drawing(424, parts)


DRAWINGS: dict[str, Callable[[], str]] = {
    "memory/paging.svg": paging,
    "memory/waste.svg": memory_waste,
    "memory/run.svg": memory_run,
    "memory/pool-map.svg": pool_map,
}

if __name__ == "__main__":
    for file, draw in DRAWINGS.items():
        (IMAGES / file).write_text(draw(), encoding="utf-8")
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), TABLE, TABLES), encoding="utf-8")
