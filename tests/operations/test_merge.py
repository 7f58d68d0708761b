"""merge_states, and what attention over parts, sums and permutations of keys and values must give."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import pagedkv
from pagedkv import reference
from pagedkv.testing.calls import check_merge
from pagedkv.testing.problems.merges import MergeSpec, states

from ..support.problems import FLOATS, Spec, as_torch, build, run
from ..support.strategies import SPLIT


@pytest.mark.parametrize("dtype", FLOATS)
@given(seed=st.integers(0, 2**16), count=st.integers(1, 5), as_list=st.booleans())
def test_oracle(dtype, seed, count, as_list):
    check_merge(MergeSpec(dtype, count, as_list=as_list, seed=seed))


@given(seed=st.integers(0, 2**16))
def test_order_and_grouping_do_not_matter(seed):
    outs, lses = states(seed, 4)
    expected, expected_lse = pagedkv.merge_states(outs, lses)
    order = np.random.default_rng(seed).permutation(4)
    permuted = pagedkv.merge_states(outs[order], lses[order])
    left, right = pagedkv.merge_states(outs[:2], lses[:2]), pagedkv.merge_states(outs[2:], lses[2:])
    grouped = pagedkv.merge_states([left[0], right[0]], [left[1], right[1]])
    for out, lse in (permuted, grouped):
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)


def test_one_state_and_empty_states_change_nothing():
    outs, lses = states(0, 2)
    out, lse = pagedkv.merge_states(outs[:1], lses[:1])
    np.testing.assert_array_equal(out, outs[0])
    np.testing.assert_array_equal(lse, lses[0])
    nothing, never = np.zeros_like(outs[0]), np.full_like(lses[0], -np.inf)
    for pair in ([outs[0], nothing], [lses[0], never]), ([nothing, outs[0]], [never, lses[0]]):
        out, lse = pagedkv.merge_states(*pair)
        np.testing.assert_array_equal(out, outs[0])
        np.testing.assert_array_equal(lse, lses[0])
    out, lse = pagedkv.merge_states([nothing, nothing], [never, never])
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_a_state_without_keys_may_hold_anything():
    outs, lses = states(0, 3)
    expected = pagedkv.merge_states(outs, lses)
    outs[lses == -np.inf] = np.nan
    for a, b in zip(pagedkv.merge_states(outs, lses), expected, strict=True):
        assert a.tobytes() == b.tobytes()


def test_large_lses_do_not_overflow():
    outs, lses = states(0, 3)
    lses = np.where(lses == -np.inf, lses, lses + np.float32(1e4))
    exact, exact_lse = reference.merge_states(outs, lses)
    out, lse = pagedkv.merge_states(outs, lses)
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_torch_tensors_in_torch_tensors_out(dtype):
    outs, lses = states(0, 3, dtype)
    expected, expected_lse = pagedkv.merge_states(outs, lses)
    for given_states in ((as_torch(outs), as_torch(lses)), ([*map(as_torch, outs)], [*map(as_torch, lses)])):
        out, lse = pagedkv.merge_states(*given_states)
        assert torch.equal(out, as_torch(expected))
        assert torch.equal(lse, as_torch(expected_lse))


def test_merging_keeps_nan_of_states_that_have_keys():
    outs = np.array([[[[np.nan, 1.0]]], [[[1.0, 1.0]]]], np.float32)
    out, lse = pagedkv.merge_states(outs, np.zeros((2, 1, 1), np.float32))
    assert np.isnan(out[0, 0, 0])
    assert out[0, 0, 1] == 1
    assert lse == np.log(np.float32(2))
    out, lse = pagedkv.merge_states(np.ones((2, 1, 1, 8), np.float32), np.array([[[np.nan]], [[0]]], np.float32))
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


def test_states_without_rows_give_results_without_rows():
    out, lse = pagedkv.merge_states(np.zeros((2, 0, 4, 8), FLOATS["bfloat16"]), np.zeros((2, 0, 4), np.float32))
    assert out.shape == (0, 4, 8)
    assert lse.shape == (0, 4)


def close(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cut", [1, 16, 100, SPLIT, SPLIT + 77])
def test_attention_over_the_parts_of_a_cache_merges_to_the_whole(cut):
    problem = build(Spec(seq_lens=(2 * SPLIT + 9,), block_size=1))
    whole = run(problem)
    length = problem.seq_lens[0]
    parts = []
    for start, stop in ((0, cut), (cut, length)):
        tables = problem.block_tables[:, start:stop]
        lens = np.array([stop - start], np.int32)
        arrays = (problem.q, problem.k_cache, problem.v_cache, tables, lens)
        parts.append(pagedkv.decode_attention(*arrays, return_lse=True))
    outs, lses = zip(*parts, strict=True)
    close(pagedkv.merge_states(list(outs), list(lses)), whole)


def test_k_scale_is_a_factor_of_scale_and_v_scale_of_the_output():
    problem = build(Spec(seq_lens=(SPLIT + 3, 40), kv_dtype="fp8_e4m3", head_dim=96, scale=0.1))
    out, lse = run(problem)
    close(run(problem, k_scale=3.0, scale=0.1 / 3.0), (out, lse))
    doubled, same_lse = run(problem, v_scale=2.0)
    np.testing.assert_array_equal(doubled, 2 * out)
    np.testing.assert_array_equal(same_lse, lse)


def test_output_is_linear_in_v():
    problem = build(Spec(seq_lens=(SPLIT + 3, 40), strides="own"))
    first, lse = run(problem)
    values = problem.v_cache
    problem.v_cache = np.roll(values, 1, axis=-1) * np.float32(0.7)
    second, _ = run(problem)
    problem.v_cache = values + problem.v_cache
    close(run(problem), (first + second, lse))


def test_order_of_keys_does_not_matter_without_positions():
    problem = build(Spec(seq_lens=(SPLIT + 3,), block_size=1, scale=0.4))
    expected = run(problem)
    tables = problem.block_tables.copy()
    np.random.default_rng(0).shuffle(tables[0, : SPLIT + 3])
    problem.block_tables = tables
    close(run(problem), expected)


def test_a_shift_of_all_logits_shifts_the_lse_only():
    problem = build(Spec(seq_lens=(SPLIT + 3, 40), group_size=1, num_kv_heads=1, scale=0.125, strides="own"))
    out, lse = run(problem)
    shift = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    problem.k_cache = problem.k_cache + shift
    close(run(problem), (out, lse + 0.125 * (problem.q @ shift)))


def test_query_heads_of_a_group_read_their_kv_head():
    grouped = build(Spec(seq_lens=(SPLIT + 3, 40), num_kv_heads=3, group_size=5, strides="own"))
    repeated = build(Spec(seq_lens=(SPLIT + 3, 40), num_kv_heads=15, group_size=1))
    repeated.q, repeated.block_tables = grouped.q, grouped.block_tables
    repeated.k_cache, repeated.v_cache = (np.repeat(x, 5, axis=2) for x in (grouped.k_cache, grouped.v_cache))
    close(run(repeated), run(grouped))
