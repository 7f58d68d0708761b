"""The inner loop of the split kernel on CUDA cores: float32 queries over any cache, and the form to read first.

`lanes` neighbouring lanes share a token: each has every lanes-th vector of 4 elements of its row, and of q. Elements of
16 and 8 bits wait in registers as they are in the cache, and become float32 where they are multiplied. A request
of a warp is 32 / lanes tokens, a step of the loop is `requests` of them, and a warp takes every fourth step of its
split. The online softmax runs once for the `requests` tokens of a lane; groups of lanes are added after the loop.

K of the next step and V of this one are in flight. Loads are unconditional: past the end they load the last token. The
last step of a warp stands behind the loop; it alone masks tokens past the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..device.conversions import unpack
from ..device.intrinsics.thread import address, assign, bits_float, clear, larger, load_16, local_array, unrolled
from ..device.intrinsics.warp import (
    exchange,
    low_bits,
    shuffle,
    shuffle_float,
    store_shared_4,
    stream_4,
    stream_8,
    stream_16,
)
from ..device.language import float32, int64, uint32
from ..device.logits import LOG2E, NONE, make_modify
from ..device.merging import weight_of
from ..device.sizes import WARP_SIZE
from ..device.source import Steps, device_function
from .config import NUM_WARPS, SplitConfig
from .lanes import make_lanes, make_row_lookup
from .sums import warp_group_bytes

VECTOR = 4  # elements
MOST_VECTORS = 4  # of a lane and row, which 32 lanes have of 512 dims


@dataclass(frozen=True, slots=True)
class LaneShape:
    """How the lanes of a warp share the rows of a config."""

    config: SplitConfig

    @property
    def row_vectors(self) -> int:
        return self.config.head_dim // VECTOR

    @property
    def lanes(self) -> int:
        """Lanes of a token: the power of two that wastes least, the largest if several do."""
        powers = [n for n in (32, 16, 8, 4, 2, 1) if -(-self.row_vectors // n) <= MOST_VECTORS]
        return min(powers, key=lambda n: -(-self.row_vectors // n) * n)

    @property
    def vectors(self) -> int:
        """Vectors of a lane; the last one may reach past the row."""
        return -(-self.row_vectors // self.lanes)

    @property
    def tokens(self) -> int:
        """Tokens of a request."""
        return WARP_SIZE // self.lanes

    @property
    def words(self) -> int:
        """Words of a vector of a cache, for as many bytes of an element."""
        return self.config.kv_bytes

    @property
    def requests(self) -> int:
        """Tokens of a lane and step: before 9.0 shuffles in a loop take registers from rows in flight."""
        most_vectors = 8 if self.config.architecture >= 9 else 4
        return min(most_vectors // self.vectors, self.lanes)

    @property
    def step(self) -> int:
        """Tokens of a step, at most one for each lane."""
        return self.requests * self.tokens


def make_attend_on_cuda_cores(config: SplitConfig, sums_layout: Steps) -> Any:
    """The device function ``attend_split(...)``: a warp attends to its tokens of the split, and stores its sums."""
    shape = LaneShape(config)
    STEP, TURN, HEADS = shape.step, NUM_WARPS * shape.step, config.num_heads
    LANES, MODIFIED = shape.lanes, config.modified
    SHIFT = LANES.bit_length() - 1
    NUM_BUFFERED, NUM_SCORES = shape.requests * shape.vectors * shape.words, shape.requests * HEADS
    LANE_BYTES = 4 * shape.words
    NUM_SUMS = HEADS * shape.vectors * VECTOR
    lookup = make_row_lookup(config, make_lanes(config).fetch)
    BY_ROW = config.by_row
    rows, scores = make_rows(shape, lookup.row_address), make_scores(shape)
    update, store_sums = make_update(shape), make_store_sums(shape, sums_layout)

    @unrolled(HEADS)
    def start(h, maxima, sums, slope, slopes, query):
        maxima[h], sums[h] = NONE, float32(0)
        has_slope = MODIFIED and address(slopes) != 0 and h < query.num_heads
        slope[h] = slopes[int64(query.head) + h] if has_slope else float32(0)

    @device_function
    def attend_split(thread, first, query, k, v, pages, options, shared):
        lane = uint32(thread & 31)
        # Broadcast, so that ptxas knows it to be warp-uniform: shuffles in the loop need no code for diverged lanes.
        warp, last = shuffle(uint32(thread >> 5), 0), pages.last
        sub, group = uint32(lane & (LANES - 1)), uint32(lane >> SHIFT)
        k_lane, v_lane = k.address + int64(sub) * LANE_BYTES, v.address + int64(sub) * LANE_BYTES
        keys, values = local_array(NUM_BUFFERED, uint32), local_array(NUM_BUFFERED, uint32)
        s, slope = local_array(NUM_SCORES, float32), local_array(HEADS, float32)
        q, o = local_array(NUM_SUMS, float32), local_array(NUM_SUMS, float32)
        maxima, sums = local_array(HEADS, float32), local_array(HEADS, float32)
        clear(o, NUM_SUMS)
        start(maxima, sums, slope, options.slopes, query)

        # The longest dependency chain first: table entries of the first two steps, then the first keys.
        base, mine = uint32(first + warp * STEP), uint32(lane & (STEP - 1))
        block, position = lookup.find_token(pages, uint32(base + mine))
        k_offset = lookup.row_offset(k, block, position)
        v_offset = lookup.row_offset(v, block, position)
        scales = lookup.scales_of(pages, block, position)
        block, position = lookup.find_token(pages, uint32(base + mine + TURN))
        rows.load(keys, k_lane, k_offset, group, sub)
        rows.load_query(q, query, options.scale if MODIFIED else float32(options.scale * LOG2E), sub)

        if base <= last:
            rows.load(values, v_lane, v_offset, group, sub)
            while uint32(base + TURN) <= last:
                scores.dot(s, keys, q)
                k_offset = lookup.row_offset(k, block, position)
                v_offset = lookup.row_offset(v, block, position)
                of_next = lookup.scales_of(pages, block, position)
                block, position = lookup.find_token(pages, uint32(base + mine + 2 * TURN))
                rows.load(keys, k_lane, k_offset, group, sub)
                scores.add_lanes(s)
                if BY_ROW:
                    scores.multiply_rows(s, scales[0], group)
                if MODIFIED:
                    scores.logits(s, slope, options, query, uint32(base + group))
                update(s, values, maxima, sums, o, scales[1], group)
                rows.load(values, v_lane, v_offset, group, sub)
                base, scales = uint32(base + TURN), of_next
            scores.dot(s, keys, q)
            scores.add_lanes(s)
            if BY_ROW:
                scores.multiply_rows(s, scales[0], group)
            if MODIFIED:
                scores.logits(s, slope, options, query, uint32(base + group))
            valid = low_bits(uint32(last - base + 1))
            scores.mask(s, values, valid, group)
            update(s, values, maxima, sums, o, scales[1], group)
        store_sums(shared, maxima, sums, o, query.num_heads, group, sub, warp)

    return attend_split


def make_rows(shape: LaneShape, row_address: Any) -> Steps:
    """The device functions ``load`` and ``load_query``, for a lane's vectors; what lies past a row becomes 0."""
    VECTORS, TOKENS, LANES = shape.vectors, shape.tokens, shape.lanes
    ROW_VECTORS, FULL = shape.row_vectors, shape.row_vectors // shape.lanes
    WORDS, NBYTES, stream = shape.words, 4 * shape.words, {1: stream_4, 2: stream_8, 4: stream_16}[shape.words]

    @unrolled(WORDS)
    def zero_outside(i, buffer, at, is_inside):
        buffer[at + i] = buffer[at + i] if is_inside else uint32(0)

    @unrolled(VECTORS)
    def load_vectors(n, u, buffer, row, sub):
        is_inside = n < FULL or sub < ROW_VECTORS - n * LANES
        at = (u * VECTORS + n) * WORDS
        assign(buffer, at, stream(row + NBYTES * LANES * n if is_inside else row - NBYTES * int64(sub)))
        zero_outside(buffer, at, is_inside)

    @unrolled(shape.requests)
    def load(u, buffer, base, offset, group, sub):
        """Load this lane's vectors of its tokens' rows."""
        load_vectors(u, buffer, row_address(base, offset, uint32(group + u * TOKENS)), sub)

    @unrolled(shape.config.num_heads * VECTORS)
    def load_query(i, q, query, scale, sub):
        """Load q, and scale it."""
        h, n = i // VECTORS, i % VECTORS
        is_inside = h < query.num_heads and sub < ROW_VECTORS - n * LANES
        x = load_16(query.address + (h * query.head_stride + 16 * (int64(sub) + LANES * n) if is_inside else int64(0)))
        factor, zero = scale if is_inside else float32(0), uint32(0)
        x = x if is_inside else (zero, zero, zero, zero)
        a, b = float32(bits_float(x[0]) * factor), float32(bits_float(x[1]) * factor)
        c, d = float32(bits_float(x[2]) * factor), float32(bits_float(x[3]) * factor)
        assign(q, i * VECTOR, (a, b, c, d))

    return Steps(load, load_query)


