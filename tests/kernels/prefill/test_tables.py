"""What the prefill kernels look up in block tables, lengths and query starts, and what wrong ones do."""

import numpy as np
import pytest

from pagedkv.cuda.bad_entries import raise_if_failed
from pagedkv.cuda.plans import prefill as planning

from ...support.devices import emulator
from ...support.problems import build
from ...support.strategies import each_of
from ..decode_cases import assert_same_bits, checked_call, with_tables_apart
from .variants import BOTH, FORMS, VLLM, keys_of_tile, numbers, prefill, rows_read


@each_of("form", BOTH)
def test_keys_that_no_row_sees_are_not_read(form):
    """Everything before the window of the first row, and past the last row."""
    spec = form.replace(seq_lens=(300,), query_lens=(200,), window=40)
    problem = build(spec)
    whole = problem.block_tables, problem.k_cache, problem.v_cache
    problem = build(spec.replace(seq_lens=(150,), query_lens=(5,)))  # behind it, 150 more tokens
    problem.q = problem.q[:5]
    problem.block_tables, problem.k_cache, problem.v_cache = whole
    device = emulator(footprint=True, stats=True)
    prefill(problem, device=device)
    first, last, keys = 145 - 39, 149, keys_of_tile(form)
    rows, tiles = rows_read(problem, first, last), last // keys - first // keys + 1
    for name in ("k_cache", "v_cache"):
        device.launches[0].footprint.expect(name, read=rows, written=False)
        assert device.launches[0].buffers[name].bytes_read <= tiles * keys * whole[1][0, 0].nbytes


@each_of("form", FORMS, *BOTH)
def test_nothing_before_the_windows_is_looked_up_or_counts(form, open_device):
    """Blocks that have been given away, and NaN where the first window's tile begins."""
    spec = form.replace(seq_lens=(100,), query_lens=(4,), window=20, kv_scales=None)
    first = 100 - 4 - 20 + 1
    expected, problem = prefill(build(spec), open_device), build(spec)
    problem.block_tables[0, : first // form.block_size] = -1
    block, inside = problem.block_tables[0, first // form.block_size], first % form.block_size
    for cache in (problem.k_cache, problem.v_cache):
        tokens = {"NHD": cache[block], "HND": cache[block].swapaxes(0, 1), "vllm": np.moveaxis(cache[block], -1, 0)}
        if form.layout == "vllm" and cache is problem.k_cache:
            tokens["vllm"] = np.moveaxis(cache[block], 2, 0)
        tokens[form.layout][:inside] = 0x7F if form.is_fp8 else np.nan
    call = checked_call(build(spec))._replace(block_tables=problem.block_tables)
    call = call._replace(k_cache=problem.k_cache, v_cache=problem.v_cache)
    out, lse = np.zeros_like(problem.q), np.zeros(problem.q.shape[:2], np.float32)
    with open_device() as device:
        planning.prefill_attention(device, call, out, lse)
    assert_same_bits((out, lse), expected)


@each_of("form", BOTH, "tensor cores")
def test_what_check_refuses_is_recorded_and_harms_nobody_else(form, open_device):
    problem = build(form.replace(seq_lens=(40, 3, 200), query_lens=(40, 3, 40), sinks=True))
    expected = prefill(problem, open_device)
    good = checked_call(problem, check=True)
    column = 64 // form.block_size
    tables, lengths = good.block_tables.copy(), good.seq_lens.copy()
    tables[2, column], lengths[1] = 10**6, 2
    cases = [
        ({}, None, "", []),
        ({"block_tables": tables}, IndexError, rf"got 1000000 for sequence 2, column {column}", [2]),
        ({"seq_lens": lengths}, ValueError, r"query_starts .* got 43 for sequence 1", [1]),
        ({"seq_lens": numbers(40, -1, 200)}, ValueError, r"seq_lens .* got -1 for sequence 1", [1]),
        ({"query_starts": numbers(0, 40, 43, 90)}, ValueError, r"query_starts .* got 90 for sequence 2", [2]),
        ({"query_starts": numbers(0, 40, 39, 83)}, ValueError, r"query_starts .* got 39 for sequence 1", [0, 1, 2]),
        ({"query_starts": numbers(-3, 40, 43, 83)}, ValueError, r"query_starts .* got -3 for sequence 0", [0]),
    ]
    starts = problem.query_starts
    for changes, error, message, bad in cases:
        out, lse = np.full_like(problem.q, np.nan), np.full(problem.q.shape[:2], np.nan, np.float32)
        with open_device() as device:
            planning.prefill_attention(device, good._replace(**changes), out, lse)
            if error is None:
                raise_if_failed([device])
            else:
                with pytest.raises(error, match=message):
                    raise_if_failed([device])
        for seq in range(3):
            rows = slice(starts[seq], starts[seq + 1])
            if seq not in bad:
                assert_same_bits((out[rows], lse[rows]), (expected[0][rows], expected[1][rows]))
            elif "query_starts" not in changes:
                assert (out[rows] == 0).all()
                assert (lse[rows] == -np.inf).all()


@each_of("form", BOTH | {"vllm": VLLM}, *BOTH)
def test_a_length_that_is_not_looked_at_harms_nobody(form, open_device):
    """What is out of range counts as 0: its rows are zeros, and nothing past the table is read."""
    problem = build(form.replace(seq_lens=(40, 3, 70), query_lens=(40, 3, 4), num_kv_heads=1, sinks=True))
    expected, call = prefill(problem, open_device), checked_call(problem)
    for bad in (-1, 10**6, 2**31 - 1, 39):
        out, lse = np.full_like(problem.q, np.nan), np.full(problem.q.shape[:2], np.nan, np.float32)
        with open_device(global_race=True) as device:
            planning.prefill_attention(device, call._replace(seq_lens=numbers(bad, 3, 70)), out, lse)
        assert (out[:40] == 0).all()
        assert (lse[:40] == -np.inf).all()
        assert_same_bits((out[40:], lse[40:]), (expected[0][40:], expected[1][40:]))


@each_of("form", BOTH)
def test_tables_with_room_for_more_tokens_than_a_length_can_say(form, open_device):
    problem = build(form.replace(seq_lens=(5,), query_lens=(3,)))
    expected, call = prefill(problem, open_device), checked_call(problem)
    table = np.lib.stride_tricks.as_strided(call.block_tables, (1, 2**32 // form.block_size), (4, 0))
    for length in (5, -(2**31)):
        out, lse = np.zeros_like(problem.q), np.zeros(problem.q.shape[:2], np.float32)
        with open_device() as device:
            wide = call._replace(block_tables=table, seq_lens=numbers(length), max_seq_len=2**33)
            planning.prefill_attention(device, wide, out, lse)
        if length == 5:
            assert_same_bits((out, lse), expected)
        else:
            assert (out == 0).all()
            assert (lse == -np.inf).all()


@pytest.mark.parametrize("check", [False, True])
@each_of("form", BOTH)
def test_tables_have_strides_of_their_own(form, check, open_device):
    problem = build(form.replace(seq_lens=(5, 70), query_lens=(3, 5)))
    expected = prefill(problem, open_device)
    out, lse = np.zeros_like(problem.q), np.zeros(problem.q.shape[:2], np.float32)
    with open_device() as device:
        planning.prefill_attention(device, with_tables_apart(checked_call(problem, check=check)), out, lse)
        raise_if_failed([device])
    assert_same_bits((out, lse), expected)
