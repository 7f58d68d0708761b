"""The inner loop of the split kernel on CUDA cores: caches of float32, and the form to read first.

`lanes` neighbouring lanes share a token: each has every lanes-th vector of 4 elements of its row, and of q. A request
of a warp is 32 / lanes tokens, a step of the loop is `requests` of them, and a warp takes every fourth step of its
split. The online softmax runs once for the `requests` tokens of a lane; groups of lanes are added at the very end.

K of the next step and V of this one are in flight. Loads are unconditional: past the end they load the last token. The
last step of a warp is peeled off the loop; only there are tokens past the end masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import float32, int64, uint32

from ..device.intrinsics import address, assign, bits_float, clear, exp2, for_each, larger, load_16, local_array
from ..device.logits import LOG2E, NONE, make_modify
from ..device.source import device_function
from ..device.tensor_intrinsics import ballot, exchange, low_bits, shuffle, store_shared_4, stream_16
from . import limits
from .config import NUM_WARPS, WARP_SIZE, SplitConfig
from .pages import make_find_token, make_row_address, make_row_offset
from .sums import team_bytes

VECTOR = 4  # elements
MOST_VECTORS = 4  # of a lane and row


@dataclass(frozen=True, slots=True)
class RowShape:
    """How the lanes of a warp share rows.

    Attributes
    ----------
    config : SplitConfig
    """

    config: SplitConfig

    @property
    def row_vectors(self) -> int:
        return self.config.head_dim // VECTOR

    @property
    def lanes(self) -> int:
        """Lanes of a token: the power of two that wastes least, and of these the largest."""
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
    def requests(self) -> int:
        """Tokens of a lane and step."""
        return min(limits.requests(self) // self.vectors, self.lanes)

    @property
    def step(self) -> int:
        """Tokens of a step, at most one for each lane."""
        return self.requests * self.tokens

    @property
    def registers(self) -> int:
        """What O, q and the rows in flight take."""
        return 2 * (self.config.num_heads + self.requests) * self.vectors * VECTOR

    @property
    def min_blocks(self) -> int:
        """Thread blocks on a multiprocessor: as many as need no spills."""
        return limits.min_blocks_on_cuda_cores(self)


def make_attend_on_cuda_cores(config: SplitConfig, pair_address: Any) -> Any:
    """The device function ``attend(...)``: a warp's share of the split's tokens, its sums left in shared memory."""
    shape = RowShape(config)
    STEP, TURN, HEADS = shape.step, NUM_WARPS * shape.step, config.num_heads
    LANES, MODIFIED, CHECKED = shape.lanes, config.modified, config.checked
    SHIFT = LANES.bit_length() - 1
    NUM_BUFFERED, NUM_SCORES = shape.requests * shape.vectors * VECTOR, shape.requests * HEADS
    NUM_SUMS = HEADS * shape.vectors * VECTOR
    ALL = uint32(0xFFFFFFFF)
    find_token, row_offset = make_find_token(config), make_row_offset(config)
    load_rows, load_query = make_load_rows(shape), make_load_query(shape)
    dot, sum_of_lanes, mask = make_dot(shape), make_sum_of_lanes(shape), make_mask(shape)
    logits, update, put_sums = make_logits(shape), make_update(shape), make_put_sums(shape, pair_address)

    @device_function
    def start_head(h, maxima, sums, slope, slopes, query):
        maxima[h], sums[h] = NONE, float32(0)
        has_slope = MODIFIED and address(slopes) != 0 and h < query.num_heads
        slope[h] = slopes[int64(query.head) + h] if has_slope else float32(0)

    @device_function
    def attend(thread, first, query, k, v, pages, options, shared):
        lane = uint32(thread & 31)
        warp = shuffle(uint32(thread >> 5), 0)
        sub, group = uint32(lane & (LANES - 1)), uint32(lane >> SHIFT)
        k_lane, v_lane = k.address + int64(sub) * 16, v.address + int64(sub) * 16
        keys, values = local_array(NUM_BUFFERED, uint32), local_array(NUM_BUFFERED, uint32)
        s, slope = local_array(NUM_SCORES, float32), local_array(HEADS, float32)
        q, o = local_array(NUM_SUMS, float32), local_array(NUM_SUMS, float32)
        maxima, sums = local_array(HEADS, float32), local_array(HEADS, float32)
        clear(o, NUM_SUMS)
        for_each(start_head, HEADS, (maxima, sums, slope, options.slopes, query))

        # The longest dependency chain first: table entries of the first two steps, then the first keys.
        base, mine = uint32(first + warp * STEP), uint32(lane & (STEP - 1))
        block, position, good = find_token(pages, uint32(base + mine))
        k_offset = row_offset(k, block, position)
        v_offset = row_offset(v, block, position)
        valid = ballot(good) if CHECKED else ALL
        block, position, good = find_token(pages, uint32(base + mine + TURN))
        load_rows(keys, k_lane, k_offset, group, sub)
        load_query(q, query, options.scale if MODIFIED else float32(options.scale * LOG2E), sub)

        last = pages.last
        if base <= last:
            load_rows(values, v_lane, v_offset, group, sub)
            while uint32(base + TURN) <= last:
                dot(s, keys, q)
                k_offset = row_offset(k, block, position)
                v_offset = row_offset(v, block, position)
                next_valid = ballot(good) if CHECKED else ALL
                block, position, good = find_token(pages, uint32(base + mine + 2 * TURN))
                load_rows(keys, k_lane, k_offset, group, sub)
                sum_of_lanes(s)
                if MODIFIED:
                    logits(s, slope, options, query, uint32(base + group))
                if CHECKED and valid != ALL:
                    mask(s, values, valid, group)
                update(s, values, maxima, sums, o)
                load_rows(values, v_lane, v_offset, group, sub)
                base, valid = uint32(base + TURN), next_valid
            dot(s, keys, q)
            sum_of_lanes(s)
            if MODIFIED:
                logits(s, slope, options, query, uint32(base + group))
            valid = uint32(valid & low_bits(uint32(last - base + 1)))
            mask(s, values, valid, group)
            update(s, values, maxima, sums, o)
        put_sums(shared, maxima, sums, o, query.num_heads, group, sub, warp)

    return attend


def make_load_rows(shape: RowShape) -> Any:
    """The device function ``load_rows(buffer, base, offset, group, sub)``: this lane's vectors of its tokens' rows.

    What lies past a row becomes 0.
    """
    VECTORS, REQUESTS, TOKENS, LANES = shape.vectors, shape.requests, shape.tokens, shape.lanes
    ROW_VECTORS, FULL = shape.row_vectors, shape.row_vectors // shape.lanes
    row_address = make_row_address(shape.config)

    @device_function
    def load_vector(n, u, buffer, row, sub):
        is_inside = n < FULL or sub < ROW_VECTORS - n * LANES
        x = stream_16(row + 16 * LANES * n if is_inside else row - 16 * int64(sub))
        zero = uint32(0)
        assign(buffer, (u * VECTORS + n) * VECTOR, x if is_inside else (zero, zero, zero, zero))

    @device_function
    def load_row(u, buffer, base, offset, group, sub):
        row = row_address(base, offset, uint32(group + u * TOKENS))
        for_each(load_vector, VECTORS, (u, buffer, row, sub))

    @device_function
    def load_rows(buffer, base, offset, group, sub):
        for_each(load_row, REQUESTS, (buffer, base, offset, group, sub))

    return load_rows


def make_load_query(shape: RowShape) -> Any:
    """The device function ``load_query(q, query, scale, sub)``: scaled, 0 past the row."""
    VECTORS, LANES, ROW_VECTORS = shape.vectors, shape.lanes, shape.row_vectors
    ALL_VECTORS = shape.config.num_heads * shape.vectors

    @device_function
    def load_one(i, q, query, scale, sub):
        h, n = i // VECTORS, i % VECTORS
        is_inside = h < query.num_heads and sub < ROW_VECTORS - n * LANES
        x = load_16(query.address + (h * query.head_stride + 16 * (int64(sub) + LANES * n) if is_inside else int64(0)))
        factor, zero = scale if is_inside else float32(0), uint32(0)
        x = x if is_inside else (zero, zero, zero, zero)
        a, b = float32(bits_float(x[0]) * factor), float32(bits_float(x[1]) * factor)
        c, d = float32(bits_float(x[2]) * factor), float32(bits_float(x[3]) * factor)
        assign(q, i * VECTOR, (a, b, c, d))

    @device_function
    def load_query(q, query, scale, sub):
        for_each(load_one, ALL_VECTORS, (q, query, scale, sub))

    return load_query


def make_dot(shape: RowShape) -> Any:
    """The device function ``dot(s, keys, query)``: this lane's part of q . k, of each of its tokens and each head."""
    HEADS, ELEMENTS = shape.config.num_heads, shape.vectors * VECTOR
    SCORES = shape.requests * shape.config.num_heads

    @device_function
    def add_product(j, i, s, keys, query):
        u, h = i // HEADS, i % HEADS
        s[i] = float32(s[i] + bits_float(keys[u * ELEMENTS + j]) * query[h * ELEMENTS + j])

    @device_function
    def dot_one(i, s, keys, query):
        s[i] = float32(0)
        for_each(add_product, ELEMENTS, (i, s, keys, query))

    @device_function
    def dot(s, keys, query):
        for_each(dot_one, SCORES, (s, keys, query))

    return dot


