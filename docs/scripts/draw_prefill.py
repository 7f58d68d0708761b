"""The drawings of explanation/prefill_kernels.md: ``python docs/scripts/draw_prefill.py`` writes them to docs/images.

Tiles and stages are computed from the kernel's constants. Where a lane's rows of fragments lie in shared memory is read
off the kernel's own steps, called in Python, and which elements of them it gets is what PTX says of ldmatrix. The tests
compare the files with what this draws: a kernel that changes changes its drawings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from draw_kernels import ACCENT, COLOURS, GREY, IMAGES, INK, LINE, SHADE, WHITE, arrow, box, drawing, text, title
from split_lanes import place_in_a, place_in_c

from pagedkv.kernels.prefill.config import WARP_SIZE, TensorConfig
from pagedkv.kernels.prefill.items import num_tiles
from pagedkv.kernels.prefill.tensor_cores.products import at_step, make_fragment_offsets
from pagedkv.kernels.prefill.tensor_cores.tile import CHUNK, CHUNK_DIMS, SWIZZLED, TileShape

CONFIG = TensorConfig(head_dim=64, group_size=4, block_size=16, q_kind="float16", kv_kind="float16")
SHAPE = TileShape(CONFIG)
QUERY_LENS, LENGTH = (70, 1, 60), 330  # and the keys of the first one
LANE, CHUNKS = 6, SWIZZLED // CHUNK
Element = tuple[int, int]  # (row or key, dim)


# ---- where things lie


def elements_at(where: int) -> Element:
    """Row and first dim of the chunk at an offset, of rows that begin at 0."""
    row, inside = divmod(where, SHAPE.row_bytes)
    return row, (inside // CHUNK ^ row & 7) * CHUNK_DIMS


def chunk_of(matrix: int, row: int, *, keys: bool) -> Element:
    """Row and first dim that ldmatrix reads as row 0..7 of one of its four matrices: lane 8 * matrix + row names it."""
    places = make_fragment_offsets(SHAPE).py_func(8 * matrix + row)
    return elements_at(int(places.k if keys else places.q_and_v))


def query(lane: int, register: int) -> list[Element]:
    """(row, dim) of both halves of register a0..a3 of Q."""
    row, dim = chunk_of(register, lane // 4, keys=False)
    return [(row, dim + 2 * (lane % 4) + half) for half in range(2)]


def key(lane: int, register: int) -> list[Element]:
    """(key, dim) of both halves of registers b0, b1 of keys 0 to 7, and b0, b1 of keys 8 to 15."""
    row, dim = chunk_of(register, lane // 4, keys=True)
    return [(row, dim + 2 * (lane % 4) + half) for half in range(2)]


def value(lane: int, register: int) -> list[Element]:
    """(key, dim) of both halves of b0, b1 of dims 0 to 7, and of dims 8 to 15: ldmatrix transposes."""
    rows = [chunk_of(register, 2 * (lane % 4) + half, keys=False) for half in range(2)]
    return [(row, dim + lane // 4) for row, dim in rows]


def score(lane: int, accumulator: int) -> Element:
    """(row, column) of an accumulator: c0..c3 of columns 0 to 7, and of 8 to 15."""
    row, column = place_in_c(lane, accumulator % 4)
    return row, column + 8 * (accumulator // 4)


# ---- drawings


def prefill_tiles() -> str:
    """Rows of a ragged batch to thread blocks, and the keys of one of them."""
    rows, group = SHAPE.rows, CONFIG.group_size
    starts = [sum(QUERY_LENS[:i]) for i in range(len(QUERY_LENS) + 1)]
    grid = num_tiles(starts[-1], len(QUERY_LENS), group, rows)
    words = (
        f"1  a batch of {starts[-1]} tokens in {len(QUERY_LENS)} sequences, G = {group}: {rows} rows to a thread block,"
    )
    words += f" grid {grid}"
    parts, top, left, scale = [title(20, 30, words)], 52, 150, 560 / (max(QUERY_LENS) * group)
    position = LENGTH - QUERY_LENS[0]
    for i, tokens in enumerate(QUERY_LENS):
        num_rows, first = tokens * group, starts[i] * group // rows + i
        count, owned = -(-num_rows // rows), starts[i + 1] * group // rows + i + 1 - first
        parts += [
            text(20, top + 13, f"sequence {i}"),
            text(20, top + 28, f"{tokens} token{'s' * (tokens > 1)}", 11, fill=GREY),
        ]
        for j in range(count):
            # The last rows come first.
            begin = (count - 1 - j) * rows
            width = (min(begin + rows, num_rows) - begin) * scale
            name = f"x = {first + j}"
            parts.append(box(left + begin * scale, top, width, 28, COLOURS[i], INK, name if width > 40 else ""))
        spare = f"; x = {first + count} has nothing to do" if owned > count else ""
        last = f" to {first + count - 1}" if count > 1 else ""
        parts.append(
            text(left, top + 43, f"x = {first}{last}, from {starts[i]} * G // {rows} + {i} on{spare}", 11, fill=GREY)
        )
        top += 62
    words = "Row r of a sequence is token r // G and query head r % G. Each x is launched once for every KV head."
    parts.append(text(20, top + 4, words, 12))

    top += 40
    last = position + rows // group - 1
    words = f"2  the first rows of sequence 0: tokens {position} to {last} of {LENGTH}, causal"
    parts.append(title(20, top, words))
    count = -(-LENGTH // SHAPE.keys)
    wide, high, left = 560 / count, 24, 150
    for tile in range(count):
        begin, end = tile * SHAPE.keys, (tile + 1) * SHAPE.keys - 1
        name, fill = ("masked", COLOURS[0]) if begin <= last else ("not read", WHITE)
        if end <= position:
            name, fill = "all see all", COLOURS[1]
        parts += [
            box(left + wide * tile, top + 14, wide, high, fill, INK, name),
            text(left + wide * tile, top + 52, begin, 10, fill=GREY),
        ]
    end = (last // SHAPE.keys + 1) * SHAPE.keys - 1
    words = f"Of the masked tile, keys {last + 1} to {end} are not read either: key {last} is, in their place."
    parts += [text(20, top + 30, f"tiles of {SHAPE.keys} keys"), text(20, top + 74, words, 12)]

    top += 108
    rows = f"{SHAPE.rows_of_warp} rows each, as {SHAPE.row_tiles} tiles of 16"
    parts.append(title(20, top, f"3  its {SHAPE.num_warps} warps have {rows}"))
    for warp in range(SHAPE.num_warps):
        for m in range(SHAPE.row_tiles):
            y = top + 14 + 22 * (warp * SHAPE.row_tiles + m)
            first = warp * SHAPE.rows_of_warp + 16 * m
            parts.append(box(left, y, 190, 22, COLOURS[warp], INK, f"rows {first} to {first + 15}"))
        y = top + 14 + 22 * warp * SHAPE.row_tiles
        parts.append(text(20, y + 11 * SHAPE.row_tiles + 4, f"warp {warp}"))
    parts += [
        arrow(f"M420 {top + 60} h-70"),
        box(424, top + 46, 286, 28, SHADE, INK, "a fragment of K or V, 16 keys by 16 dims"),
        text(424, top + 94, "is loaded by each warp, and multiplied with its", 12),
        text(424, top + 112, f"{SHAPE.row_tiles} tiles: O, shifts and sums stay in registers.", 12),
    ]
    return drawing(top + 30 + 22 * SHAPE.num_warps * SHAPE.row_tiles, parts)


def _grid(
    x: float, y: float, words: str, rows: str, columns: str, of_lane: Callable[[int], list[tuple[int, int, str]]]
) -> list[str]:
    """16 by 16 elements in the colours of the lanes that have them; those of LANE framed and named."""
    cell, framed = 12, []
    parts = [
        text(x + 8 * cell, y - 20, words, 12, "middle", font_weight="bold"),
        text(x + 8 * cell, y - 5, columns, 10, "middle", GREY),
        text(x - 6, y + 8 * cell + 4, rows, 10, "end", GREY),
    ]
    taken = set()
    for lane in range(WARP_SIZE):
        for row, column, name in of_lane(lane):
            taken.add((row, column))
            mine = lane == LANE
            at = box(
                x + cell * column,
                y + cell * row,
                cell,
                cell,
                COLOURS[lane % 4] if mine else _paler(lane),
                INK if mine else WHITE,
            )
            (framed if mine else parts).append(at)
            if mine:
                framed.append(text(x + cell * (column + 0.5), y + cell * row + 10, name, 8, "middle"))
    assert len(taken) == 256
    return [*parts, *framed]


def _paler(lane: int) -> str:
    """The colour of a lane's t, between white and itself."""
    channels = [int(COLOURS[lane % 4][i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{(x + 3 * 255) // 4:02x}" for x in channels)


def prefill_fragments() -> str:
    """Which lane has what of both products."""
    g, t = divmod(LANE, 4)
    pairs = {
        "a": lambda lane: [(*e, f"a{r}") for r in range(4) for e in query(lane, r)],
        "b": lambda lane: [(*e, f"b{r % 2}") for r in range(4) for e in key(lane, r)],
        "c": lambda lane: [(*score(lane, r), f"c{r % 4}") for r in range(8)],
        "p": lambda lane: [(row, column, f"a{r}") for r in range(4) for row, column in _probabilities(lane, r)],
        "v": lambda lane: [(*e, f"b{r % 2}") for r in range(4) for e in value(lane, r)],
    }  # fmt: skip
    for register in range(4):
        row, columns = place_in_a(LANE, register)
        assert query(LANE, register) == [(row, column) for column in columns]
        assert _probabilities(LANE, register) == [(row, column) for column in columns]
    parts, left = [title(20, 30, f"1  S = Q K^T: what lane {LANE} (g = {g}, t = {t}) has is framed")], (52, 300, 548)
    top = 88
    parts += _grid(left[0], top, "Q", "row", "16 dims", pairs["a"])
    parts += _grid(left[1], top, "K", "key", "16 dims", pairs["b"])
    parts += _grid(left[2], top, "S", "row", "16 keys", pairs["c"])
    parts += [
        text(258, top + 100, "x", 14, "middle"),
        text(506, top + 100, "=", 14, "middle"),
        text(
            20,
            top + 216,
            "ldmatrix loads a0 to a3 of Q, and b0, b1 of two products of K: a framed pair is a register; colours: t.",
            12,
        ),
    ]
    top += 246
    parts.append(title(20, top, "2  O += P V: P is where S was, two probabilities to a register"))
    top += 58
    parts += _grid(left[0], top, "P", "row", "16 keys", pairs["p"])
    parts += _grid(left[1], top, "V", "key", "16 dims", pairs["v"])
    parts += _grid(left[2], top, "O", "row", "16 dims", pairs["c"])
    parts += [
        text(258, top + 100, "x", 14, "middle"),
        text(506, top + 100, "=", 14, "middle"),
        text(
            20,
            top + 216,
            "V's pairs lie in two rows: ldmatrix transposes on the way. No lane sends another one anything.",
            12,
        ),
    ]
    return drawing(top + 234, parts)


def _probabilities(lane: int, register: int) -> list[Element]:
    """(row, key) of both halves of a0..a3 of P: accumulators of S, packed where they are."""
    return [score(lane, 2 * register + half) for half in range(2)]


def prefill_swizzle() -> str:
    """Where the chunks of rows lie, and why."""
    chosen, cell, high, left, top = 2, 62, 26, 84, 96
    words = (
        f"1  shared memory: {CHUNKS} rows of {SWIZZLED} bytes (D = {CONFIG.head_dim}), in chunks of {CHUNK_DIMS} dims"
    )
    parts = [title(20, 30, words)]
    # As lanes name them: rows 0..7, chunks 2 * step and 2 * step + 1.
    named = {}
    for step in range(CHUNKS // 2):
        for lane in range(WARP_SIZE):
            place = int(at_step.py_func(make_fragment_offsets(SHAPE).py_func(lane).q_and_v, step, 0))
            row, dim = lane % 8, 16 * step + 8 * (lane >> 4)
            if place < CHUNKS * SHAPE.row_bytes:
                assert elements_at(place) == (row, dim)
                named[divmod(place // CHUNK, SHAPE.row_bytes // CHUNK)] = (row, dim // CHUNK_DIMS)
    for place in range(CHUNKS):
        parts.append(text(left + cell * (place + 0.5), top - 22, f"byte {CHUNK * place}", 10, "middle", GREY))
        parts.append(text(left + cell * (place + 0.5), top - 8, f"{4 * place} to {4 * place + 3}", 10, "middle", GREY))
    parts.append(text(left - 8, top - 8, "banks", 10, "end", GREY))
    for (row, place), (_, chunk) in sorted(named.items(), key=lambda item: (item[1][1] == chosen, item)):
        mine = chunk == chosen
        words = f"chunk {chunk}"
        parts.append(
            box(
                left + cell * place,
                top + high * row,
                cell,
                high,
                COLOURS[0] if mine else WHITE,
                INK if mine else LINE,
                words,
            )
        )
    for row in range(CHUNKS):
        parts.append(text(left - 8, top + high * row + 17, f"row {row}", 11, "end", GREY))
    top += high * CHUNKS + 24
    parts += [
        text(
            20,
            top,
            f"Chunk c of row r lies at place c ^ (r & 7). ldmatrix reads a chunk of 8 rows, here number {chosen}:",
            12,
        ),
        text(
            20, top + 18, "it meets every bank once. In the order of the dims all 8 would lie in the same 4 banks.", 12
        ),
    ]

    top += 54
    lanes, rows = SHAPE.lanes, SHAPE.warp_rows_at_once
    parts.append(
        title(20, top, f"2  copying: {lanes} lanes share a row, a warp copies {rows} rows at once, 16 bytes a lane")
    )
    top += 16
    for lane in range(WARP_SIZE):
        row, chunk = divmod(lane, lanes)
        place = chunk ^ row & 7
        parts.append(box(left + cell * place, top + high * row, cell, high, COLOURS[row % 4], LINE, f"lane {lane}"))
    for row in range(rows):
        parts.append(text(left - 8, top + high * row + 17, f"row {row}", 11, "end", GREY))
    top += high * rows + 22
    parts.append(
        text(
            20,
            top,
            "Each lane looks up one token two tiles ahead; a shuffle hands the row's offset to the lanes that copy it.",
            12,
        )
    )
    return drawing(top + 22, parts)


def prefill_stages() -> str:
    """What shared memory holds while tiles are used."""
    parts, top, left = [], 30, 130
    for head_dim in (128, 256):
        shape = TileShape(replace(CONFIG, head_dim=head_dim))
        kib = shape.nbytes / 1024
        count = {1: "one stage", 2: "two stages"}[shape.stages]
        words = f"D = {head_dim}, float16: {count}, {shape.rows} rows, {kib:.0f} KiB of shared memory"
        parts.append(title(20, top, words))
        top += 34
        each, half = 196, 98
        for tile in range(3):
            at = left + each * tile
            parts += [
                f'<path d="M{at} {top - 18} v{16 + 36 * 2 * shape.stages}" stroke="{ACCENT}" stroke-dasharray="4 3"/>',
                text(at + 6, top - 8, ("tile i", "tile i + 1", "tile i + 2")[tile], 10, fill=GREY),
            ]
            if shape.stages == 1:
                line = f"M{at + half} {top - 2} v{36 * 2}"
                parts.append(f'<path d="{line}" stroke="{ACCENT}" stroke-dasharray="4 3"/>')
        for buffer in range(2 * shape.stages):
            stage, name = divmod(buffer, 2)
            words = f"{'KV'[name]}, stage {stage}" if shape.stages == 2 else "KV"[name]
            parts.append(text(20, top + 36 * buffer + 19, words))
        for tile in range(3):
            at = left + each * tile
            number = ("i", "i + 1", "i + 2", "i + 3")
            for name in range(2):
                if shape.stages == 2:
                    y, other = top + 36 * (2 * (tile % 2) + name), top + 36 * (2 * (1 - tile % 2) + name)
                    words = f"used: {'S = Q K^T' if name == 0 else 'O += P V'}"
                    parts.append(box(at + half * name, y, half, 28, COLOURS[name], INK, words))
                    parts.append(
                        box(at, other, each - 2, 28, SHADE, LINE, f"{'KV'[name]} of {number[tile + 1]} on its way")
                    )
                else:
                    y = top + 36 * name
                    words = "S = Q K^T" if name == 0 else "O += P V"
                    parts.append(box(at + half * name, y, half, 28, COLOURS[name], INK, words))
                    of = number[tile + 1] if name == 0 else number[tile]
                    parts.append(box(at + half * (1 - name), y, half, 28, SHADE, LINE, f"{'KV'[name]} of {of} comes"))
        top += 36 * 2 * shape.stages + 16
        words = (
            "A barrier at each dashed line: copies of the line before have come, and nobody uses what is overwritten."
        )
        parts.append(text(20, top + 8, words, 12))
        top += 50
    return drawing(top - 20, parts)


def prefill_turns() -> str:
    """What two warpgroups do at the same time, the products of both in the middle."""
    parts, left, half, height = [title(20, 30, "Two warpgroups, half a tile apart (not to scale)")], 130, 150, 26
    for group in range(2):
        products, threads = 92 + 52 * group, 60 + 116 * group
        parts.append(text(20, products + 17, f"group {group}, products"))
        parts.append(text(20, threads + 17, f"group {group}, threads"))
        for i, (tile, tile_before) in enumerate((("i", "i - 1"), ("i + 1", "i"))):
            at = left + half * (2 * i + group)
            words = f"S({tile}), O += PV({tile_before})"
            parts.append(box(at, products, half - 2, height, COLOURS[0], INK, words))
            if (group, i) != (1, 1):
                parts.append(box(at + half / 2, threads, half - 2, height, COLOURS[1], INK, f"softmax of S({tile})"))
                line = f"M{at + half - 1} {products + height * (1 - group)} v{26 * (1 - 2 * group)}"
                parts.append(arrow(line))
    notes = (
        "Arrow: this warpgroup's products have started, and the other one's come next (turn).",
        "Behind S: this warpgroup's half of the next K and V has come (full). Behind a softmax, once the other one no",
        "longer reads their stages (free): copies of V of the next tile, and of K of the next but one, start.",
    )
    parts += [text(20, 232 + 18 * i, words) for i, words in enumerate(notes)]
    return drawing(284, parts)


DRAWINGS: dict[str, Callable[[], str]] = {
    "prefill/tiles.svg": prefill_tiles,
    "prefill/fragments.svg": prefill_fragments,
    "prefill/swizzle.svg": prefill_swizzle,
    "prefill/stages.svg": prefill_stages,
    "prefill/turns.svg": prefill_turns,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
