"""The same bits of prefill on a GPU: in any chunk, batch and placement, whatever is in memory that no row sees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ...support.problems import assert_close, build
from ...support.strategies import each_of, long
from ..decode_cases import assert_same_bits
from .variants import BOTH, CORES, FORMS, TENSOR, chunk_of, prefill, prefill_in_chunks


@st.composite
def elsewhere(draw, form):
    """A sequence, cut into chunks, and other ways to look at it."""
    length = draw(st.sampled_from([130, 1, 33, 64, 65]))
    stops = sorted({length, *draw(st.lists(st.integers(1, length), min_size=1, max_size=3))})
    # With a scale of 4, pivots of some rows move in most tiles, and those of their neighbours do not.
    fields = {"scale": draw(st.sampled_from([4.0, None])), "window": draw(st.sampled_from([20, None]))}
    fields["sinks"] = draw(st.booleans())
    spec = form.replace(seq_lens=(length,), query_lens=(length,), **fields, seed=draw(st.integers(0, 99)))
    return spec.replace(num_kv_heads=1), stops, draw(st.integers(0, 2**16))


@each_of("form", FORMS, *BOTH, "options")
@settings(max_examples=2)
@given(data=st.data())
def test_a_row_has_the_same_bits_in_any_chunk_batch_placement_layout_and_schedule(form, data, open_device):
    assert_same_bits_elsewhere(form, *data.draw(elsewhere(form)), open_device)


@pytest.mark.long
@each_of("form", FORMS)
@settings(max_examples=10)
@given(data=st.data())
def test_a_row_has_the_same_bits_more_often(form, data, open_device):
    assert_same_bits_elsewhere(form, *data.draw(elsewhere(form)), open_device)


def assert_same_bits_elsewhere(form, spec, stops, seed, open_device):
    out, lse = prefill_in_chunks(spec, stops, seed, open_device)
    other = spec.replace(
        seq_lens=(5, *spec.seq_lens, 70), query_lens=(5, *spec.query_lens, 3), ids=(8, 0, 9), placement_seed=seed,
        layout=spec.layout if spec.layout == "vllm" else "HND",
    )  # fmt: skip
    if form == CORES:
        other = other.replace(block_size=3)
    rows = slice(5, 5 + len(out))
    moved, moved_lse = prefill(build(other), open_device)
    assert_same_bits((moved[rows], moved_lse[rows]), (out, lse))


@each_of("form", FORMS, *BOTH)
def test_pivots_that_move_leave_other_rows_alone(form, open_device):
    """With a scale of 4, those of some rows move in most tiles: whichever rows are their neighbours."""
    whole = build(form.replace(seq_lens=(150,), query_lens=(150,), num_kv_heads=1, scale=4.0))
    out, lse = prefill(whole, open_device)
    assert_close(whole, out, lse)
    for start, stop in ((0, 77), (77, 110), (149, 150)):
        part = chunk_of(whole, start, stop, open_device(global_race=True))
        assert_same_bits(part, (out[start:stop], lse[start:stop]))


@pytest.mark.parametrize("block_size", [3, *long([1, 256])])
def test_the_bits_are_the_same_for_any_block_size(block_size, open_device):
    spec = TENSOR.replace(seq_lens=(150, 3, 70), query_lens=(130, 3, 1))
    expected = prefill(build(spec), open_device)
    assert_same_bits(prefill(build(spec.replace(block_size=block_size)), open_device), expected)


@each_of("form", FORMS, *BOTH)
def test_what_is_not_used_does_not_change_a_bit(form, open_device):
    spec = form.replace(seq_lens=(37, 1, 130, 0), query_lens=(20, 1, 30, 0), num_kv_heads=1, window=50, sinks=True)
    expected = prefill(build(spec.replace(poison="huge")), open_device)
    for poison in ("nan", "inf"):
        assert_same_bits(prefill(build(spec.replace(poison=poison)), open_device), expected)


@each_of("form", FORMS, *BOTH)
@pytest.mark.parametrize("position", [64, *long([0, 31, 90])])
def test_nan_in_a_key_reaches_only_the_rows_that_see_it(form, position, open_device):
    problem = build(form.replace(seq_lens=(100,), query_lens=(100,), window=30, kv_scales=None))
    out, lse = prefill(problem, open_device)
    block, offset = problem.block_tables[0, position // form.block_size], position % form.block_size
    index = {"NHD": (block, offset, 1), "HND": (block, 1, offset), "vllm": (block, 1, slice(None), offset)}
    problem.k_cache[index[form.layout]] = 0x7F if form.is_fp8 else np.nan
    got, got_lse = prefill(problem, open_device)
    seen = np.zeros(lse.shape, bool)
    seen[position : position + 30, form.group_size :] = True
    assert_same_bits((got[~seen], got_lse[~seen]), (out[~seen], lse[~seen]))
    assert np.isnan(got_lse[seen]).all()
