"""The drawings of explanation/paged_attention_kernels.md: ``python docs/scripts/draw_kernels.py`` writes them.

Lanes, vectors and partitions are computed from the constants that the kernels are compiled with, and the tests compare
the files with what this draws: a kernel that changes changes its drawings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pagedkv.kernels.paged.config import PARTITION_SIZE, WARP_SIZE, AttentionConfig
from pagedkv.visible import Visible

IMAGES = Path(__file__).parents[1] / "images"
WIDTH = 760
INK, GREY, PALE, LINE = "#1f2933", "#52606d", "#7b8794", "#9aa5b1"
WHITE, SHADE, ACCENT = "#fff", "#f2f4f7", "#b44d12"
COLOURS = ("#ffd9a8", "#bfe3c6", "#bcd4f5", "#e6c9ef")
HEAD_DIM = 64
VECTOR_BYTES = 16


def config_of(block_size: int) -> AttentionConfig:
    """What the drawings are of: float16, D = 64."""
    return AttentionConfig(head_dim=HEAD_DIM, block_size=block_size, q_kind="float16", kv_kind="float16")


def text(x: float, y: float, words: object, size: int = 12, anchor: str = "start", fill: str = INK, **more: str) -> str:
    """A line of text."""
    other = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    words = str(words).replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{other}>{words}</text>'


def title(x: float, y: float, words: str) -> str:
    """The heading of a part of a drawing."""
    return text(x, y, words, 14, font_weight="bold")


def box(
    x: float, y: float, width: float, height: float, fill: str = WHITE, stroke: str = LINE, words: object = ""
) -> str:
    """A rectangle with words in its middle."""
    lines = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}"/>'
    return lines + (text(x + width / 2, y + height / 2 + 4, words, 10, "middle") if words != "" else "")


def arrow(path: str) -> str:
    """A line with a tip."""
    return f'<path d="{path}" fill="none" stroke="{ACCENT}" stroke-width="1.4" marker-end="url(#tip)"/>'


def drawing(height: int, parts: list[str]) -> str:
    """A whole file."""
    tip = (
        '<marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{ACCENT}"/></marker>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif">\n<defs>{tip}</defs>\n'
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def key_addresses() -> str:
    """From a token of a sequence to the vectors of its key."""
    config, token, head, num_kv_heads, table = config_of(16), 20, 1, 2, (7, 2, 5)
    size, num_vecs = config.block_size, HEAD_DIM // config.vec_size
    column, offset = divmod(token, size)
    entry, below = 49 + 58 * column, 20 + 84 * table[column]
    parts = [title(20, 30, f"1  token {token} of a sequence: row of block_tables, P = {size}")]
    for j, block in enumerate(table):
        parts += [
            text(49 + 58 * j, 52, f"column {j}", 10, "middle", GREY),
            box(20 + 58 * j, 58, 58, 26, COLOURS[0] if j == column else WHITE, INK, block),
        ]
    parts += [
        text(214, 68, f"column = {token} // {size} = {column}, so block {table[column]}", fill=GREY),
        text(214, 84, f"offset = {token} % {size} = {offset}", fill=GREY),
        title(290, 122, "2  k_cache (N, Hkv, D/x, P, x): blocks, and their KV heads"),
        arrow(f"M{entry} 86 C {entry} 140, {42 + below} 100, {42 + below} 132"),
    ]
    for block in range(8):
        x = 20 + 84 * block
        parts.append(text(x + 42, 182, f"block {block}", 10, "middle", GREY))
        for h in range(num_kv_heads):
            chosen = block == table[column] and h == head
            parts.append(box(x + 42 * h, 136, 42, 32, COLOURS[0] if chosen else WHITE, LINE, f"head {h}"))
        parts.append(box(x, 136, 84, 32, "none", INK))
    x = below + 42 * head
    parts += [
        arrow(f"M{x + 21} 170 C {x + 21} 205, 240 196, 240 222"),
        title(290, 216, f"3  that head: D/x = {num_vecs} rows of P = {size} vectors of 16 bytes"),
    ]
    left, top, wide, high = 110, 248, 30, 20
    for t in range(size):
        parts.append(text(left + wide * t + wide / 2, top - 6, t, 10, "middle", ACCENT if t == offset else GREY))
    for v in range(num_vecs):
        parts.append(text(left - 8, top + high * v + 14, f"byte {v * size * VECTOR_BYTES}", 10, "end", GREY))
        for t in range(size):
            parts.append(box(left + wide * t, top + high * v, wide, high, COLOURS[0] if t == offset else WHITE))
        first = v * config.vec_size
        parts.append(
            text(
                left + wide * size + 10,
                top + high * v + 14,
                f"d {first} to {first + config.vec_size - 1}",
                10,
                fill=GREY,
            )
        )
    bottom = top + high * num_vecs
    parts += [
        text(left - 8, top - 6, "offset", 10, "end", GREY),
        text(20, bottom + 26, f"The orange column is the key of token {token}: vector v of it begins at"),
        text(
            20,
            bottom + 46,
            f"block * k_block_stride + head * k_head_stride + offset * 16 + v * P * 16  "
            f"= {table[column]} * {num_kv_heads * num_vecs * size * VECTOR_BYTES} + {head} * "
            f"{num_vecs * size * VECTOR_BYTES} + {offset} * 16 + v * {size * VECTOR_BYTES} bytes",
            fill=ACCENT,
        ),
    ]
    return drawing(bottom + 64, parts)


def key_lanes() -> str:
    """Which lane of a warp reads which vector of the keys of a chunk."""
    parts, top = [], 20
    for block_size in (16, 8):
        config = config_of(block_size)
        lanes, num_vecs = config.thread_group_size, HEAD_DIM // config.vec_size
        left, wide, high = 110, 30, 20
        words = f"P = {block_size}: thread groups of {lanes} lanes, {num_vecs // lanes} vectors a lane"
        parts += [title(20, top + 12, words), text(left - 8, top + 34, "token", 10, "end", GREY)]
        top += 40
        for t in range(block_size):
            parts.append(text(left + wide * t + wide / 2, top - 6, t, 10, "middle", GREY))
        for v in range(num_vecs):
            parts.append(text(left - 8, top + high * v + 14, f"vector {v}", 10, "end", GREY))
            for t in range(block_size):
                lane = t * lanes + v % lanes
                parts.append(box(left + wide * t, top + high * v, wide, high, COLOURS[v % lanes], LINE, lane))
        for j in range(num_vecs // lanes):
            y = top + high * lanes * j
            parts += [
                box(left, y, wide * block_size, high * lanes, "none", INK),
                text(
                    left + wide * block_size + 10,
                    y + high * lanes / 2 + 4,
                    f"load {j}: bytes {j * WARP_SIZE * VECTOR_BYTES} to {(j + 1) * WARP_SIZE * VECTOR_BYTES - 1}",
                    10,
                    fill=GREY,
                ),
            ]
        top += high * num_vecs + 26
    parts += [
        text(20, top + 4, "A number is the lane that reads these 16 bytes; a colour is a lane of its thread group."),
        text(20, top + 24, "One load of a warp is a framed part: 32 lanes, 512 bytes side by side."),
    ]
    return drawing(top + 42, parts)


def value_rows() -> str:
    """Which lane reads which vector of V, and what becomes of tokens past the end."""
    config, seq_len, column = config_of(16), 20, 1
    size, vec_size, vecs = config.block_size, config.v_vec_size, config.num_v_vecs_per_row
    used = seq_len - column * size
    left, top, wide, high = 110, 66, 30, 20
    words = f"v_cache (N, Hkv, D, P): the second block of a sequence of {seq_len} tokens, P = {size}"
    parts = [title(20, 30, words), text(left - 8, top - 6, "token", 10, "end", GREY)]
    for t in range(size):
        parts.append(text(left + wide * t + wide / 2, top - 6, column * size + t, 10, "middle", GREY))
    per_iter = config.num_rows_per_iter
    shown = (0, 1, 2, None, per_iter - 1, per_iter, per_iter + 1, None, HEAD_DIM - 1)
    for i, d in enumerate(shown):
        y = top + high * i
        if d is None:
            parts.append(text(left + wide * size / 2, y + 14, "...", 12, "middle", GREY))
            continue
        parts.append(text(left - 8, y + 14, f"d {d}", 10, "end", GREY))
        for vec in range(vecs):
            read = vec * vec_size < used
            for t in range(vec * vec_size, (vec + 1) * vec_size):
                fill = COLOURS[1] if t < used else SHADE if read else WHITE
                parts.append(box(left + wide * t, y, wide, high, fill, "#d5dae0"))
            lane, acc = d % per_iter * vecs + vec, d // per_iter
            words = f"lane {lane}, accs[{acc}]"
            place = left + wide * (vec + 0.5) * vec_size
            parts += [
                box(left + wide * vec * vec_size, y, wide * vec_size, high, "none", INK),
                text(place, y + 14, words, 10, "middle", INK if read else PALE),
            ]
    y = top + high * len(shown) + 20
    for x, fill, words in ((20, COLOURS[1], "used"), (110, SHADE, "read and selected away"), (290, WHITE, "not read")):
        parts += [box(x, y, 14, 14, fill, INK), text(x + 20, y + 12, words)]
    words = ", ".join("0xffffffff" if 2 * w < used else "0" for w in range(vec_size // 2))
    parts += [
        text(
            20,
            y + 40,
            f"A frame is one load of a lane: {vec_size} tokens of one row. Its masks here: {words} (2 tokens a word).",
            12,
        ),
        text(
            20,
            y + 60,
            f"A lane has {config.num_rows_per_thread} sums, of rows {per_iter} apart. "
            "Lanes 2r and 2r + 1 add theirs up at the end.",
            12,
        ),
    ]
    return drawing(y + 78, parts)


def partitions() -> str:
    """The partitions of a sequence, without and with a window, and their reduction."""
    seq_len, capacity, window = 1300, 2048, 600
    scale, left = 620 / capacity, 120
    parts = [title(20, 30, f"v2: a sequence of {seq_len} tokens in a table of {capacity}")]
    top = 60
    for visible, words in ((Visible(), "no window"), (Visible(window - 1), f"window = {window}")):
        first = seq_len - visible.most_keys(seq_len)
        needed = visible.most_units(PARTITION_SIZE, capacity)
        parts += [text(20, top + 18, words), text(20, top + 36, f"grid y = {needed}", 10, fill=GREY)]
        parts.append(box(left, top, capacity * scale, 28, WHITE, LINE))
        for y in range(needed):
            start = (first // PARTITION_SIZE + y) * PARTITION_SIZE
            low, high = max(first, start), min(seq_len, start + PARTITION_SIZE)
            if low < high:
                name = f"{low} to {high - 1}"
                parts.append(box(left + low * scale, top, (high - low) * scale, 28, COLOURS[y], INK, name))
            middle = left + (start + PARTITION_SIZE / 2) * scale
            label = f"blockIdx.y = {y}" + ("" if low < high else ": returns at once")
            if start < capacity:
                parts.append(text(middle, top + 44, label, 10, "middle", GREY))
            else:
                parts.append(text(left + capacity * scale, top + 58, label, 10, "end", GREY))
        for token in range(0, capacity + 1, PARTITION_SIZE):
            parts.append(f'<path d="M{left + token * scale:g} {top - 6} v40" stroke="{PALE}" stroke-dasharray="2 3"/>')
            parts.append(text(left + token * scale, top - 10, token, 10, "middle", GREY))
        top += 92
    parts += [title(20, top + 12, "What each leaves, and the reduction (one thread block per query head)")]
    top += 30
    for i in range(3):
        x = 120 + 170 * i
        parts += [
            box(x, top, 150, 26, COLOURS[i], INK, f"tmp_out[{i}]: D float32"),
            box(x, top + 26, 75, 22, COLOURS[i], INK, f"max_logits[{i}]"),
            box(x + 75, top + 26, 75, 22, COLOURS[i], INK, f"exp_sums[{i}]"),
            arrow(f"M{x + 75} {top + 50} C {x + 75} {top + 74}, 375 {top + 62}, 375 {top + 84}"),
        ]
    top += 88
    parts += [
        box(
            135,
            top,
            480,
            26,
            WHITE,
            INK,
            "w[i] = exp_sums[i] * exp(max_logits[i] - m),   m = the largest of max_logits and the sink",
        ),
        arrow(f"M375 {top + 28} v16"),
        box(135, top + 48, 480, 26, WHITE, INK, "out = sum(w[i] * tmp_out[i]) / (sum(w[i]) + exp(sink - m))"),
    ]
    return drawing(top + 92, parts)


DRAWINGS: dict[str, Callable[[], str]] = {
    "paged/key-addresses.svg": key_addresses,
    "paged/key-lanes.svg": key_lanes,
    "paged/value-rows.svg": value_rows,
    "paged/partitions.svg": partitions,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