def make_widen(shape: LaneShape) -> Any:
    """The device function ``widen(wide, words)``: the elements of a lane's vectors, as float32."""
    PER_WORD, unpack_word = VECTOR // shape.words, unpack(shape.config.kv_kind, shape.config.hardware_fp8)

    @unrolled(shape.requests * shape.vectors * shape.words)
    def widen(i, wide, words):
        assign(wide, i * PER_WORD, unpack_word(words[i]))

    return widen


def make_multiply_rows(shape: LaneShape) -> Any:
    """The device function ``multiply_rows(s, scale, group)``: numbers of tokens times the scales that lanes have."""
    HEADS, TOKENS = shape.config.num_heads, shape.tokens

    @unrolled(HEADS)
    def multiply_heads(h, u, s, scale):
        s[u * HEADS + h] = float32(s[u * HEADS + h] * scale)

    @unrolled(shape.requests)
    def multiply_rows(u, s, scale, group):
        multiply_heads(u, s, shuffle_float(scale, uint32(group + u * TOKENS)))

    return multiply_rows


def make_scores(shape: LaneShape) -> Steps:
    """The device functions from q and keys to logits, one for each of a lane's tokens and each head."""
    HEADS, TOKENS, ELEMENTS = shape.config.num_heads, shape.tokens, shape.vectors * VECTOR
    SCORES, WORDS_OF_TOKEN = shape.requests * HEADS, shape.vectors * shape.words
    NUM_WIDE, widen = shape.requests * ELEMENTS, make_widen(shape)
    modify = make_modify(shape.config.score_mod)

    @unrolled(SCORES * ELEMENTS)
    def add_products(step, s, keys, query):
        i, j = step // ELEMENTS, step % ELEMENTS
        u, h = i // HEADS, i % HEADS
        if j == 0:
            s[i] = float32(0)
        s[i] = float32(s[i] + keys[u * ELEMENTS + j] * query[h * ELEMENTS + j])

    @device_function
    def dot(s, keys, query):
        """Compute this lane's part of q . k."""
        wide = local_array(NUM_WIDE, float32)
        widen(wide, keys)
        add_products(s, wide, query)

    @unrolled(SCORES * (shape.lanes.bit_length() - 1))
    def add_lanes(step, s):
        """Add the parts of q . k in all lanes of a token."""
        i = step % SCORES
        s[i] = float32(s[i] + exchange(s[i], uint32(1 << (step // SCORES))))

    multiply_rows = make_multiply_rows(shape)

    @unrolled(SCORES)
    def logits(i, s, slope, options, query, position):
        """Turn q . k into modified logits, in units of log(2).

        A score_mod never sees a token past the last one, or a missing head, but the last one in its place.
        """
        u, h = i // HEADS, i % HEADS
        k_pos = min(uint32(position + u * TOKENS), options.q_pos)
        mine = uint32(query.head + min(uint32(h), uint32(query.num_heads - 1)))
        x = modify(s[i], options.softcap, slope[h], int64(options.q_pos), int64(k_pos), mine, options.seq)
        s[i] = float32(x * LOG2E)

    @unrolled(SCORES)
    def mask_scores(i, s, mine):
        s[i] = s[i] if uint32(mine & (1 << (i // HEADS * TOKENS))) != 0 else NONE

    @unrolled(shape.requests * WORDS_OF_TOKEN)
    def mask_words(i, values, mine):
        values[i] = values[i] if uint32(mine & (1 << (i // WORDS_OF_TOKEN * TOKENS))) != 0 else uint32(0)

    @device_function
    def mask(s, values, valid, group):
        """Remove the tokens whose bit in `valid` is not set."""
        mask_scores(s, uint32(valid >> group))
        mask_words(values, uint32(valid >> group))

    return Steps(dot, add_lanes, multiply_rows, logits, mask)


def make_update(shape: LaneShape) -> Any:
    """The device function ``update(s, values, maxima, sums, o, scale, group)``: the online softmax of a lane's tokens.

    `scale` is that of the value of the token that the lane has looked up.
    """
    HEADS, ELEMENTS = shape.config.num_heads, shape.vectors * VECTOR
    SCORES, NUM_WIDE = shape.requests * HEADS, shape.requests * ELEMENTS
    BY_ROW, widen, multiply_rows = shape.config.by_row, make_widen(shape), make_multiply_rows(shape)

    @unrolled(SCORES)
    def raise_maxima(i, new, s):
        new[i % HEADS] = larger(new[i % HEADS], s[i])

    @unrolled(ELEMENTS)
    def rescale_sums(j, h, o, factor):
        o[h * ELEMENTS + j] = float32(o[h * ELEMENTS + j] * factor)

    @unrolled(HEADS)
    def rescale(h, maxima, sums, new, o):
        factor = weight_of(maxima[h], new[h])
        maxima[h], sums[h] = new[h], float32(sums[h] * factor)
        rescale_sums(h, o, factor)

    @unrolled(SCORES)
    def weigh(i, s, maxima, sums):
        h = i % HEADS
        s[i] = weight_of(s[i], maxima[h])
        sums[h] = float32(sums[h] + s[i])

    @unrolled(SCORES * ELEMENTS)
    def add_values(step, s, values, o):
        i, j = step // ELEMENTS, step % ELEMENTS
        u, at = i // HEADS, i % HEADS * ELEMENTS + j
        o[at] = float32(o[at] + s[i] * values[u * ELEMENTS + j])

    @device_function
    def update(s, values, maxima, sums, o, scale, group):
        new = local_array(HEADS, float32)
        for h in range(HEADS):
            new[h] = maxima[h]
        raise_maxima(new, s)
        rescale(maxima, sums, new, o)
        weigh(s, maxima, sums)
        if BY_ROW:
            multiply_rows(s, scale, group)
        wide = local_array(NUM_WIDE, float32)
        widen(wide, values)
        add_values(s, wide, o)

    return update


def make_store_sums(shape: LaneShape, sums_layout: Steps) -> Any:
    """The device function ``store_sums(...)``: adds the sums of a warp's groups of lanes, and stores them."""
    HEADS, VECTORS, LANES, ROW_VECTORS = shape.config.num_heads, shape.vectors, shape.lanes, shape.row_vectors
    FIRST, WARP_GROUP_BYTES = shape.lanes.bit_length() - 1, warp_group_bytes(shape.config)

    @device_function
    def sum_of_groups(x):
        for b in range(FIRST, 5):
            x = float32(x + exchange(x, uint32(1 << b)))
        return x

    @unrolled(VECTORS)
    def store_vectors(n, h, where, o, factor, num_heads, group, sub):
        at = (h * VECTORS + n) * VECTOR
        a, b = sum_of_groups(float32(o[at] * factor)), sum_of_groups(float32(o[at + 1] * factor))
        c, d = sum_of_groups(float32(o[at + 2] * factor)), sum_of_groups(float32(o[at + 3] * factor))
        vector = uint32(sub + LANES * n)
        if group == 0 and vector < ROW_VECTORS and h < num_heads:
            target = sums_layout.pair_address(where, uint32(h), uint32(vector << 1), int64(0))
            store_shared_4(target, a, b, c, d)

    @unrolled(HEADS)
    def store_sums(h, shared, maxima, sums, o, num_heads, group, sub, warp):
        maximum = maxima[h]
        for b in range(FIRST, 5):
            maximum = larger(maximum, exchange(maximum, uint32(1 << b)))
        factor = weight_of(maxima[h], maximum)
        total = sum_of_groups(float32(sums[h] * factor))
        if group == 0 and sub == 0 and h < num_heads:
            at = int64(warp) * HEADS + h
            shared.maxima[at], shared.sums[at] = maximum, total
        store_vectors(h, uint32(shared.address + warp * WARP_GROUP_BYTES), o, factor, num_heads, group, sub)

    return store_sums