def make_sum_of_lanes(shape: RowShape) -> Any:
    """The device function ``sum_of_lanes(s)``: q . k in all lanes of a token."""
    SCORES = shape.requests * shape.config.num_heads
    STEPS = SCORES * (shape.lanes.bit_length() - 1)

    @device_function
    def add_half(step, s):
        i = step % SCORES
        s[i] = float32(s[i] + exchange(s[i], uint32(1 << (step // SCORES))))

    @device_function
    def sum_of_lanes(s):
        for_each(add_half, STEPS, (s,))

    return sum_of_lanes


def make_logits(shape: RowShape) -> Any:
    """The device function ``logits(s, slope, options, query, position)``: modified, in units of log(2).

    A score_mod is called with the last token for those past it, and with the last head for those that do not exist.
    """
    HEADS, TOKENS, SCORES = shape.config.num_heads, shape.tokens, shape.requests * shape.config.num_heads
    modify = make_modify(shape.config.score_mod)

    @device_function
    def logit(i, s, slope, options, query, position):
        u, h = i // HEADS, i % HEADS
        k_pos = min(uint32(position + u * TOKENS), options.q_pos)
        mine = uint32(query.head + min(uint32(h), uint32(query.num_heads - 1)))
        x = modify(s[i], options.softcap, slope[h], int64(options.q_pos), int64(k_pos), mine, options.seq)
        s[i] = float32(x * LOG2E)

    @device_function
    def logits(s, slope, options, query, position):
        for_each(logit, SCORES, (s, slope, options, query, position))

    return logits


def make_mask(shape: RowShape) -> Any:
    """The device function ``mask(s, values, valid, group)``: select away the tokens whose bit in `valid` is not set."""
    HEADS, TOKENS, ELEMENTS = shape.config.num_heads, shape.tokens, shape.vectors * VECTOR
    SCORES, WORDS = shape.requests * HEADS, shape.requests * ELEMENTS

    @device_function
    def mask_score(i, s, mine):
        s[i] = s[i] if uint32(mine & (1 << (i // HEADS * TOKENS))) != 0 else NONE

    @device_function
    def mask_word(i, values, mine):
        values[i] = values[i] if uint32(mine & (1 << (i // ELEMENTS * TOKENS))) != 0 else uint32(0)

    @device_function
    def mask(s, values, valid, group):
        for_each(mask_score, SCORES, (s, uint32(valid >> group)))
        for_each(mask_word, WORDS, (values, uint32(valid >> group)))

    return mask


def make_update(shape: RowShape) -> Any:
    """The device function ``update(s, values, maxima, sums, o)``: the online softmax over this lane's tokens."""
    HEADS, ELEMENTS = shape.config.num_heads, shape.vectors * VECTOR
    SCORES = shape.requests * shape.config.num_heads

    @device_function
    def raise_maximum(i, new, s):
        new[i % HEADS] = larger(new[i % HEADS], s[i])

    @device_function
    def rescale_one(j, h, o, factor):
        o[h * ELEMENTS + j] = float32(o[h * ELEMENTS + j] * factor)

    @device_function
    def rescale(h, maxima, sums, new, o):
        factor = exp2(float32(maxima[h] - (float32(0) if new[h] == NONE else new[h])))
        maxima[h], sums[h] = new[h], float32(sums[h] * factor)
        for_each(rescale_one, ELEMENTS, (h, o, factor))

    @device_function
    def weigh(i, s, maxima, sums):
        h = i % HEADS
        s[i] = exp2(float32(s[i] - (float32(0) if maxima[h] == NONE else maxima[h])))
        sums[h] = float32(sums[h] + s[i])

    @device_function
    def add_value(j, i, s, values, o):
        u, h = i // HEADS, i % HEADS
        at = h * ELEMENTS + j
        o[at] = float32(o[at] + s[i] * bits_float(values[u * ELEMENTS + j]))

    @device_function
    def add_values(i, s, values, o):
        for_each(add_value, ELEMENTS, (i, s, values, o))

    @device_function
    def update(s, values, maxima, sums, o):
        new = local_array(HEADS, float32)
        for h in range(HEADS):
            new[h] = maxima[h]
        for_each(raise_maximum, SCORES, (new, s))
        for_each(rescale, HEADS, (maxima, sums, new, o))
        for_each(weigh, SCORES, (s, maxima, sums))
        for_each(add_values, SCORES, (s, values, o))

    return update


def make_put_sums(shape: RowShape, pair_address: Any) -> Any:
    """The device function ``put_sums(...)``: the sums of the warp's groups of lanes, added up, to shared memory."""
    HEADS, VECTORS, LANES, ROW_VECTORS = shape.config.num_heads, shape.vectors, shape.lanes, shape.row_vectors
    FIRST = shape.lanes.bit_length() - 1
    TEAM_BYTES = team_bytes(shape.config)

    @device_function
    def sum_of_groups(x):
        for b in range(FIRST, 5):
            x = float32(x + exchange(x, uint32(1 << b)))
        return x

    @device_function
    def put_vector(n, h, where, o, factor, num_heads, group, sub):
        at = (h * VECTORS + n) * VECTOR
        a, b = sum_of_groups(float32(o[at] * factor)), sum_of_groups(float32(o[at + 1] * factor))
        c, d = sum_of_groups(float32(o[at + 2] * factor)), sum_of_groups(float32(o[at + 3] * factor))
        vector = uint32(sub + LANES * n)
        if group == 0 and vector < ROW_VECTORS and h < num_heads:
            store_shared_4(pair_address(where, uint32(h), uint32(vector << 1), int64(0)), a, b, c, d)

    @device_function
    def put_head(h, shared, where, maxima, sums, o, num_heads, group, sub, warp):
        maximum = maxima[h]
        for b in range(FIRST, 5):
            maximum = larger(maximum, exchange(maximum, uint32(1 << b)))
        pivot = float32(0) if maximum == NONE else maximum
        factor = exp2(float32(maxima[h] - pivot))
        total = sum_of_groups(float32(sums[h] * factor))
        if group == 0 and sub == 0 and h < num_heads:
            at = int64(warp) * HEADS + h
            shared.maxima[at], shared.sums[at] = maximum, total
        for_each(put_vector, VECTORS, (h, where, o, factor, num_heads, group, sub))

    @device_function
    def put_sums(shared, maxima, sums, o, num_heads, group, sub, warp):
        where = uint32(shared.address + warp * TEAM_BYTES)
        for_each(put_head, HEADS, (shared, where, maxima, sums, o, num_heads, group, sub, warp))

    return put_sums
