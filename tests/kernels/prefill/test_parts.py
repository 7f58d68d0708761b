"""What prefill for few rows over a long context alone does: keys split over warps and thread blocks."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagedkv
from pagedkv.cuda import warmup as compiling_ahead
from pagedkv.cuda.device import LARGEST_GRID_X
from pagedkv.cuda.plans import prefill as planning
from pagedkv.kernels.prefill.config import FEW_ROWS as MOST
from pagedkv.kernels.prefill.config import LONGEST_OF_PARTS, PART
from pagedkv.kernels.prefill.tensor_cores.parts.shape import MOST_PARTS
from pagedkv.visible import Visible

from ...attention.drawn import FEW_ROW_KERNELS as KERNELS
from ...attention.drawn import MORE_PREFILLS
from ...attention.kernels import (
    FEW_ROWS,
    FEW_ROWS_SPLIT,
    NO_WARPGROUPS,
    assert_same_bits,
    each_kernel,
    new_results,
)
from ...support.devices import emulator, with_capability
from ...support.problems import assert_close

CAPABILITY = (9, 0)
SPLIT = FEW_ROWS_SPLIT


def device_of(capability):
    """What a plan asks of a device, which runs as many thread blocks at once as there may be."""
    return SimpleNamespace(capability=capability, lineinfo=False, blocks_at_once=lambda *_: LARGEST_GRID_X)


def launched(problem, capability=CAPABILITY, **changes):
    """The kernels that a call launches, and in which grids."""
    device = device_of(capability)
    call = FEW_ROWS.call(problem)._replace(**changes)
    plan = planning.plan(device, call)
    return {launch.kernel.entry.removeprefix("pagedkv_"): launch.grid for launch in plan.launches}


@pytest.fixture
def uncompiled(monkeypatch):
    """Plans with kernels that are nothing but a name."""
    monkeypatch.setattr(
        planning, "compile_for", lambda device, make, config: SimpleNamespace(entry=make.__name__.removeprefix("make_"))
    )


def test_what_is_launched_follows_from_shapes_bounds_and_options(uncompiled):
    both = {"seq_lens": (600, 9), "query_lens": (30, 9)}
    few = FEW_ROWS.build(seq_lens=(600,), query_lens=(8,))
    assert launched(FEW_ROWS.build(**both)) == {
        "prefill": (2 * (39 * 4 // 128 + 2), 1, 1),
        "prefill_split": (2 * 2, 1, 1),
        "prefill_merge": (2 * 2 * MOST, 1, 1),
    }
    assert launched(few) == {"prefill_split": (2, 1, 1), "prefill_merge": (2 * MOST, 1, 1)}
    for changes in ({"exact": True}, {"max_seq_len": PART}):
        assert list(launched(FEW_ROWS.build(**both), **changes)) == ["prefill"]
        assert list(launched(few, **changes)) == ["prefill"]
    for fields in ({"window": PART}, {"group_size": MOST + 1}, {"layout": "vllm"}, {"q_dtype": "float32"}):
        assert not any("split" in name or "merge" in name for name in launched(FEW_ROWS.build(**both, **fields)))
    assert list(launched(FEW_ROWS.build(**both, window=PART + 1))) == ["prefill", "prefill_split", "prefill_merge"]
    wide = FEW_ROWS.build(**both, head_dim=136)
    assert list(launched(wide, (8, 0))) == ["prefill"]
    assert list(launched(wide, (9, 0))) == ["prefill", "prefill_split", "prefill_merge"]
    tiles = FEW_ROWS.build(**both, softcap=3.0)  # 16 rows of a thread block
    assert launched(tiles)["prefill_split"] == (2 * 2 * 2, 1, 1)


def test_few_tokens_of_short_sequences_are_for_warpgroups_whatever_else_is_in_the_batch(uncompiled):
    """Theirs are other bits."""
    few = FEW_ROWS.build(seq_lens=(600,), query_lens=(8,), head_dim=128)
    assert list(launched(few)) == ["prefill_wgmma", "prefill_split", "prefill_merge"]
    assert list(launched(few, (8, 0))) == ["prefill_split", "prefill_merge"]


def test_warmup_makes_calls_of_all_kernels(uncompiled, monkeypatch):
    given = []
    monkeypatch.setattr(compiling_ahead, "compile_ahead", lambda decodes, prefills, *_: given.extend(prefills) or [])
    device = device_of(CAPABILITY)
    for head_dim, many_rows in ((64, "prefill"), (128, "prefill_wgmma")):
        given.clear()
        pagedkv.warmup(8, 2, head_dim, 16, "float16", prefill=True, capabilities=[CAPABILITY])
        assert [call.options.softcap for call in given] == [None, 1.0] * 2
        shared = many_rows.replace("prefill", "prefill_stretches")
        for call, many in zip(given, [[many_rows]] * 2 + [[shared, f"{shared}_merge"]] * 2, strict=True):
            launches = planning.plan(device, call).launches
            assert [launch.kernel.entry for launch in launches] == [*many, "prefill_split", "prefill_merge"]


@given(
    max_seq_len=st.integers(1, 2**20) | st.sampled_from([2048, 2049, 2**17, 2**17 + 1, 2**31 - 1]),
    seq_len=st.integers(0, 2**31 - 1) | st.builds(lambda n, k: n * PART + k, st.integers(1, 99), st.integers(-40, 40)),
    window=st.integers(1, 5000) | st.just(2**31 - 1),
    query_len=st.integers(1, 32),
)
def test_a_grid_has_every_part(max_seq_len, seq_len, window, query_len):
    seq_len = max(1, seq_len % max_seq_len + 1)
    size = PART
    while size * MOST_PARTS < seq_len:
        size *= 2
    first = max(0, seq_len - min(query_len, seq_len) - window + 1)
    parts = (seq_len - 1) // size - first // size + 1
    assert parts <= planning.most_parts(Visible(window - 1), max_seq_len) <= MOST_PARTS


@pytest.mark.parametrize(
    ("wide", "changes"),
    [
        (False, {"head_dim": 120, "kv_dtype": "fp8_e4m3", "seq_lens": (PART + 70,)}),
        (True, {"head_dim": 64, "seq_lens": (4 * SPLIT + 52,)}),
    ],
)
def test_before_9_0_warps_meet_at_barriers_of_their_own(wide, changes, open_device, monkeypatch):
    monkeypatch.setattr(planning, "is_wide", lambda *_: wide)
    problem = FEW_ROWS.build(query_lens=(8,), num_kv_heads=1, **changes)
    assert_close(problem, *replace(FEW_ROWS, capability=(8, 0)).attend(problem, open_device))


def test_earlier_rows_whose_window_begins_in_another_split_change_no_bit(open_device):
    """Of rows that see three splits: sums of three numbers tell in which order they were added."""
    window, most = 2 * SPLIT + 20, MOST // 4
    length = SPLIT + window + most // 2  # half of the rows see the last key of the first split
    whole = FEW_ROWS.build(seq_lens=(length,), query_lens=(most,), window=window, num_kv_heads=1)
    out, lse = FEW_ROWS.attend(whole, open_device)
    half = slice(most // 2, most)
    assert_same_bits(FEW_ROWS.attend_rows(whole, half.start, half.stop, open_device), (out[half], lse[half]))


@each_kernel(FEW_ROWS, long=tuple(replace(kernel, capability=NO_WARPGROUPS) for kernel in KERNELS[1:]))
def test_rows_that_see_keys_of_one_warp_have_the_bits_of_long_chunks(kernel, open_device):
    """Except on warpgroups. However pivots move: one kernel asks maxima, the other one sums.

    And `exact` gives the bits of long chunks to all rows.
    """
    most, first = MOST // kernel.spec.group_size, PART - 1
    fields = {"num_kv_heads": 1, "sinks": True, "scale": 1.0}
    whole = kernel.build(seq_lens=(PART + 60,), query_lens=(60 + most,), **fields)
    out, lse = kernel.attend(whole, open_device)
    start = most + first - PART  # the row at position `first`, and one that sees a key more
    few, few_lse = kernel.attend_rows(whole, start, start + 2, open_device)
    capability = with_capability(open_device(), kernel.capability).capability
    if not planning.uses_wgmma(planning.tensor_config(kernel.call(whole), capability=capability), capability):
        assert_same_bits((few[:1], few_lse[:1]), (out[start : start + 1], lse[start : start + 1]))
    np.testing.assert_allclose(few_lse[1], lse[start + 1], rtol=1e-5)
    last = slice(len(out) - most, len(out))
    part = kernel.build(seq_lens=(PART + 60,), query_lens=(most,), **fields)
    part.q[...] = whole.q[last]
    part.k_cache, part.v_cache, part.block_tables = whole.k_cache, whole.v_cache, whole.block_tables
    result = new_results(part)
    with open_device() as device:
        kernel.launch(device, kernel.call(part)._replace(exact=True), *result)
    assert_same_bits(result, (out[last], lse[last]))


def test_a_pivot_moves_by_what_its_own_row_sees_late(open_device):
    """The weight of one key is 2**8.02 times that of all others for the first token, and far more for the rest."""
    length, most = PART + 60, MOST // 4
    whole = FEW_ROWS.build(seq_lens=(length,), query_lens=(most,), num_kv_heads=1, scale=1.0)
    logits = np.zeros((length, whole.spec.head_dim))  # to base 2
    logits[5 * 64 + 7] = np.where(np.arange(whole.spec.head_dim) < 4, 8.02, 1000)
    # Queries are unit vectors: the score of row i is element i of the key.
    whole.q[...] = np.eye(MOST, whole.spec.head_dim).reshape(whole.q.shape)
    positions = np.arange(length)
    blocks = whole.block_tables[0, positions // whole.spec.block_size]
    whole.k_cache[blocks, positions % whole.spec.block_size, 0] = np.log(2) * logits
    out, lse = FEW_ROWS.attend(whole, open_device)
    assert_close(whole, out, lse)
    assert_same_bits(FEW_ROWS.attend_rows(whole, 0, 1, open_device), (out[:1], lse[:1]))


def test_keys_that_outweigh_the_first_ones_but_move_no_pivot_are_weighed_once():
    """Those after the first tile weigh 2**5 times as much: their maxima are looked for, and P is made only once."""
    most, later = MOST // 4, np.arange(64, PART)
    problem = FEW_ROWS.build(seq_lens=(PART + 8,), query_lens=(most,), num_kv_heads=1, scale=1.0)
    size, counts = problem.spec.block_size, []
    problem.q[:], problem.k_cache[:] = 1 / problem.spec.head_dim, 0
    for logit in (0, 5):  # to base 2
        problem.k_cache[problem.block_tables[0, later // size], later % size] = np.log(2) * logit
        device = emulator(stats=True)
        FEW_ROWS.attend(problem, device=device)
        counts.append(device.launches[0].total_warp_instructions)
    assert counts[1] < 1.12 * counts[0]


def test_each_sequence_is_for_one_kernel():
    lengths, most = (PART, PART + 1, 3, 600), MOST // 4
    query_lens = (most, most, 3, most + 1)
    problem = FEW_ROWS.build(seq_lens=lengths, query_lens=query_lens, num_kv_heads=1, scale=-0.1)
    device = emulator(footprint=True)
    assert_close(problem, *FEW_ROWS.attend(problem, device=device))
    of_split = np.zeros(problem.out.shape, bool)
    of_split[most : 2 * most] = True
    nothing = np.zeros_like(of_split)
    for launch, rows in zip(device.launches, (~of_split, nothing, of_split), strict=True):
        launch.footprint.expect("out", read=False, written=rows)


def test_few_tokens_of_short_and_empty_sequences_take_the_split_kernel_alone(open_device):
    problem = FEW_ROWS.build(seq_lens=(600, 3, 0, 40), query_lens=(3, 3, 0, 1), num_kv_heads=1)
    call = FEW_ROWS.call(problem)
    assert len(planning.plan(SimpleNamespace(capability=CAPABILITY, lineinfo=False), call).launches) == 2
    out, lse = FEW_ROWS.attend(problem, open_device)
    assert_close(problem, out, lse)
    got, got_lse = new_results(problem)
    with open_device() as device:
        FEW_ROWS.launch(device, call._replace(seq_lens=np.array([600, 2, 0, 40], np.int32)), got, got_lse)
    assert (got[3:6] == 0).all()
    assert (got_lse[3:6] == -np.inf).all()
    assert_same_bits((got[6:], got_lse[6:]), (out[6:], lse[6:]))


@each_kernel(long=(MORE_PREFILLS["8 dims"],))
def test_parts_grow_with_sequences_that_have_too_many(kernel, open_device):
    for length in (LONGEST_OF_PARTS, LONGEST_OF_PARTS + 1):
        problem = kernel.build(seq_lens=(length,), query_lens=(2,), block_size=256, num_kv_heads=1, group_size=1)
        assert_close(problem, *kernel.attend(problem, open_device))
