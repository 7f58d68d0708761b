"""Decode attention against the oracle, and what it promises about poison, needles, windows and strides."""

import sys

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import pagedkv
from pagedkv.cpu.attention import decode

from ...support.problems import FLOATS, Spec, as_torch, assert_close, build, expect, move_past_2_31_elements, run
from ...support.programs import printed_by
from ...support.strategies import (
    DECODE_KERNELS,
    MORE_DECODE_KERNELS,
    SPLIT,
    fading_faster,
    fading_parity,
    long,
    specs,
)

SOME = [
    Spec(kv_dtype="float32", head_dim=64),
    Spec(kv_dtype="bfloat16", q_dtype="bfloat16", head_dim=128, layout="HND", strides="halves"),
    Spec(kv_dtype="fp8_e4m3", q_dtype="float16", head_dim=96, strides="strided"),
    Spec(kv_dtype="float32", head_dim=40, layout="vllm", strides="strided"),
    Spec(kv_dtype="fp8_e4m3", q_dtype="float32", head_dim=80, layout="vllm"),
]
some = pytest.mark.parametrize("spec", SOME, ids=lambda spec: f"{spec.layout}-{spec.kv_dtype}")


def test_splits_are_where_the_tests_think_they_are():
    assert decode.SPLIT == SPLIT


@pytest.mark.parametrize("kernel", [*DECODE_KERNELS, *long(MORE_DECODE_KERNELS)], ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_oracle(kernel, data):
    problem = build(data.draw(specs(kernel)))
    assert_close(problem, *run(problem))


@pytest.mark.parametrize(
    ("group_size", "spec"),
    [
        pytest.param(
            *(size, spec),
            id=f"{size}-{spec.layout}-{spec.kv_dtype}",
            marks=pytest.mark.long if size == 1 and spec in (SOME[1], SOME[4]) else (),
        )
        for size in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 48)
        for spec in SOME
    ],
)
def test_group_sizes(spec, group_size):
    problem = build(spec.replace(seq_lens=(SPLIT + 70, 3, 0), group_size=group_size, num_kv_heads=3, scale=0.3))
    assert_close(problem, *run(problem))


@some
def test_head_dims(spec):
    step = spec.head_dim & -spec.head_dim  # those of the same kernel
    for head_dim in range(step, 513, 2 * step):
        problem = build(spec.replace(seq_lens=(67, 1), head_dim=head_dim, sinks=True))
        assert_close(problem, *run(problem))


@some
def test_alibi_biases_in_the_thousands(spec):
    problem = build(spec.replace(seq_lens=(3000, 1500), alibi=True, num_kv_heads=1, group_size=2))
    problem.options["alibi_slopes"] = np.array([1.0, 0.25], np.float32)
    assert_close(problem, *run(problem))


@some
@pytest.mark.parametrize("scale", [1.5, -1.5])
def test_scores_in_the_hundreds(spec, scale):
    problem = build(spec.replace(seq_lens=(700, 30), scale=scale, sinks=True))
    assert np.abs(expect(problem)[1]).max() > 20
    assert_close(problem, *run(problem))


