"""The prefill kernels in the emulator, with all of its checks on, against the oracle."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import reference
from pagedkv.cuda.plans import prefill as planning
from pagedkv.cuda.plans.prefill import suits_tensor_cores, tensor_config
from pagedkv.kernels.prefill.tensor_cores.tile import TileShape

from ...support.devices import emulator, with_capability
from ...support.problems import assert_close, build, expect
from ...support.strategies import each_of, long
from ..decode_cases import LargeCaches, assert_same_bits, checked_call, move_past_4_gib
from .variants import (
    BOTH,
    CORES,
    FORMS,
    FP8,
    MORE_FORMS,
    ONE_STAGE,
    OPTIONS,
    TENSOR,
    VLLM,
    keys_of_tile,
    prefill,
    specs,
)


def test_forms():
    """They differ in what they are here for."""
    calls = {name: checked_call(build(form.replace(seq_lens=(3,), query_lens=(1,)))) for name, form in FORMS.items()}
    suited = {name: call for name, call in calls.items() if suits_tensor_cores(call)}
    shapes = {name: TileShape(tensor_config(call, capability=(9, 0))) for name, call in suited.items()}
    assert {name: (x.row_tiles, x.keys, x.stages, x.has_gap) for name, x in shapes.items()} == {
        "tensor cores": (2, 64, 2, False),
        "options": (1, 32, 2, True),
        "one stage": (1, 64, 1, False),
        "fp8": (2, 64, 1, False),
    }


@each_of("form", FORMS | MORE_FORMS, *FORMS)
@settings(max_examples=4)
@given(data=st.data())
def test_every_form_meets_the_error_bound(form, data, open_device):
    problem = build(data.draw(specs(form)))
    assert_close(problem, *prefill(problem, open_device))


@pytest.mark.long
@each_of("form", FORMS)
@settings(max_examples=20)
@given(data=st.data())
def test_every_form_meets_the_error_bound_more_often(form, data, open_device):
    problem = build(data.draw(specs(form)))
    assert_close(problem, *prefill(problem, open_device))


def test_float32_loses_nothing(open_device):
    problem = build(CORES.replace(seq_lens=(2, 90), query_lens=(2, 40), scale=0.25))
    out, _ = prefill(problem, open_device)
    assert np.abs(out - expect(problem)[0]).max() <= 1e-5


def test_eight_warps_have_the_bits_of_four():
    """Those of fp8 with more than 128 dims, where shared memory has room for 128 rows of queries; on 8.9 it has not."""
    problem = build(MORE_FORMS["e5m2"].replace(seq_lens=(70,), query_lens=(20,), num_kv_heads=1))
    shapes = [TileShape(tensor_config(checked_call(problem), capability=cc)) for cc in ((9, 0), (8, 9))]
    assert [(x.num_warps, x.rows) for x in shapes] == [(8, 128), (4, 64)]
    eight, four = (prefill(problem, capability=cc) for cc in ((9, 0), (8, 9)))
    assert_close(problem, *eight)
    for mine, other in zip(eight, four, strict=True):
        np.testing.assert_array_equal(mine, other)


@each_of("form", FORMS)
def test_a_needle_is_found_at_every_position_of_a_tile(form, open_device):
    """Of the rows at and past it; a KV head each."""
    size = keys_of_tile(form)
    for first in range(0, size, size // 2):
        needles = tuple(range(first, first + size // 2, 3))
        spec = form.replace(
            seq_lens=(size + 5,), query_lens=(6,), num_kv_heads=len(needles), needles=needles, fingerprint=True
        )
        problem = build(
            spec.replace(group_size=1, kv_scales=None) if form in (CORES, VLLM) else spec.replace(kv_scales=None)
        )
        out, lse = prefill(problem, open_device)
        assert_close(problem, out, lse)
        if not form.softcap:
            np.testing.assert_array_equal(out.astype(np.float32), np.round(expect(problem)[0]))


@each_of("form", FORMS, *BOTH)
def test_many_sequences_find_their_rows(form, open_device):
    """More than a warp searches at once, of none to a few tokens each, and one of several tiles."""
    rng = np.random.default_rng(3)
    lengths = [*rng.integers(0, 4, 40).tolist(), 70, *rng.integers(0, 4, 5).tolist(), 0, 0]
    problem = build(form.replace(seq_lens=tuple(lengths), query_lens=tuple(lengths), num_kv_heads=1))
    assert_close(problem, *prefill(problem, open_device))


@pytest.mark.long
def test_a_thousand_sequences_find_their_rows(open_device):
    lengths = tuple(np.random.default_rng(4).integers(0, 3, 1100).tolist())
    problem = build(CORES.replace(seq_lens=lengths, query_lens=lengths, num_kv_heads=1, group_size=1))
    assert_close(problem, *prefill(problem, open_device))


def one_sided(score, q_pos, k_pos, head, seq):
    """Head 1 sees nothing; the others what they see by position, head and sequence."""
    if head == 1:
        return -math.inf
    return 0.5 * score + (0.7 if k_pos % 3 == 1 else 0.0) + 0.1 * head + 0.3 * seq - 0.01 * (q_pos - k_pos)


@each_of("form", BOTH | {"options": OPTIONS, "fp8": FP8}, "CUDA cores")
def test_score_mod_sees_positions_heads_and_sequences_and_may_mask_every_key(form, open_device):
    for sinks in (False, True):
        spec = form.replace(seq_lens=(1, 40, 70), query_lens=(1, 5, 70), sinks=sinks, score_mod=one_sided)
        problem = build(spec.replace(causal=not sinks))
        out, lse = prefill(problem, open_device)
        assert_close(problem, out, lse)
        assert (out[:, 1] == 0).all()
        expected = problem.options["sinks"][1] if sinks else np.float32(-np.inf)
        np.testing.assert_array_equal(lse[:, 1], np.full(len(lse), expected))


@each_of("form", BOTH | {"one stage": ONE_STAGE, "fp8": FP8}, *BOTH)
def test_sinks_far_above_and_below_all_logits(form, open_device):
    problem = build(form.replace(seq_lens=(20,), query_lens=(20,), sinks=True))
    heads = np.arange(problem.spec.num_heads)
    problem.options["sinks"] = np.array([-1e30, 300.0, -300.0, 0.5], np.float32)[heads % 4]
    assert_close(problem, *prefill(problem, open_device))


def test_rows_whose_logits_are_all_far_below_zero_have_keys(open_device):
    problem = build(OPTIONS.replace(seq_lens=(50,), query_lens=(50,), softcap=1e36, scale=1e30))
    problem.q[...], problem.k_cache[...] = 10, -10
    out, lse = prefill(problem, open_device)
    expected, expected_lse = expect(problem)
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=0.02)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


@pytest.mark.parametrize(("form", "vector"), [(TENSOR, 16), (FP8.replace(head_dim=64), 8)], ids=["float16", "fp8"])
def test_offsets_are_wide_where_32_bits_do_not_count_the_vectors(form, vector):
    call = checked_call(build(form.replace(seq_lens=(5,), query_lens=(3,), num_kv_heads=1)))
    block_bytes = call.k_cache.strides[0]
    for num_blocks, is_wide in ((2**32 * vector // block_bytes, False), (2**32 * vector // block_bytes + 1, True)):
        shape = (num_blocks, *call.k_cache.shape[1:])
        large = np.lib.stride_tricks.as_strided(call.k_cache, shape, call.k_cache.strides)
        wide = call._replace(k_cache=large, v_cache=large, spec=replace(call.spec, num_blocks=num_blocks))
        config = tensor_config(wide, capability=(9, 0))
        assert config.vector_bytes == vector
        assert config.wide == is_wide


WHOLE = {"tensor cores": TENSOR, "one stage": ONE_STAGE, "fp8 as float16": MORE_FORMS["fp8 as float16"]}


@each_of("form", WHOLE | {"fp8": FP8}, "tensor cores", "fp8")
def test_lanes_that_store_and_load_together_meet_different_banks(form):
    device = emulator(stats=True)
    prefill(build(form.replace(seq_lens=(150,), query_lens=(40,))), device=device)
    (launch,) = device.launches
    most = 1.12 if form == FP8 else 1  # 5 of 8 lanes have a piece of 80 dims
    assert 0 < launch.shared_wavefronts <= most * launch.shared_wavefronts_min


@each_of("form", FORMS, *BOTH)
def test_without_an_lse_and_with_strides_of_its_own(form, open_device):
    problem = build(form.replace(seq_lens=(40, 70), query_lens=(40, 5)))
    expected, _ = prefill(problem, open_device)
    problem.q = np.ascontiguousarray(problem.q[:, ::-1])[:, ::-1]
    out = np.zeros_like(problem.q)
    with open_device() as device:
        planning.prefill_attention(device, checked_call(problem), out, None)
    assert_same_bits((out,), (expected,))


@pytest.mark.parametrize("form", [CORES, *long([TENSOR, FP8])], ids=["CUDA cores", "tensor cores", "fp8"])
def test_caches_of_more_than_4_gib_and_of_negative_strides(form):
    spec = form.replace(seq_lens=(70, 3), query_lens=(20, 3))
    expected = prefill(build(spec))
    problem = build(spec)
    num_blocks = len(problem.k_cache)
    move_past_4_gib(problem)
    assert_same_bits(prefill(problem, device=LargeCaches(num_blocks)), expected)
    problem = build(spec)
    for name in ("k_cache", "v_cache"):
        setattr(problem, name, np.ascontiguousarray(getattr(problem, name)[::-1])[::-1])
    assert_same_bits(prefill(problem), expected)


@pytest.mark.parametrize("kind", ["fp8_e4m3", *long(["fp8_e5m2"])])
@pytest.mark.parametrize(
    "capability", [(9, 0), pytest.param((8, 0), marks=pytest.mark.long)], ids="cc{0[0]}.{0[1]}".format
)
def test_every_fp8_code_is_its_value(kind, capability):
    """As a value: the output of one token. As a key: its LSE."""
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(reference.FP8_DTYPES[kind]).astype(np.float32)
    for q_dtype in ("float16", "bfloat16") if kind == "fp8_e5m2" else ("bfloat16",):
        form = FP8.replace(q_dtype=q_dtype, kv_dtype=kind, kv_scales=None)
        problem = build(form.replace(seq_lens=(1,) * 256, query_lens=(1,) * 256, num_kv_heads=1, scale=1.0))
        block = problem.block_tables[:, 0]
        problem.q[...] = 0
        problem.q[:, :, 5] = 1
        problem.k_cache[block] = 0
        problem.k_cache[block, 0, 0, 5] = codes
        problem.v_cache[block, 0, 0] = codes[:, None]
        with with_capability(emulator(), capability) as device:
            out, lse = np.zeros_like(problem.q), np.zeros(problem.q.shape[:2], np.float32)
            planning.prefill_attention(device, checked_call(problem), out, lse)
        finite = np.isfinite(values)
        np.testing.assert_allclose(lse[finite, 0], values[finite], rtol=3e-7, atol=2e-6)
        assert np.isnan(lse[np.isnan(values), 0]).all()
        assert not np.isfinite(lse[~finite]).any()
        small = np.abs(values) <= 1024  # a float32 holds larger logits, in units of log(2), to a thousandth and worse
        got, expected = out[:, 0, 7].astype(np.float32), values.astype(out.dtype).astype(np.float32)
        np.testing.assert_array_equal(got[small], expected[small])
        np.testing.assert_allclose(got[finite], expected[finite], rtol=0.01)
