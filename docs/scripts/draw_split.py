"""Drawings of explanation/split_kernel.md: ``python docs/scripts/draw_split.py`` writes them.

Splits and steps are computed from the kernel's constants. Which lane has what is read off the kernel's own steps
(split_lanes.py). The tests compare the files with what this draws: a kernel that changes changes its drawings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from draw_kernels import ACCENT, COLOURS, GREY, IMAGES, INK, LINE, PALE, SHADE, WHITE, arrow, box, drawing, text, title
from split_lanes import CONFIG, SHAPE, key, logits_of, place_in_a, place_in_c, query, rows_of_values, value

from pagedkv.kernels.device.sizes import WARP_SIZE
from pagedkv.kernels.split.config import NUM_WARPS
from pagedkv.kernels.split.shape import K_VECTOR, TILE, TensorShape

CAPACITY, LENGTHS, NUM_KV_HEADS = 2560, (2300, 600, 21), 32
LANE, WORD = 6, 1  # whose registers are shown in detail, and of which word of its vectors of V
QUARTERS = range(4)


def span(values: list[int]) -> str:
    """Neighbouring numbers as words."""
    assert values == list(range(values[0], values[-1] + 1))
    return f"{values[0]}, {values[1]}" if len(values) == 2 else f"{values[0]} to {values[-1]}"


def piece_of(lane: int, x: float, y: float, width: float, height: float) -> str:
    """What a lane has, in the colour of its t."""
    return box(x, y, width, height, COLOURS[lane % 4], INK if lane == LANE else LINE, f"lane {lane}")


def split_work() -> str:
    """Sequences to splits, a split to warps, and everything back into one row of the output."""
    left, scale, most = 150, 560 / CAPACITY, CONFIG.most_splits(CAPACITY, NUM_KV_HEADS)
    parts = [
        title(20, 30, f"1  three sequences in tables of {CAPACITY} tokens: blockIdx.y is the split, grid y = {most}")
    ]
    top = 52
    for i, length in enumerate(LENGTHS):
        size = CONFIG.split_size(length, NUM_KV_HEADS)
        count = -(-length // size)
        parts += [
            text(20, top + 14, f"sequence {i}"),
            text(20, top + 30, f"{length} tokens", 11, fill=GREY),
            box(left, top, CAPACITY * scale, 28, WHITE, LINE),
        ]
        for y in range(count):
            width = min(size, length - y * size) * scale
            name = f"y = {y}" if width > 40 else ""
            parts.append(box(left + y * size * scale, top, width, 28, COLOURS[y % 4], INK, name))
        plural = f"{count} splits of {size}" if count > 1 else "1 split"
        parts.append(text(left, top + 43, f"{plural}; y = {count} to {most - 1} end at once", 11, fill=GREY))
        top += 62
    words = f"x is sequence * num_kv_heads + KV head: each bar stands once for each of them. D = {CONFIG.head_dim}, "
    parts.append(text(20, top + 8, f"{words}G = {CONFIG.group_size}, float16, {NUM_KV_HEADS} KV heads.", 12))
    top += 44

    size = CONFIG.split_size(LENGTHS[1], NUM_KV_HEADS)
    steps = size // SHAPE.step
    words = f"2  a thread block: a split of {size} tokens is {steps} steps of {SHAPE.step}, dealt to {NUM_WARPS} warps"
    parts.append(title(20, top, words))
    wide = 720 / steps
    for step in range(steps):
        warp = step % CONFIG.num_warp_groups
        parts.append(box(20 + wide * step, top + 14, wide, 28, COLOURS[warp], INK, f"warp {warp}"))
        if step % NUM_WARPS == 0 or step == steps - 1:
            words = f"{step * SHAPE.step}" if step < steps - 1 else f"{size - 1}"
            x = 20 + wide * (step + (step == steps - 1))
            parts.append(text(x, top + 57, words, 10, "end" if step == steps - 1 else "start", GREY))
    parts.append(text(290, top + 57, "token of the split", 10, "middle", GREY))
    top += 94

    parts.append(title(20, top, "3  coming together"))
    for warp in range(NUM_WARPS):
        x = 20 + 85 * warp
        parts += [
            box(x, top + 14, 78, 26, COLOURS[warp], INK, "m, l, O"),
            text(x + 39, top + 54, f"warp {warp}", 10, "middle", GREY),
        ]
    parts += [
        arrow(f"M362 {top + 27} h34"),
        box(400, top + 14, 160, 26, SHADE, INK, "added in shared memory"),
        arrow(f"M562 {top + 27} h44"),
        box(610, top + 14, 130, 26, WHITE, INK, "out, lse"),
        text(586, top + 10, "one split", 10, "middle", GREY),
        arrow(f"M480 {top + 42} v38"),
        text(490, top + 66, "several", 10, fill=GREY),
    ]
    top += 84
    count = -(-LENGTHS[0] // CONFIG.split_size(LENGTHS[0], NUM_KV_HEADS))
    for y in range(count):
        parts.append(box(330 + 82 * y, top, 78, 26, COLOURS[y % 4], INK, f"m, l, O of {y}"))
    parts += [
        text(20, top + 12, "workspace in global memory, float32"),
        text(20, top + 28, "fence, barrier, then one atomic count", 11, fill=GREY),
        arrow(f"M535 {top + 30} v30"),
        text(545, top + 50, f"in the block that counts as number {count}", 10, fill=GREY),
        box(330, top + 64, 406, 26, SHADE, INK, "fence; all partial results added in the order of their splits"),
        arrow(f"M535 {top + 92} v24"),
        box(470, top + 120, 130, 26, WHITE, INK, "out, lse"),
        text(20, top + 81, "the counter has gone back to 0", 11, fill=GREY),
    ]
    return drawing(top + 162, parts)


def split_scores() -> str:
    """Which lane has which elements in S = Q K^T."""
    g, t = divmod(LANE, 4)
    left, top, wide, high = 84, 66, 56, 18
    parts, framed = [title(20, 30, f"1  K: {K_VECTOR} bytes of each token's row")], []
    for piece in QUARTERS:
        parts.append(text(left + wide * (piece + 0.5), top - 6, f"byte {16 * piece}", 10, "middle", GREY))
    for n in range(2):
        for lane in range(WARP_SIZE):
            token, dim = key(lane, n, 0, 0)[0]
            piece = dim * CONFIG.kv_bytes // 16
            x, y = left + wide * piece, top + high * token
            (framed if lane == LANE else parts).append(piece_of(lane, x, y, wide, high))
            if piece == 0:
                parts += [
                    text(left - 8, y + 13, f"token {token}", 10, "end", GREY),
                    text(left + 4 * wide + 8, y + 13, f"B {n}, column {lane // 4}", 10, fill=ACCENT if n else GREY),
                ]
    parts += framed
    parts.append(text(20, top + high * TILE + 20, "Every lane loads two rows, one for each of two products.", 11))

    x, wide = 430, 76
    parts.append(title(x, 30, f"2  lane {LANE} (g = {g}, t = {t}): operands"))
    parts.append(text(x, 56, f"K, token {key(LANE, 0, 0, 0)[0][0]}: its 16 bytes, as loaded", 11))
    for step in range(2):
        for register in range(2):
            dims = [dim for _, dim in key(LANE, 0, step, register)]
            at = x + wide * (2 * step + register)
            parts += [
                box(at, 80, wide, 24, COLOURS[t], INK, f"d {span(dims)}"),
                text(at + wide / 2, 118, f"b{register}", 11, "middle", ACCENT),
            ]
        parts.append(text(x + wide * (2 * step + 1), 74, f"k16 step {step}", 10, "middle", GREY))
    parts.append(text(x, 148, "Q: the same dims in the same places", 11))
    for half in range(2):
        y = 160 + 34 * half
        for column in range(2):
            register = half + 2 * column
            elements = query(LANE, register)
            at = x + 100 + 102 * column
            words = f"a{register}: d {span([dim for _, dim in elements])}"
            parts.append(box(at, y, 102, 24, SHADE, INK, words))
        row, _ = place_in_a(LANE, half)
        parts.append(text(x, y + 16, f"row {row}: head {elements[0][0]}", 11, fill=GREY))
    parts += [
        text(x, 244, "Folded: rows 0 to 7 have step 0 of heads 0 to 7,", 11),
        text(x, 259, "rows 8 to 15 have step 1 of the same heads.", 11),
    ]

    y = 292
    for step in range(2):
        at = x + 166 * step
        parts += [
            box(at, y, 44, 30, WHITE, INK, "step 0"),
            box(at, y + 30, 44, 30, SHADE, INK, "step 1"),
            text(at + 51, y + 34, "x", 12, "middle"),
            box(at + 58, y + 10, 36, 40, SHADE if step else WHITE, INK, "step 1" if step else "step 0"),
            text(at + 101, y + 34, "=", 12, "middle"),
            text(at + 22, y - 5, "Q", 10, "middle", GREY),
            text(at + 76, y - 5, "K", 10, "middle", GREY),
        ]
        for half in range(2):
            good = half == step
            words = "" if good else "unused"
            parts.append(
                box(at + 108, y + 30 * half, 42, 30, COLOURS[0] if good else WHITE, INK if good else LINE, words)
            )
    parts.append(text(x, y + 76, "S is the sum of the two orange halves.", 11))

    top = y + 146
    parts.append(title(20, top - 18, "3  S, in the accumulators: 8 heads by 16 tokens"))
    left, wide, high = 84, 40, 20
    product = {key(4 * column, n, 0, 0)[0][0]: n for n in range(2) for column in range(8)}
    for token in range(TILE):
        at = left + wide * (token + 0.5)
        parts += [
            text(at, top + 10, token, 10, "middle", GREY),
            text(at, top + 24, f"B {product[token]}", 10, "middle", ACCENT if product[token] else GREY),
        ]
    parts.append(text(left - 8, top + 10, "token", 10, "end", GREY))
    top += 30
    framed = []
    for lane in range(WARP_SIZE):
        mine = logits_of(lane)
        head, tokens = mine[0][0], [token for _, token in mine]
        assert tokens == list(range(tokens[0], tokens[0] + 4))
        at, y = left + wide * tokens[0], top + high * head
        (framed if lane == LANE else parts).append(piece_of(lane, at, y, 4 * wide, high))
    parts += framed
    for head in range(8):
        parts.append(text(left - 8, top + high * head + 14, f"head {head}", 10, "end", GREY))
    words = "A lane has four neighbouring tokens of one head: two accumulators of each product."
    return drawing(top + high * 8 + 40, [*parts, text(20, top + high * 8 + 22, words)])


def split_values() -> str:
    """Which lane has which elements in O^T = V^T P^T."""
    g, t = divmod(LANE, 4)
    left, top, wide, high = 84, 66, 78, 18
    parts, framed = [title(20, 30, f"1  V: {8 * SHAPE.v_vector} bytes of each token's row")], []
    for lane in range(WARP_SIZE):
        elements = [element for j in range(4) for register in range(4) for element in value(lane, j, register)]
        dims, tokens = sorted({d for _, d in elements}), sorted({token for token, _ in elements})
        piece = dims[0] * CONFIG.kv_bytes // SHAPE.v_vector
        for token in tokens:
            at, y = left + wide * piece, top + high * token
            (framed if lane == LANE else parts).append(piece_of(lane, at, y, wide, high))
        if lane % 4 == 0:
            parts.append(text(left + wide * (piece + 0.5), top - 6, f"d {span(dims)}", 10, "middle", GREY))
    parts += framed
    for token in range(TILE):
        parts.append(text(left - 8, top + high * token + 13, f"token {token}", 10, "end", GREY))

    top += high * TILE + 40
    parts.append(
        title(20, top, f"2  lane {LANE} (g = {g}, t = {t}): permutes pair the tokens of a word, here word {WORD}")
    )
    top += 14
    tokens = [value(LANE, WORD, register)[half][0] for register in (0, 2) for half in range(2)]
    wide = 40
    for k, token in enumerate(tokens):
        y = top + 14 + 26 * k
        parts.append(text(left - 8, y + 16, f"token {token}", 10, "end", GREY))
        for word in range(4):
            for half in range(2):
                dim = value(LANE, word, half)[0][1]
                chosen = word == WORD
                fill = COLOURS[2 * half + k // 2 % 2] if chosen else WHITE
                parts.append(
                    box(left + wide * (2 * word + half), y, wide, 24, fill, INK if chosen else LINE, f"d {dim}")
                )
    for word in range(4):
        parts.append(
            text(left + wide * (2 * word + 1), top + 9, f"word {word}", 10, "middle", ACCENT if word == WORD else GREY)
        )
    parts.append(arrow(f"M{left + 8 * wide + 8} {top + 64} h30"))
    for register in range(4):
        elements = value(LANE, WORD, register)
        y = top + 14 + 26 * (2 * (register >> 1) + register % 2)
        fill = COLOURS[2 * (register % 2) + register // 2]
        parts.append(text(466, y + 16, f"a{register}", 11, "end", ACCENT))
        for half, (token, dim) in enumerate(elements):
            parts.append(box(474 + 82 * half, y, 82, 24, fill, INK, f"d {dim}, token {token}"))
        row, columns = place_in_a(LANE, register)
        parts.append(text(648, y + 16, f"row {row}, k {span(columns)}", 10, fill=GREY))
    rows = rows_of_values(WORD)
    top += 138
    words = f"Rows 0 to 7 of the product are dims {', '.join(map(str, rows[:8]))}; rows 8 to 15 are the next of each."
    parts.append(text(20, top, words, 11))

    top += 34
    parts.append(title(20, top, f"3  lane {LANE}: P is where S was, and O comes out as V went in"))
    mine = logits_of(LANE)
    for k, (head, token) in enumerate(mine):
        register, half = divmod(k, 2)
        parts += [
            box(20 + 72 * k, top + 30, 72, 24, COLOURS[0], INK, f"h {head}, token {token}"),
            text(20 + 72 * (k + 0.5), top + 24, f"c{half} of B {register}", 10, "middle", GREY),
        ]
    parts += [text(20, top + 72, "S: head g, tokens 4t to 4t + 3", 11), arrow(f"M312 {top + 42} h60")]
    parts.append(text(340, top + 36, "exp2, pack", 10, "middle", GREY))
    for register in range(2):
        tokens = [token for _, token in mine[2 * register : 2 * register + 2]]
        at = 378 + 58 * register
        parts += [
            box(at, top + 30, 58, 24, COLOURS[0], INK, span(tokens)),
            text(at + 29, top + 24, f"b{register}", 11, "middle", ACCENT),
        ]
    parts += [text(378, top + 72, "P^T: column g", 11), arrow(f"M498 {top + 42} h28")]
    parts.append(text(510, top + 36, "mma", 10, "middle", GREY))
    for register in range(4):
        row, head = place_in_c(LANE, register)
        at, y = 532 + 104 * (register % 2), top + 14 + 26 * (register // 2)
        parts.append(box(at, y, 104, 24, COLOURS[3], INK, f"c{register}: d {rows[row]}, h {head}"))
    parts.append(text(532, top + 88, "O^T: heads 2t, 2t + 1", 11))
    return drawing(top + 106, parts)


def split_pipeline() -> str:
    """What two buffers of registers hold over two steps."""
    parts, top, left = [], 30, 116
    for head_dim in (128, 256):
        shape = TensorShape(replace(CONFIG, head_dim=head_dim))
        chunks = shape.num_chunks
        order = [f"{name}{c}" if chunks > 1 else name for name in "KV" for c in range(chunks)]
        uses = [*order, *order, order[0]]
        each = 600 / (len(uses) - 0.5)
        used = 0.45 * each
        what = "1 chunk" if chunks == 1 else f"{chunks} chunks"
        words = f"D = {head_dim}, float16: rows of {shape.config.row_bytes} bytes, {what} of K and of V"
        parts.append(title(20, top, words))
        top += 36
        for step in range(2):
            at = left + each * step * len(order)
            parts += [
                f'<path d="M{at:g} {top - 20} v100" stroke="{PALE}" stroke-dasharray="2 3"/>',
                text(at + 6, top - 10, "step i + 1" if step else "step i", 10, fill=GREY),
            ]
        for buffer in range(2):
            parts.append(text(20, top + 36 * buffer + 19, f"buffer {buffer}"))
        for i, name in enumerate(uses):
            at, y = left + each * i, top + 36 * (i % 2)
            parts.append(box(at, y, used, 28, COLOURS["KV".index(name[0])], INK, name))
            if i + 2 < len(uses):
                words = f"{uses[i + 2]} on its way"
                parts.append(box(at + used, y, 2 * each - used, 28, SHADE, LINE, words))
            if name[0] == "V" and uses[i - 1][0] == "K":
                first, last, low = at - each + used / 2, at + used / 2, top + 82
                parts += [
                    arrow(f"M{first:g} {low} C {first + 20:g} {low + 14}, {last - 20:g} {low + 14}, {last:g} {low}"),
                    text((first + last) / 2, low + 24, "S to P: softmax", 10, "middle", GREY),
                ]
        top += 148
    return drawing(top - 18, parts)


DRAWINGS: dict[str, Callable[[], str]] = {
    "split/work.svg": split_work,
    "split/scores.svg": split_scores,
    "split/values.svg": split_values,
    "split/pipeline.svg": split_pipeline,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