@some
@pytest.mark.parametrize("poison", ["inf", "huge", "zero"])
def test_unused_slots_blocks_and_table_entries_do_not_matter(spec, poison):
    lengths = (SPLIT + 5, spec.block_size, spec.block_size + 1, 0, 7)
    for window in (None, 9):
        with_nan = run(build(spec.replace(seq_lens=lengths, window=window)))
        with_other = run(build(spec.replace(seq_lens=lengths, window=window, poison=poison)))
        for a, b in zip(with_nan, with_other, strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.skipif(sys.platform == "win32", reason="this platform has no mprotect")
def test_no_byte_outside_the_arrays_is_read():
    """Not even one that changes no result."""
    assert printed_by("cpu.attention.bounds") == ["344"]


@some
@pytest.mark.parametrize("length", [2 * SPLIT + 77, 2 * SPLIT, 31])
def test_a_needle_brings_exactly_its_own_value(spec, length):
    """At the first, last, block-, tile- and split-boundary tokens; the value names block, slot and head."""
    near = [0, 1, 15, 16, 17, 31, 32, 63, 64, 127, 128, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT - 1, 2 * SPLIT]
    needles = tuple(sorted({n for n in [*near, length - 2, length - 1] if n < length}))
    spec = spec.replace(seq_lens=(length,), num_kv_heads=len(needles), needles=needles, fingerprint=True)
    if spec.is_fp8:  # whose integers end at 16
        spec = spec.replace(num_kv_heads=min(len(needles), 16), needles=needles[-16:])
    problem = build(spec)
    out, _ = run(problem)
    for head in range(spec.num_heads):
        kv_head = head // spec.group_size
        position = spec.needles[kv_head]
        block, offset = problem.block_tables[0, position // spec.block_size], position % spec.block_size
        named = [block // 16, block % 16, offset // 16, offset % 16, kv_head, 1, 2, 3]
        np.testing.assert_allclose(out[0, head].astype(np.float64), np.resize(named, spec.head_dim), atol=1e-6, rtol=0)


@some
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 64, SPLIT - 1, SPLIT, SPLIT + 1, SPLIT + 99, SPLIT + 100])
def test_windows_begin_at_their_first_key(spec, window):
    """Everything before is NaN; the needle is the first key inside."""
    length = SPLIT + 100
    problem = build(spec.replace(seq_lens=(length, 1), window=window, needles=(length - window,)))
    out, lse = run(problem)
    assert_close(problem, out, lse)
    _, full_lse = expect(build(spec.replace(seq_lens=(length, 1), needles=(length - window,))))
    np.testing.assert_allclose(lse[0], full_lse[0], rtol=1e-5)


@some
def test_window_of_one_is_the_last_value(spec):
    problem = build(spec.replace(seq_lens=(SPLIT + 1, 17), window=1))
    out, _ = run(problem)
    exact, _ = expect(problem)
    np.testing.assert_array_equal(out, exact.astype(out.dtype))


@some
def test_empty_sequences_between_others(spec):
    for sinks in (False, True):
        problem = build(spec.replace(seq_lens=(0, 40, 0, SPLIT, 0), sinks=sinks))
        out, lse = run(problem)
        assert (out[[0, 2, 4]].astype(np.float32) == 0).all()
        assert (lse[[0, 2, 4]] == -np.inf).all()
        assert_close(problem, out, lse)


@some
def test_no_sequences(spec):
    problem = build(spec.replace(seq_lens=()))
    out, lse = run(problem)
    assert out.shape == (0, spec.num_heads, spec.head_dim)
    assert lse.shape == (0, spec.num_heads)
    out = pagedkv.decode_attention(*problem.args, **problem.options)
    assert out.shape == (0, spec.num_heads, spec.head_dim)
    assert out.dtype == FLOATS[spec.q_dtype]


def test_score_mod_may_mask_every_key():
    spec = Spec(seq_lens=(1, 2, 0, SPLIT + 1), score_mod=fading_parity)
    out, lse = run(build(spec))
    masked = np.array([[False, True], [False, False], [True, True], [False, False]])
    np.testing.assert_array_equal(lse == -np.inf, np.tile(masked, spec.num_heads // 2))
    assert (out[0, 1] == 0).all()
    problem = build(spec.replace(sinks=True))
    out, lse = run(problem)
    assert (out[0, 1] == 0).all()
    assert lse[0, 1] == problem.options["sinks"][1]
    assert_close(problem, out, lse)


def test_score_mods_that_differ_in_a_closed_over_number_only():
    for score_mod in (fading_parity, fading_faster, fading_parity):
        problem = build(Spec(seq_lens=(30, 9), score_mod=score_mod))
        assert_close(problem, *run(problem))


def test_softcap_comes_before_the_bias_and_the_score_mod_after():
    problem = build(Spec(seq_lens=(200,), score_mod=fading_parity, softcap=0.3, alibi=True, scale=2.0, window=150))
    assert_close(problem, *run(problem))


@some
def test_scale_zero_is_the_mean_and_lse_is_natural(spec):
    problem = build(spec.replace(seq_lens=(SPLIT * 2, 3), scale=0.0))
    out, lse = run(problem)
    assert_close(problem, out, lse)
    np.testing.assert_allclose(lse, np.log([[SPLIT * 2], [3]]) * np.ones_like(lse), rtol=1e-6)


@pytest.mark.parametrize("spec", [SOME[0], SOME[1], SOME[3]], ids=lambda spec: f"{spec.layout}-{spec.kv_dtype}")
def test_an_infinite_last_value_stays_infinite(spec):
    """The step that reads it reaches past it, where it must not be multiplied by zero."""
    length = SPLIT + 3
    problem = build(spec.replace(seq_lens=(length,)))
    block, offset = problem.block_tables[0, (length - 1) // spec.block_size], (length - 1) % spec.block_size
    index = {"NHD": (block, offset, 0, 5), "HND": (block, 0, offset, 5), "vllm": (block, 0, 5, offset)}[spec.layout]
    problem.v_cache[index] = np.inf
    out, _ = run(problem)
    assert np.isposinf(out[0, : spec.group_size, 5].astype(np.float32)).all()


@some
def test_nan_in_use_is_not_hidden(spec):
    """In a key it makes the rows of its group NaN, in a value its element of them."""
    problem = build(spec.replace(seq_lens=(SPLIT + 50, 20), strides="own"))
    nan, position = 0x7F if spec.is_fp8 else np.nan, SPLIT + 3
    block, offset = problem.block_tables[0, position // spec.block_size], position % spec.block_size
    group = slice(spec.group_size, 2 * spec.group_size)
    index = {"NHD": (block, offset, 1, 5), "HND": (block, 1, offset, 5), "vllm": (block, 1, 5, offset)}[spec.layout]
    clean = problem.v_cache[index]
    problem.v_cache[index] = nan
    out, lse = run(problem)
    hit = np.zeros(out.shape, bool)
    hit[0, group, 5] = True
    np.testing.assert_array_equal(np.isnan(out.astype(np.float32)), hit)
    assert not np.isnan(lse).any()
    problem.v_cache[index] = clean
    index = {"NHD": (block, offset, 1, 5), "HND": (block, 1, offset, 5), "vllm": (block, 1, 1, offset, 1)}[spec.layout]
    problem.k_cache[index] = nan
    out, lse = run(problem)
    hit[0, group] = True
    np.testing.assert_array_equal(np.isnan(out.astype(np.float32)), hit)
    np.testing.assert_array_equal(np.isnan(lse), hit.all(axis=2))


@some
def test_without_out_and_without_lse(spec):
    problem = build(spec.replace(seq_lens=(90, 5)))
    expected, expected_lse = run(problem)
    out = pagedkv.decode_attention(*problem.args, **problem.options)
    assert isinstance(out, np.ndarray)
    assert out.dtype == FLOATS[spec.q_dtype]
    np.testing.assert_array_equal(out, expected)
    out, lse = pagedkv.decode_attention(*problem.args, **problem.options, return_lse=True)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.parametrize("view", ["repeated heads", "repeated rows", "backwards", "heads first"])
def test_strides_of_q(view):
    problem = build(Spec(seq_lens=(90, 5, 33)))
    q = np.array(problem.q)
    problem.q = {
        "repeated heads": np.broadcast_to(q[:, :1], q.shape),
        "repeated rows": np.broadcast_to(q[:1], q.shape),
        "backwards": q[::-1, ::-1],
        "heads first": q.swapaxes(0, 1).copy().swapaxes(0, 1),
    }[view]
    strided = run(problem)
    problem.q = np.ascontiguousarray(problem.q)
    for a, b in zip(strided, run(problem), strict=True):
        np.testing.assert_array_equal(a, b)
    assert_close(problem, *strided)


def test_out_may_be_backwards():
    problem = build(Spec(seq_lens=(90, 5, 33)))
    expected, _ = run(problem)
    out = np.full(problem.q.shape, np.nan, np.float32)
    assert pagedkv.decode_attention(*problem.args, **problem.options, out=out[::-1, ::-1]).base is not None
    np.testing.assert_array_equal(out[::-1, ::-1], expected)


@pytest.mark.parametrize("spec", SOME[:3], ids=lambda spec: spec.q_dtype)
def test_torch_tensors_in_torch_tensors_out(spec):
    problem = build(spec.replace(seq_lens=(SPLIT + 1, 0, 20), kv_scales="per head", sinks=True, alibi=True))
    expected, expected_lse = run(problem)
    args = [as_torch(x) for x in problem.args]
    options = {name: as_torch(x) if isinstance(x, np.ndarray) else x for name, x in problem.options.items()}
    out, lse = pagedkv.decode_attention(*args, **options, return_lse=True)
    assert out.dtype == getattr(torch, spec.q_dtype)
    assert lse.dtype == torch.float32
    np.testing.assert_array_equal(out.float().numpy(), expected.astype(np.float32))
    assert torch.equal(out, as_torch(expected))
    np.testing.assert_array_equal(lse.numpy(), expected_lse)
    given_out = torch.full_like(out, float("nan"))
    assert pagedkv.decode_attention(*args, **options, out=given_out) is given_out
    assert torch.equal(given_out, out)


@pytest.mark.parametrize("spec", [SOME[2], SOME[2].replace(layout="HND"), SOME[4]], ids=lambda spec: spec.layout)
def test_caches_of_more_than_2_31_elements(spec):
    problem = build(spec.replace(seq_lens=(2 * SPLIT, 300), block_size=256, num_kv_heads=4, strides="own"))
    expected = run(problem)
    move_past_2_31_elements(problem)
    for a, b in zip(run(problem), expected, strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_result_beyond_float16_is_infinite_without_a_warning():
    values = np.full((1, 16, 1, 64), 1000, np.float16)
    arguments = (np.ones((1, 2, 64), np.float16), values, values, np.zeros((1, 1), np.int32), np.array([3], np.int32))
    assert (pagedkv.decode_attention(*arguments) == 1000).all()
    fp8 = np.full((1, 16, 1, 32), 0x40, np.uint8)
    out = pagedkv.decode_attention(arguments[0][..., :32], fp8, fp8, *arguments[3:], kv_dtype="fp8_e4m3", v_scale=1e6)
    assert np.isposinf(out).all()


def test_heads_between_the_tokens_of_a_vllm_cache():
    """Strides of NHD in layout vllm, and so many sequences that a work item has several KV heads."""
    problem = build(Spec(seq_lens=(100,) * 64, head_dim=32, layout="vllm"))
    expected = run(problem)
    k = np.ascontiguousarray(problem.k_cache.transpose(0, 2, 3, 1, 4))
    problem.k_cache = k.transpose(0, 3, 1, 2, 4)
    for result, wanted in zip(run(problem), expected, strict=True):
        np.testing.assert_array_equal(result, wanted)
