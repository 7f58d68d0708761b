"""Few query rows over a long context: keys split over warps and thread blocks, in the emulator, against the oracle."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pagedkv
from pagedkv.cuda import warmup as compiling_ahead
from pagedkv.cuda.plans import prefill as planning
from pagedkv.kernels.prefill.config import FEW_ROWS, LONGEST_OF_PARTS, PART, TensorConfig
from pagedkv.kernels.prefill.tensor_cores.split.shape import MOST_PARTS, PartShape

from ...support.devices import emulator, with_capability
from ...support.problems import assert_close, build, expect
from ...support.strategies import each_of, long
from ..decode_cases import after_changing_lengths, assert_same_bits, checked_call
from .variants import (
    CAPABILITY,
    MORE_FORMS,
    SPLIT,
    SPLIT_FORMS,
    TENSOR,
    numbers,
    prefill,
    rows_read,
    specs_of_few_rows,
)

each_form = each_of("form", SPLIT_FORMS, "tensor cores")
each_form_and_fp8 = each_of("form", SPLIT_FORMS, "tensor cores", "fp8")


def launched(problem, capability=CAPABILITY, **changes):
    """The kernels that a call launches, and in which grids."""
    device = SimpleNamespace(capability=capability, lineinfo=False)
    call = checked_call(problem)._replace(**changes)
    plan = planning.plan(device, call, problem.out)
    return {launch.kernel.entry.removeprefix("pagedkv_"): launch.grid for launch in plan.launches}


@pytest.fixture
def uncompiled(monkeypatch):
    """Plans with kernels that are nothing but a name."""
    monkeypatch.setattr(
        planning, "compile_for", lambda device, make, config: SimpleNamespace(entry=make.__name__.removeprefix("make_"))
    )


def test_what_is_launched_follows_from_shapes_bounds_and_options(uncompiled):
    both = TENSOR.replace(seq_lens=(600, 9), query_lens=(30, 9))
    few = TENSOR.replace(seq_lens=(600,), query_lens=(8,))
    assert launched(build(both)) == {
        "prefill": (2 * (39 * 4 // 128 + 2), 1, 1),
        "prefill_split": (2 * 2, 1, 1),
        "prefill_merge": (2 * 2 * FEW_ROWS, 1, 1),
    }
    assert launched(build(few)) == {"prefill_split": (2, 1, 1), "prefill_merge": (2 * FEW_ROWS, 1, 1)}
    for changes in ({"exact": True}, {"max_seq_len": PART}):
        assert list(launched(build(both), **changes)) == ["prefill"]
        assert list(launched(build(few), **changes)) == ["prefill"]
    for fields in ({"window": PART}, {"group_size": FEW_ROWS + 1}, {"layout": "vllm"}, {"q_dtype": "float32"}):
        assert not any("split" in name or "merge" in name for name in launched(build(both.replace(**fields))))
    assert list(launched(build(both.replace(window=PART + 1)))) == ["prefill", "prefill_split", "prefill_merge"]
    wide = build(both.replace(head_dim=136))
    assert list(launched(wide, (8, 0))) == ["prefill"]
    assert list(launched(wide, (9, 0))) == ["prefill", "prefill_split", "prefill_merge"]
    tiles = build(both.replace(softcap=3.0))  # 16 rows of a thread block
    assert launched(tiles)["prefill_split"] == (2 * 2 * 2, 1, 1)


def test_few_tokens_of_short_sequences_are_for_warpgroups_whatever_else_is_in_the_batch(uncompiled, monkeypatch):
    """Theirs are other bits."""
    monkeypatch.setenv("PAGEDKV_WGMMA", "1")
    few = build(TENSOR.replace(seq_lens=(600,), query_lens=(8,)))
    assert list(launched(few)) == ["prefill_wgmma", "prefill_split", "prefill_merge"]
    assert list(launched(few, (8, 0))) == ["prefill_split", "prefill_merge"]


def test_warmup_makes_calls_of_both_kernels(uncompiled, monkeypatch):
    given = []
    monkeypatch.setattr(compiling_ahead, "compile_ahead", lambda decodes, prefills, *_: given.extend(prefills) or [])
    pagedkv.warmup(8, 2, 64, 16, "float16", prefill=True, capabilities=[CAPABILITY])
    assert [call.options.softcap for call in given] == [None, 1.0]
    device = SimpleNamespace(capability=CAPABILITY, lineinfo=False)
    for call in given:
        launches = planning.plan(device, call, call.q).launches
        assert [launch.kernel.entry for launch in launches] == ["prefill", "prefill_split", "prefill_merge"]


@given(
    max_seq_len=st.integers(1, 2**20) | st.sampled_from([2048, 2049, 2**17, 2**17 + 1, 2**31 - 1]),
    seq_len=st.integers(0, 2**31 - 1) | st.builds(lambda n, k: n * PART + k, st.integers(1, 99), st.integers(-40, 40)),
    window=st.integers(1, 5000) | st.just(2**31 - 1),
    query_len=st.integers(1, 32),
    head_dim=st.sampled_from([8, 64, 128, 256]),
    kib=st.sampled_from([100, 164, 228]),
)
def test_a_grid_has_every_part(max_seq_len, seq_len, window, query_len, head_dim, kib):
    shape = PartShape(TensorConfig(head_dim, 1, 16, "float16", "float16", shared_kib=kib))
    seq_len = max(1, seq_len % max_seq_len + 1)
    size = PART
    while size * MOST_PARTS < seq_len:
        size *= 2
    first = max(0, seq_len - min(query_len, seq_len) - window + 1)
    parts = (seq_len - 1) // size - first // size + 1
    assert parts <= shape.parts_of(max_seq_len, window) <= MOST_PARTS


@each_form_and_fp8
@settings(max_examples=2)
@given(data=st.data())
def test_every_form_meets_the_error_bound(form, data, open_device):
    problem = build(data.draw(specs_of_few_rows(form)))
    assert_close(problem, *prefill(problem, open_device))


@pytest.mark.parametrize(
    ("wide", "changes"),
    [
        (False, {"head_dim": 120, "kv_dtype": "fp8_e4m3", "seq_lens": (PART + 70,)}),
        (True, {"head_dim": 64, "seq_lens": (4 * SPLIT + 52,)}),
    ],
)
def test_before_9_0_warps_meet_at_barriers_of_their_own(wide, changes, open_device, monkeypatch):
    monkeypatch.setattr(planning, "is_wide", lambda *_: wide)
    problem = build(TENSOR.replace(query_lens=(8,), num_kv_heads=1, **changes))
    assert_close(problem, *prefill(problem, open_device, capability=(8, 0)))


def rows_of(whole, start, stop, device, **changes):
    """Rows start to stop of a problem of one sequence, as its last ones; from element `start` of what it has on."""
    length = whole.spec.seq_lens[0]
    spec = whole.spec.replace(seq_lens=(length - whole.spec.query_lens[0] + stop,), query_lens=(stop - start,))
    part = build(spec.replace(**changes))
    part.q[: stop - start] = whole.q[start:stop]
    if not changes:
        part.k_cache, part.v_cache, part.block_tables = whole.k_cache, whole.v_cache, whole.block_tables
    return prefill(part, device=device)


@each_form
@settings(max_examples=2)
@given(data=st.data())
def test_few_rows_have_the_same_bits_in_any_number_batch_placement_layout_and_schedule(form, data, open_device):
    assert_same_bits_elsewhere(form, data, open_device)


@pytest.mark.long
@each_form_and_fp8
@settings(max_examples=10)
@given(data=st.data())
def test_few_rows_have_the_same_bits_more_often(form, data, open_device):
    assert_same_bits_elsewhere(form, data, open_device)


def assert_same_bits_elsewhere(form, data, open_device):
    most = FEW_ROWS // form.group_size
    length = data.draw(st.sampled_from([SPLIT + 2, PART + 3]))
    scale, window = data.draw(st.sampled_from([4.0, None])), data.draw(st.sampled_from([None, 600]))
    spec = form.replace(seq_lens=(length,), query_lens=(most,), scale=scale, window=window, num_kv_heads=1)
    whole = build(spec)
    out, lse = prefill(whole, open_device)
    cut, seed = data.draw(st.integers(1, most - 1)), data.draw(st.integers(0, 99))
    for start, stop in ((0, cut), (cut, most), (most - 1, most)):
        device = open_device(seed=seed, global_race=True)
        assert_same_bits(rows_of(whole, start, stop, device), (out[start:stop], lse[start:stop]))
    other = spec.replace(
        seq_lens=(5, length, 70), query_lens=(5, most, 40), ids=(8, 0, 9), placement_seed=seed, layout="HND"
    )
    moved, moved_lse = prefill(build(other), open_device)
    assert_same_bits((moved[5 : 5 + most], moved_lse[5 : 5 + most]), (out, lse))


def test_earlier_rows_whose_window_begins_in_another_split_change_no_bit(open_device):
    """Of rows that see three splits: sums of three numbers tell in which order they were added."""
    window, most = 2 * SPLIT + 20, FEW_ROWS // 4
    length = SPLIT + window + most // 2  # half of the rows see the last key of the first split
    whole = build(TENSOR.replace(seq_lens=(length,), query_lens=(most,), window=window, num_kv_heads=1))
    out, lse = prefill(whole, open_device)
    half = slice(most // 2, most)
    assert_same_bits(rows_of(whole, half.start, half.stop, open_device()), (out[half], lse[half]))


@each_form
def test_rows_that_see_keys_of_one_warp_have_the_bits_of_long_chunks(form, open_device):
    """However pivots move: one kernel asks maxima, the other one sums. And `exact` gives those bits to all rows."""
    most, first = FEW_ROWS // form.group_size, PART - 1
    spec = form.replace(seq_lens=(PART + 60,), query_lens=(60 + most,), num_kv_heads=1, sinks=True, scale=1.0)
    whole = build(spec)
    out, lse = prefill(whole, open_device)
    start = most + first - PART  # the row at position `first`, and one that sees a key more
    few, few_lse = rows_of(whole, start, start + 2, open_device())
    assert_same_bits((few[:1], few_lse[:1]), (out[start : start + 1], lse[start : start + 1]))
    np.testing.assert_allclose(few_lse[1], lse[start + 1], rtol=1e-5)
    last = slice(len(out) - most, len(out))
    part = build(spec.replace(query_lens=(most,)))
    part.q, part.k_cache, part.v_cache = whole.q[last], whole.k_cache, whole.v_cache
    part.block_tables = whole.block_tables
    out_of_few, lse_of_few = np.zeros_like(part.q), np.zeros(part.q.shape[:2], np.float32)
    with with_capability(open_device(), CAPABILITY) as device:
        call = checked_call(part)._replace(exact=True)
        planning.prefill_attention(device, call, out_of_few, lse_of_few)
    assert_same_bits((out_of_few, lse_of_few), (out[last], lse[last]))


def test_a_pivot_moves_by_what_its_own_row_sees_late(open_device):
    """The weight of one key is 2**8.02 times that of all others for the first token, and far more for the rest."""
    length, most = PART + 60, FEW_ROWS // TENSOR.group_size
    whole = build(TENSOR.replace(seq_lens=(length,), query_lens=(most,), num_kv_heads=1, scale=1.0))
    logits = np.zeros((length, whole.spec.head_dim))  # to base 2
    logits[5 * 64 + 7] = np.where(np.arange(whole.spec.head_dim) < TENSOR.group_size, 8.02, 1000)
    # Queries are unit vectors: the score of row i is element i of the key.
    whole.q[...] = np.eye(FEW_ROWS, whole.spec.head_dim).reshape(whole.q.shape)
    positions = np.arange(length)
    blocks = whole.block_tables[0, positions // whole.spec.block_size]
    whole.k_cache[blocks, positions % whole.spec.block_size, 0] = np.log(2) * logits
    out, lse = prefill(whole, open_device)
    assert_close(whole, out, lse)
    assert_same_bits(rows_of(whole, 0, 1, open_device()), (out[:1], lse[:1]))


def test_keys_that_outweigh_the_first_ones_but_move_no_pivot_are_weighed_once():
    """Those after the first tile weigh 2**5 times as much: their maxima are looked for, and P is made only once."""
    most, later = FEW_ROWS // TENSOR.group_size, np.arange(64, PART)
    problem = build(TENSOR.replace(seq_lens=(PART + 8,), query_lens=(most,), num_kv_heads=1, scale=1.0))
    size, counts = problem.spec.block_size, []
    problem.q[:], problem.k_cache[:] = 1 / problem.spec.head_dim, 0
    for logit in (0, 5):  # to base 2
        problem.k_cache[problem.block_tables[0, later // size], later % size] = np.log(2) * logit
        device = emulator(stats=True)
        prefill(problem, device=device)
        counts.append(device.launches[0].total_warp_instructions)
    assert counts[1] < 1.12 * counts[0]


@pytest.mark.parametrize("block_size", [3, *long([1, 256])])
def test_the_bits_are_the_same_for_any_block_size(block_size, open_device):
    spec = TENSOR.replace(seq_lens=(SPLIT + 30,), query_lens=(2,), num_kv_heads=1)
    expected = prefill(build(spec), open_device)
    assert_same_bits(prefill(build(spec.replace(block_size=block_size)), open_device), expected)


@each_form
def test_a_needle_is_found_at_the_ends_of_tiles_parts_and_splits(form, open_device):
    needles = (0, 63, 64, PART - 1, PART, 3 * PART + 5, SPLIT - 1, SPLIT, SPLIT + 33)
    spec = form.replace(seq_lens=(SPLIT + 40,), query_lens=(2,), num_kv_heads=len(needles), needles=needles)
    problem = build(spec.replace(fingerprint=True, kv_scales=None))
    out, lse = prefill(problem, open_device)
    assert_close(problem, out, lse)
    if not form.softcap and not form.alibi and not form.score_mod:
        np.testing.assert_array_equal(out.astype(np.float32), np.round(expect(problem)[0]))


def test_nan_in_a_key_reaches_only_the_rows_that_see_it(open_device):
    problem = build(TENSOR.replace(seq_lens=(SPLIT + 4,), query_lens=(8,)))
    out, lse = prefill(problem, open_device)
    position = SPLIT
    block, offset = problem.block_tables[0, position // 16], position % 16
    problem.k_cache[block, offset, 1] = np.nan
    got, got_lse = prefill(problem, open_device)
    seen = np.zeros(lse.shape, bool)
    seen[position - (SPLIT + 4 - 8) :, 4:] = True
    assert_same_bits((got[~seen], got_lse[~seen]), (out[~seen], lse[~seen]))
    assert np.isnan(got_lse[seen]).all()


def test_keys_that_no_row_sees_are_not_read():
    """Everything before the window of the first row, past the last row; nor are tiles of such keys made of others."""
    whole = build(TENSOR.replace(seq_lens=(SPLIT + 300,), query_lens=(1,)))
    problem = build(TENSOR.replace(seq_lens=(SPLIT + 60,), query_lens=(5,), window=600))
    problem.block_tables, problem.k_cache, problem.v_cache = whole.block_tables, whole.k_cache, whole.v_cache
    device = emulator(footprint=True, stats=True)
    prefill(problem, device=device)
    first, last = SPLIT + 55 - 599, SPLIT + 59
    rows, tiles = rows_read(problem, first, last), last // 64 - first // 64 + 1
    for name in ("k_cache", "v_cache"):
        device.launches[0].footprint.expect(name, read=rows, written=False)
        assert device.launches[0].buffers[name].bytes_read == tiles * 64 * problem.k_cache[0, 0].nbytes


@pytest.mark.parametrize("check", [False, True])
def test_what_is_wrong_in_one_call_does_no_harm_to_the_next(check, open_device):
    problem = build(TENSOR.replace(seq_lens=(SPLIT + 9, 600, 0), query_lens=(4, 8, 0), num_kv_heads=1, sinks=True))
    # Room for more parts.
    problem.block_tables = np.pad(problem.block_tables, ((0, 0), (0, 2 * SPLIT // 16)), constant_values=-1)
    call = checked_call(problem, check=check)
    with with_capability(open_device(global_race=True), CAPABILITY) as device:
        expected = np.zeros_like(problem.q), np.zeros(problem.q.shape[:2], np.float32)
        planning.prefill_attention(device, call, *expected)
        wrong = [
            {"seq_lens": numbers(-1, 600, 0)},
            {"seq_lens": numbers(2**31 - 1, 3, 7)},
            {"query_starts": numbers(0, 4, 3, 2**31 - 1)},
            {"query_starts": numbers(-(2**31), 12, 12, 0)},
        ]
        for changes in wrong:
            out, lse = np.zeros_like(problem.q), np.zeros(problem.q.shape[:2], np.float32)
            planning.prefill_attention(device, call._replace(**changes), out, lse)
        out, lse = np.zeros_like(problem.q), np.zeros(problem.q.shape[:2], np.float32)
        planning.prefill_attention(device, call, out, lse)
    assert_close(problem, *expected)
    assert_same_bits((out, lse), expected)
    assert (out[:4] != 0).any()


def test_lengths_that_change_under_a_running_call_harm_no_later_one():
    problem = build(TENSOR.replace(seq_lens=(SPLIT + 9, 600), query_lens=(1, 2), num_kv_heads=1))
    problem.block_tables %= len(problem.k_cache)  # entries past the lengths are used, too
    expected = prefill(problem)
    lengths = [0, 3, PART, PART + 1, SPLIT, SPLIT + 9, 2**30]
    # States that no warp has left may be merged.
    with with_capability(emulator(init_check=False, race=False, seed=0), CAPABILITY) as device:
        result = after_changing_lengths(
            device, checked_call(problem), planning.prefill_attention, None, lengths, seed=0
        )
    assert_same_bits(result, expected)


def test_each_sequence_is_for_one_kernel():
    lengths, most = (PART, PART + 1, 3, 600), FEW_ROWS // 4
    query_lens = (most, most, 3, most + 1)
    problem = build(TENSOR.replace(seq_lens=lengths, query_lens=query_lens, num_kv_heads=1, scale=-0.1))
    device = emulator(footprint=True)
    assert_close(problem, *prefill(problem, device=device))
    of_split = np.zeros(problem.out.shape, bool)
    of_split[most : 2 * most] = True
    nothing = np.zeros_like(of_split)
    for launch, rows in zip(device.launches, (~of_split, nothing, of_split), strict=True):
        launch.footprint.expect("out", read=False, written=rows)


def test_few_tokens_of_short_and_empty_sequences_take_the_split_kernel_alone(open_device):
    problem = build(TENSOR.replace(seq_lens=(600, 3, 0, 40), query_lens=(3, 3, 0, 1), num_kv_heads=1))
    call = checked_call(problem)
    assert len(planning.plan(SimpleNamespace(capability=CAPABILITY, lineinfo=False), call, problem.out).launches) == 2
    out, lse = prefill(problem, open_device)
    assert_close(problem, out, lse)
    bad = call._replace(seq_lens=numbers(600, 2, 0, 40))
    got, got_lse = np.ones_like(problem.q), np.ones(problem.q.shape[:2], np.float32)
    with with_capability(open_device(), CAPABILITY) as device:
        planning.prefill_attention(device, bad, got, got_lse)
    assert (got[3:6] == 0).all()
    assert (got_lse[3:6] == -np.inf).all()
    assert_same_bits((got[6:], got_lse[6:]), (out[6:], lse[6:]))


@pytest.mark.long
def test_parts_grow_with_sequences_that_have_too_many(open_device):
    form = MORE_FORMS["8 dims"].replace(block_size=256, num_kv_heads=1, group_size=1)
    for length in (LONGEST_OF_PARTS, LONGEST_OF_PARTS + 1):
        problem = build(form.replace(seq_lens=(length,), query_lens=(2,)))
        assert_close(problem, *prefill(problem, open_device))
