"""What v1, v2 and every form of split must do alike."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.cuda.bad_entries import raise_if_failed
from pagedkv.cuda.plans import attention

from ..support.problems import assert_close, build
from ..support.strategies import each_of
from .decode_cases import (
    FORMS,
    TENSOR,
    LargeCaches,
    assert_same_bits,
    checked_call,
    decode,
    move_past_4_gib,
    with_tables_apart,
)

WITH_FP8 = FORMS | {"fp8": TENSOR._replace(kv_dtype="fp8_e4m3", group_size=8)}

# Where kernels read lengths and bounds: all forms of split do it in the same steps.
each_that_reads_lengths = each_of("variant", FORMS, "v1", "v2", "tensor cores")


@each_of("variant", WITH_FP8)
def test_what_is_not_used_does_not_change_a_bit(variant, open_device):
    # Of split, slopes are another kernel.
    alibi = variant.kernel != "split"
    spec = variant.spec(seq_lens=(37, 1, 600, 0), num_kv_heads=1, window=300, alibi=alibi, sinks=True)
    expected = decode(build(spec.replace(poison="huge")), variant, open_device)
    for poison in ("nan", "inf"):
        assert_same_bits(decode(build(spec.replace(poison=poison)), variant, open_device), expected)


@each_of("variant", FORMS)
def test_q_and_out_have_strides_of_their_own(variant, open_device):
    problem = build(variant.spec(seq_lens=(37, 5, 600)))
    problem.q = np.ascontiguousarray(problem.q[:, ::-1])[:, ::-1]
    assert problem.q.strides != problem.out.strides
    assert_close(problem, *decode(problem, variant, open_device))


@each_of("variant", FORMS)
def test_tables_have_strides_of_their_own(variant, open_device):
    problem = build(variant.spec(seq_lens=(37, 5, 600)))
    expected = decode(problem, variant, open_device)
    out, lse = np.zeros_like(problem.q), np.zeros(problem.q.shape[:2], np.float32)
    with open_device() as device:
        call = with_tables_apart(checked_call(problem, variant.kernel))
        attention.decode_attention(device, call, out, lse)
    assert_same_bits((out, lse), expected)


@each_of("variant", WITH_FP8)
def test_caches_of_more_than_4_gib(variant):
    problem = build(variant.spec(seq_lens=(70, 3)))
    num_blocks = len(problem.k_cache)
    expected = decode(build(problem.spec), variant)
    move_past_4_gib(problem)
    assert_same_bits(decode(problem, variant, device=LargeCaches(num_blocks)), expected)


@each_of("variant", FORMS)
def test_without_an_lse(variant, open_device):
    problem = build(variant.spec(seq_lens=(0, 40, 600)))
    expected, _ = decode(problem, variant, open_device)
    out = np.zeros_like(problem.q)
    with open_device() as device:
        attention.decode_attention(device, checked_call(problem, variant.kernel), out, None)
    assert_same_bits((out,), (expected,))


@each_of("variant", FORMS)
def test_a_bad_block_id_empties_its_sequence_and_is_recorded(variant, open_device):
    problem = build(variant.spec(seq_lens=(40, 3, 600), sinks=True))
    expected = decode(problem, variant, open_device)
    call = checked_call(problem, variant.kernel, check=True)
    column = 64 // variant.block_size
    for bad in (-1, 10**6, 2**31 - 1, -(2**31)):
        call.block_tables[2, column] = bad
        out, lse = np.zeros_like(problem.q), np.zeros(problem.q.shape[:2], np.float32)
        with open_device() as device:
            attention.decode_attention(device, call, out, lse)
            with pytest.raises(IndexError, match=rf"got {bad} for sequence 2, column {column}"):
                raise_if_failed([device])
            raise_if_failed([device])
        assert_same_bits((out[:2], lse[:2]), (expected[0][:2], expected[1][:2]))
        assert (out[2] == 0).all()
        assert (lse[2] == -np.inf).all()


@each_of("variant", FORMS)
def test_block_ids_before_the_window_are_not_looked_at(variant, open_device):
    problem = build(variant.spec(seq_lens=(600,), window=70))
    expected = decode(problem, variant, open_device)
    call = checked_call(problem, variant.kernel, check=True)
    first = (600 - 70) // variant.block_size
    call.block_tables[0, :first] = -1  # freed
    out, lse = np.zeros_like(problem.q), np.zeros(problem.q.shape[:2], np.float32)
    with open_device() as device:
        attention.decode_attention(device, call, out, lse)
        raise_if_failed([device])
    assert_same_bits((out, lse), expected)
    call.block_tables[0, first] = -1
    with open_device() as device:
        attention.decode_attention(device, call, out, lse)
        with pytest.raises(IndexError, match=rf"got -1 for sequence 0, column {first}"):
            raise_if_failed([device])


@each_of("variant", FORMS)
@pytest.mark.parametrize("bad", [-1, 10**6])
def test_a_bad_length_is_skipped_and_recorded(variant, bad, open_device):
    spec = variant.spec(seq_lens=(40, 3, 600), sinks=True)
    problem = build(spec)
    expected = decode(build(spec), variant, open_device)
    call = checked_call(problem, variant.kernel, check=True)
    call.seq_lens[1] = bad
    out, lse = np.zeros_like(problem.q), np.zeros(problem.q.shape[:2], np.float32)
    with open_device() as device:
        attention.decode_attention(device, call, out, lse)
        with pytest.raises(ValueError, match=rf"got {bad} for sequence 1"):
            raise_if_failed([device])
    assert_same_bits((out[::2], lse[::2]), (expected[0][::2], expected[1][::2]))
    assert (out[1] == 0).all()
    assert (lse[1] == -np.inf).all()


@st.composite
def bounded(draw, variant):
    """A problem in tables that are wider than its lengths, and a bound that it keeps."""
    lengths = st.sampled_from([0, 1, 255, 256, 257, 511, 512, 513]) | st.integers(0, 700)
    problem = build(
        variant.spec(
            seq_lens=tuple(draw(st.lists(lengths, min_size=1, max_size=3))),
            num_kv_heads=1,
            window=draw(st.none() | st.integers(1, 700)),
            sinks=draw(st.booleans()),
            seed=draw(st.integers(0, 2**16)),
        )
    )
    more = draw(st.sampled_from([0, 3, 200]))
    unused = np.full((len(problem.seq_lens), more), -7, np.int32)
    problem.block_tables = np.concatenate([problem.block_tables, unused], axis=1)
    longest = int(problem.seq_lens.max())
    return problem, longest + draw(st.sampled_from([0, 0, 1, 10**6]))


@each_that_reads_lengths
@settings(max_examples=6)
@given(data=st.data())
def test_a_bound_on_lengths_changes_no_bit(variant, data, open_device):
    problem, bound = data.draw(bounded(variant))
    expected = decode(problem, variant, open_device)
    problem.options["max_seq_len"] = bound
    assert_same_bits(decode(problem, variant, open_device), expected)
    out, lse = np.zeros_like(problem.q), np.zeros(problem.q.shape[:2], np.float32)
    with open_device() as device:
        attention.decode_attention(device, checked_call(problem, variant.kernel, check=True), out, lse)
        raise_if_failed([device])
    assert_same_bits((out, lse), expected)


@each_that_reads_lengths
def test_a_length_beyond_the_bound_is_skipped_and_harms_no_later_call(variant, open_device):
    """On a device nobody looks at lengths: the bound is rounded up to 512, and what is longer counts as 0."""
    spec = variant.spec(seq_lens=(600, 3, 512), sinks=True)
    problem = build(spec)
    expected = decode(problem, variant, open_device)
    unbounded, bounded = checked_call(problem, variant.kernel), {}
    for check in (False, True):
        call = checked_call(problem, variant.kernel, check=check)
        bounded[check] = call._replace(max_seq_len=300)
    results = []
    with open_device(global_race=True) as device:
        for call in (unbounded, bounded[False], bounded[True], unbounded):
            results.append((np.full_like(problem.q, np.nan), np.full(problem.q.shape[:2], np.nan, np.float32)))
            attention.decode_attention(device, call, *results[-1])
        with pytest.raises(ValueError, match=r"^seq_lens .* at most max_seq_len, got 600 for sequence 0$"):
            raise_if_failed([device])
    for out, lse in results[1:-1]:
        assert (out[0] == 0).all()
        assert (lse[0] == -np.inf).all()
        assert_same_bits((out[1:], lse[1:]), (expected[0][1:], expected[1][1:]))
    assert_same_bits(results[-1], expected)


@each_that_reads_lengths
def test_a_bad_length_that_is_not_looked_at_harms_no_later_call(variant, open_device):
    """It counts as 0: nothing past the table, the workspace and shared memory is touched, and counters go back to 0."""
    problem = build(variant.spec(seq_lens=(600, 3, 512), sinks=True))
    expected = decode(problem, variant, open_device)
    call = checked_call(problem, variant.kernel)
    capacity, results = call.block_tables.shape[1] * variant.block_size, []
    with open_device(global_race=True) as device:
        for bad in ([], [-1], [capacity + 1], [2**31 - 1], []):
            lengths = np.array([*(bad or [600]), 3, 512], np.int32)
            results.append((np.full_like(problem.q, np.nan), np.full(problem.q.shape[:2], np.nan, np.float32)))
            attention.decode_attention(device, call._replace(seq_lens=lengths), *results[-1])
    for out, lse in results[1:-1]:
        assert (out[0] == 0).all()
        assert (lse[0] == -np.inf).all()
    for result in (results[0], results[-1]):
        assert_same_bits(result, expected)
