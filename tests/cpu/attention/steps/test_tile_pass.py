"""Passes over a tile: rows of every dtype read in every way give the same bits, and later rows are prefetched."""

from functools import cache
from itertools import product

import numpy as np
import pytest

from pagedkv.cpu.attention.steps import dots, tile_pass, values
from pagedkv.cpu.attention.steps.code import BYTE, CACHE_LINE, STEP, TILE, VALUE_STEP, Code
from pagedkv.cpu.attention.steps.tile_pass import L2_REACH, PassConfig, make_add_values, make_score_keys
from pagedkv.cpu.attention.steps.widen import PAIR, dim_order

from ....support.strategies import long
from .stepper import grouped, pass_over, stepper
from .test_widen import FORMATS

HEADS, GROUPS, DIMS = 2, 3, 128
RNG = np.random.default_rng(0)


@cache
def passes(config, accumulators):
    """Both passes of a config, compiled once for each number of accumulators."""
    return stepper(make_score_keys(config)), stepper(make_add_values(config))


def rows_of(kind, tokens):
    return RNG.standard_normal((tokens, HEADS, DIMS), np.float32).astype(FORMATS[kind])


def state_of(group_rows):
    """Queries, accumulators and scores of all heads."""
    rows = HEADS * GROUPS * group_rows
    q, acc = RNG.standard_normal((2, rows, DIMS), np.float32)
    return q, acc, RNG.uniform(0, 1, (rows // group_rows, TILE, group_rows)).astype(np.float32)


def head_by_head(kind, rows, group_rows, q, acc, scores):
    """What both passes compute from rows that were widened before."""
    score, add = passes(PassConfig("float32", group_rows, whole=True, staged=True), dots.num_accumulators())
    found, acc, heads = np.full_like(scores, np.nan), acc.copy(), range(HEADS)
    for h in heads:
        wide = np.ascontiguousarray(rows[:, h : h + 1].astype(np.float32)[:, :, dim_order(kind, DIMS)])
        some = slice(h * GROUPS, (h + 1) * GROUPS)
        of_rows = slice(some.start * group_rows, some.stop * group_rows)
        score(found[some], grouped(q[of_rows], group_rows), pass_over(wide, GROUPS))
        add(acc[of_rows], scores[some], pass_over(wide, GROUPS))
    return found, acc


# All that one query head alone reads in registers: no kernel of the tests of decode has it for 16 bits and fp8.
WAYS = [(kind, 1, True) for kind in ("float16", "bfloat16", "fp8_e4m3")]
WAYS += [("float32", 1, False), ("float32", 4, True), ("bfloat16", 4, False), ("fp8_e4m3", 4, True)]
MORE_WAYS = [("float32", 1, True), ("float32", 4, False), ("bfloat16", 1, False), ("bfloat16", 4, True)]
MORE_WAYS += [("fp8_e4m3", 1, False), ("fp8_e4m3", 4, False)]


@pytest.mark.parametrize(("kind", "group_rows", "whole"), [*WAYS, *long(MORE_WAYS)])
def test_every_way_to_read_rows(kind, group_rows, whole):
    rows, (q, acc, scores) = rows_of(kind, 2 * STEP + 3), state_of(group_rows)
    expected_dots, expected_acc = head_by_head(kind, rows, group_rows, q, acc, scores)
    score, add = passes(PassConfig(kind, group_rows, whole=whole, staged=False), dots.num_accumulators())
    for run_steps in (1, 2, 8):
        over = pass_over(rows, GROUPS, run_steps=run_steps)
        found_dots, found_acc = np.full_like(scores, np.nan), acc.copy()
        score(found_dots, grouped(q, group_rows), over)
        add(found_acc, scores, over)
        np.testing.assert_array_equal(found_dots[:, : len(rows)], expected_dots[:, : len(rows)])
        np.testing.assert_array_equal(found_acc, expected_acc)


def paired(weights, factors):
    """Weights of int8 values, int16 (groups, R, TILE), and their factors (groups, R, steps), as softmax leaves them."""
    groups, group_rows, _ = weights.shape
    memory = np.zeros((groups, TILE // VALUE_STEP, VALUE_STEP, group_rows), np.float32)
    halves = weights.reshape(groups, group_rows, -1, 2, 2, PAIR).transpose(0, 2, 3, 5, 1, 4)  # ... and the two tokens
    pairs = np.ascontiguousarray(halves).view(np.int32)[..., 0].reshape(groups, -1, VALUE_STEP // 2, group_rows)
    memory[:, :, : VALUE_STEP // 2] = pairs.view(np.float32)
    memory[:, :, VALUE_STEP // 2] = factors.transpose(0, 2, 1)
    return memory


@pytest.mark.parametrize("accumulators", [16, 4])
@pytest.mark.parametrize(("group_rows", "whole"), [(1, True), (4, True), (4, False)])
def test_whole_numbers_are_added_exactly_in_every_way_to_read_int8(monkeypatch, group_rows, whole, accumulators):
    """Codes of -128 too, which no row of ours has."""
    for module in (dots, values):
        monkeypatch.setattr(module, "num_accumulators", lambda: accumulators)
    score, add = passes(PassConfig("int8", group_rows, whole=whole, staged=False), accumulators)
    tokens, num_rows = 2 * STEP + 3, GROUPS * group_rows
    rows = RNG.integers(-128, 128, (tokens, HEADS, DIMS)).astype(np.int8)
    q = RNG.integers(-32767, 32768, (HEADS, num_rows, DIMS)).astype(np.int16)
    q[0, 0], rows[0] = -32767, -128  # the largest sum
    queries = np.zeros((HEADS * GROUPS, group_rows * DIMS), np.int32)  # a row has room for float32
    words = np.ascontiguousarray(q).view(np.int32).reshape(-1, group_rows, DIMS // 8, 4).transpose(0, 2, 1, 3)
    queries[:, : group_rows * DIMS // 2] = words.reshape(HEADS * GROUPS, -1)
    key_factors = RNG.uniform(0.5, 2, (HEADS, TILE)).astype(np.float32)
    row_factors = RNG.uniform(0.5, 2, (HEADS, num_rows)).astype(np.float32)
    exact = np.einsum("hrd,thd->hrt", q.astype(np.int64), rows.astype(np.int64))
    scores = exact.astype(np.float32) * (row_factors[..., None] * key_factors[:, None, :tokens])

    weights, factors = np.zeros((HEADS, num_rows, TILE), np.int16), np.float32([0.5, 2, 1, 4])
    weights[..., :tokens] = RNG.integers(-500, 500, (HEADS, num_rows, tokens))
    acc = RNG.integers(-500, 500, (HEADS, num_rows, DIMS)).astype(np.float32)
    scaled = weights[..., :tokens] * factors.repeat(VALUE_STEP)[:tokens]
    sums = acc + np.einsum("hrt,thd->hrd", scaled, rows)[..., dim_order("int8", DIMS)]
    pairs = paired(
        weights.reshape(-1, group_rows, TILE), np.broadcast_to(factors, (HEADS * GROUPS, group_rows, factors.size))
    )
    for run_steps in (1, 2):
        over = pass_over(rows, GROUPS, run_steps=run_steps)
        found = np.empty((HEADS, GROUPS, TILE, group_rows), np.float32)
        score(found, queries, over._replace(key_factors=key_factors, row_factors=row_factors))
        of_rows = found.transpose(0, 1, 3, 2).reshape(HEADS, num_rows, TILE)
        np.testing.assert_array_equal(of_rows[..., :tokens], scores)
        found_acc = acc.copy()
        add(found_acc, pairs, over)
        np.testing.assert_array_equal(found_acc, sums.astype(np.float32))


@pytest.mark.parametrize(("kind", "group_rows"), [("fp8_e4m3", 4), *long([("bfloat16", 4), ("bfloat16", 1)])])
def test_every_number_of_registers(monkeypatch, kind, group_rows):
    """Those of AVX-512, and fewer: then a turn widens a part of a chunk's rows, or has none to widen."""
    for accumulators in (16, 4):
        for module in (dots, values):
            monkeypatch.setattr(module, "num_accumulators", lambda found=accumulators: found)
        test_every_way_to_read_rows(kind, group_rows, True)


@pytest.fixture
def marked(monkeypatch):
    """A prefetch stores a 1 at the beginning of the line."""
    monkeypatch.setattr(Code, "prefetch", lambda code, address, offset=0: code.store(BYTE(1), address, offset))
    monkeypatch.setenv("NUMBA_OPT", "0")  # the same lines, compiled three times as fast


@pytest.mark.parametrize(
    ("kind", "group_rows"),
    [
        *((kind, (1, 4)[i % 2]) for i, kind in enumerate(FORMATS)),
        *long((kind, (4, 1)[i % 2]) for i, kind in enumerate(FORMATS)),
    ],
)
@pytest.mark.usefixtures("marked")
def test_each_line_of_the_next_rows_is_prefetched(kind, group_rows):
    rows, (q, acc, scores) = rows_of(kind, STEP), state_of(group_rows)
    row_bytes = DIMS * rows.itemsize
    for make, first in ((make_score_keys, grouped(q, group_rows)), (make_add_values, acc)):
        memory = np.zeros((STEP * HEADS + 1) * row_bytes + CACHE_LINE, np.uint8)
        begin = -memory.ctypes.data % CACHE_LINE
        later = memory[begin : begin + STEP * HEADS * row_bytes].reshape(STEP, HEADS, row_bytes)
        run = stepper(make(PassConfig(kind, group_rows, whole=True, staged=False)))
        one, other = (scores, first) if make is make_score_keys else (first, scores)
        run(one, other, pass_over(rows, GROUPS, next_rows=later))
        assert (later.reshape(-1, CACHE_LINE)[:, 0] == 1).all()
        assert memory.sum() == later.sum()


@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize("accumulators", [16, 4])
def test_lines_are_prefetched_with_any_number_of_registers(monkeypatch, accumulators):
    """With few of them fewer keys are taken at once than a line of fp8 has turns."""
    for module in (dots, values):
        monkeypatch.setattr(module, "num_accumulators", lambda: accumulators)
    test_each_line_of_the_next_rows_is_prefetched("fp8_e4m3", 4)


@pytest.mark.usefixtures("marked")
def test_of_large_rows_heads_further_on_are_prefetched(monkeypatch):
    """Two heads that fill L1: the first prefetches for the second, that for the first of the next tile."""
    monkeypatch.setattr(tile_pass, "prefetches_into_l1", lambda: True)
    monkeypatch.setattr(tile_pass, "L1_BYTES", HEADS * STEP * DIMS * 4)
    memory = np.zeros(2 * STEP * HEADS * DIMS + CACHE_LINE, np.float32)
    begin = -memory.ctypes.data % CACHE_LINE // memory.itemsize
    rows, later = memory[begin : begin + 2 * STEP * HEADS * DIMS].reshape(2, STEP, HEADS, DIMS)
    _, acc, scores = state_of(1)
    stepper(make_add_values(PassConfig("float32", 1, whole=True, staged=False)))(
        acc, scores, pass_over(rows, GROUPS, next_rows=later)
    )
    marks = memory.view(np.uint8)[4 * begin :][: 4 * rows.size * 2].reshape(2, STEP, HEADS, -1, CACHE_LINE)[..., 0]
    assert marks.all(axis=(1, 3)).tolist() == [[False, True], [True, False]]
    assert memory.view(np.uint8).sum() == STEP * HEADS * DIMS * 4 // CACHE_LINE


@pytest.mark.parametrize("num_heads", [2, 4, 8, 16, 32])
def test_another_head_s_rows_are_prefetched_into_l2(num_heads):
    for head_dim, item_bytes in product((64, 128, 256), (1, 2, 4)):
        assert L2_REACH // (STEP * head_dim * item_bytes) % num_heads != 0


@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize("make", [make_score_keys, make_add_values])
def test_rows_that_are_widened_a_step_ahead_are_prefetched_before(monkeypatch, make):
    """Head after head, where a step would prefetch the next one: the last two, for the next tile's first head."""
    monkeypatch.setattr(tile_pass, "prefetches_into_l1", lambda: False)
    monkeypatch.setattr(tile_pass, "L2_REACH", STEP * DIMS)
    memory = np.zeros(4 * STEP * HEADS * DIMS + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    rows, later = both = memory[start : start + 4 * STEP * HEADS * DIMS].reshape(2, 2 * STEP, HEADS, DIMS)
    q, acc, scores = state_of(4)
    one, other = (scores, grouped(q, 4)) if make is make_score_keys else (acc, scores)
    run = stepper(make(PassConfig("fp8_e4m3", 4, whole=True, staged=False)))
    run(one, other, pass_over(rows, GROUPS, next_rows=later, run_steps=8))
    marks = both.reshape(2, 2 * STEP, HEADS, -1, CACHE_LINE)[..., 0]
    assert marks.all(axis=(1, 3)).tolist() == [[False, True], [True, False]]
    assert memory.sum() == rows[:, 1].sum() + later[:, 0].sum()
