"""Ragged prefill against the oracle and against decode, and what it promises about poison, padding and chunks."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import pagedkv
from pagedkv.cpu import threads
from pagedkv.cpu.attention import decode, prefill

from ...support.problems import (
    FLOATS,
    Spec,
    as_torch,
    assert_close,
    build,
    error_bound,
    expect,
    move_past_2_31_elements,
    run,
)
from ...support.strategies import MORE_PREFILL_KERNELS, PREFILL_KERNELS, SPLIT, fading_parity, long, specs

SOME = [
    Spec(kv_dtype="float32", head_dim=64),
    Spec(kv_dtype="bfloat16", q_dtype="bfloat16", head_dim=128, layout="HND", strides="halves"),
    Spec(kv_dtype="fp8_e4m3", q_dtype="float16", head_dim=96, strides="strided"),
    Spec(kv_dtype="fp8_e4m3", q_dtype="float32", head_dim=80, layout="vllm", strides="strided"),
    Spec(kv_dtype="float32", head_dim=40),  # whose last vector is partly filled
]
some = pytest.mark.parametrize("spec", SOME, ids=lambda spec: f"{spec.layout}-{spec.kv_dtype}")


@pytest.mark.parametrize("kernel", [*PREFILL_KERNELS, *long(MORE_PREFILL_KERNELS)], ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_oracle(kernel, data):
    problem = build(data.draw(specs(kernel, prefill=True)))
    assert_close(problem, *run(problem))


@some
@pytest.mark.parametrize("causal", [True, False])
def test_whole_prompts_around_tile_boundaries(spec, causal):
    lengths = (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 257)
    for window in (None, 20):
        problem = build(spec.replace(seq_lens=lengths, query_lens=lengths, causal=causal, window=window))
        assert_close(problem, *run(problem))


@some
def test_a_window_begins_between_the_rows_of_a_group(spec):
    """In a tile that the first of four rows sees whole, and the others do not."""
    problem = build(spec.replace(seq_lens=(257,), query_lens=(257,), group_size=1, window=102))
    assert_close(problem, *run(problem))


@some
def test_group_sizes(spec):
    for group_size in (1, 3, 5, 7, 8, 16, 48):
        problem = build(spec.replace(seq_lens=(90, 40), query_lens=(9, 40), group_size=group_size, num_kv_heads=1))
        assert_close(problem, *run(problem))


@some
def test_a_mixed_batch_of_prompts_chunks_decodes_and_nothing(spec):
    lengths = (70, SPLIT + 1, 300, 40, 0, 2 * SPLIT + 3)
    query_lens = (70, 1, 5, 0, 0, 130)
    problem = build(spec.replace(seq_lens=lengths, query_lens=query_lens, padding_rows=3, sinks=True, alibi=True))
    assert_close(problem, *run(problem))


@some
@pytest.mark.parametrize("poison", ["inf", "huge", "zero"])
def test_unused_slots_blocks_and_table_entries_do_not_matter(spec, poison):
    spec = spec.replace(seq_lens=(SPLIT + 5, spec.block_size, 17, 0), query_lens=(70, spec.block_size, 3, 0))
    for a, b in zip(run(build(spec)), run(build(spec.replace(poison=poison))), strict=True):
        assert a.tobytes() == b.tobytes()


@some
def test_rows_past_the_last_query_are_not_written(spec):
    problem = build(spec.replace(seq_lens=(20,), query_lens=(3,), padding_rows=4))
    buffer = problem.out_buffer
    buffer[...] = np.linspace(1, 2, buffer.size).reshape(buffer.shape).astype(buffer.dtype)
    before = buffer.copy()
    pagedkv.prefill_attention(*problem.args, **problem.options, out=problem.out)
    assert not (problem.out[:3] == before[:3, 1:, 8:]).any()
    problem.out[:3] = before[:3, 1:, 8:]
    np.testing.assert_array_equal(buffer, before)


@some
def test_nothing_to_do(spec):
    problem = build(spec.replace(seq_lens=(0, 20), query_lens=(0, 0)))
    out, lse = run(problem)
    assert out.shape == (0, spec.num_heads, spec.head_dim)
    problem = build(spec.replace(seq_lens=(0, 20), query_lens=(0, 0), padding_rows=2))
    out, lse = run(problem)
    problem = build(spec.replace(seq_lens=(), query_lens=(), padding_rows=2))
    out, lse = run(problem)
    problem = build(spec.replace(seq_lens=(), query_lens=()))
    out, lse = pagedkv.prefill_attention(*problem.args, **problem.options, return_lse=True)
    assert out.shape == (0, spec.num_heads, spec.head_dim)
    assert lse.shape == (0, spec.num_heads)


@some
@pytest.mark.parametrize("needle", [0, 1, 15, 16, 31, 32, 63, 64, 127, 128, 199])
def test_a_needle_brings_exactly_its_own_value_to_the_rows_that_see_it(spec, needle):
    spec = spec.replace(seq_lens=(200,), query_lens=(200,), needles=(needle, 199 - needle), fingerprint=True)
    problem = build(spec)
    out, lse = run(problem)
    assert_close(problem, out, lse)
    for head in range(spec.num_heads):
        kv_head = head // spec.group_size
        position = spec.needles[kv_head]
        block, offset = problem.block_tables[0, position // spec.block_size], position % spec.block_size
        named = [block // 16, block % 16, offset // 16, offset % 16, kv_head, 1, 2, 3]
        seen = out[position:, head].astype(np.float64)
        np.testing.assert_allclose(seen, np.tile(named, (200 - position, spec.head_dim // 8)), atol=1e-6, rtol=0)


@some
@pytest.mark.parametrize("position", [0, 15, 16, 64, 150])
def test_nan_in_a_key_reaches_only_the_rows_that_attend_to_it(spec, position):
    problem = build(spec.replace(seq_lens=(200,), query_lens=(200,), window=30, strides="own"))
    clean = run(problem)
    block, offset = problem.block_tables[0, position // spec.block_size], position % spec.block_size
    k_cache = problem.k_cache.copy()
    index = {"NHD": (block, offset, 1), "HND": (block, 1, offset), "vllm": (block, 1, slice(None), offset)}
    k_cache[index[spec.layout]] = 0x7F if spec.is_fp8 else np.nan
    problem.k_cache = k_cache
    out, lse = run(problem)
    seen = np.zeros((200, spec.num_heads), bool)
    seen[position : position + 30, spec.group_size :] = True
    np.testing.assert_array_equal(out[~seen], clean[0][~seen])
    np.testing.assert_array_equal(lse[~seen], clean[1][~seen])


@some
@pytest.mark.parametrize("options", [{}, {"window": 40, "sinks": True}, {"alibi": True, "softcap": 3.0}], ids=str)
def test_chunks_give_what_the_whole_prompt_gives(spec, options):
    spec = spec.replace(seq_lens=(333,), query_lens=(333,), **options)
    whole = build(spec)
    exact, exact_lse = expect(whole)
    rounded, _ = expect(whole, FLOATS[spec.q_dtype])
    bound = error_bound(exact, rounded)
    for stops in ((333,), (1, 2, 333), (128, 256, 333), (100, 101, 300, 333)):
        start = 0
        for stop in stops:
            chunk = build(spec.replace(seq_lens=(stop,), query_lens=(stop - start,)))
            chunk.q = whole.q[start:stop]
            chunk.k_cache, chunk.v_cache, chunk.block_tables = whole.k_cache, whole.v_cache, whole.block_tables
            out, lse = run(chunk)
            assert np.abs(out.astype(np.float64) - exact[start:stop]).max() <= bound
            np.testing.assert_allclose(lse, exact_lse[start:stop], rtol=1e-5, atol=1e-5)
            start = stop


@some
@pytest.mark.parametrize("options", [{}, {"window": 40, "sinks": True}, {"alibi": True, "softcap": 3.0}], ids=str)
def test_decode_is_prefill_of_one_row(spec, options):
    spec = spec.replace(seq_lens=(SPLIT + 20, 1, 77), **options)
    decode, prefill = build(spec), build(spec.replace(query_lens=(1, 1, 1)))
    np.testing.assert_array_equal(decode.q, prefill.q)
    exact, _ = expect(decode)
    rounded, _ = expect(decode, FLOATS[spec.q_dtype])
    (out, lse), (prefill_out, prefill_lse) = run(decode), run(prefill)
    difference = np.abs(out.astype(np.float64) - prefill_out.astype(np.float64)).max()
    assert difference <= error_bound(exact, rounded)
    np.testing.assert_allclose(lse, prefill_lse, rtol=1e-5, atol=1e-5)


def test_score_mods_see_positions_heads_and_sequences():
    spec = Spec(seq_lens=(40, 90), query_lens=(40, 3), score_mod=fading_parity, window=30, softcap=1.0, sinks=True)
    for causal in (True, False):
        problem = build(spec.replace(causal=causal))
        assert_close(problem, *run(problem))


def test_score_mod_may_mask_every_key():
    spec = Spec(seq_lens=(5,), query_lens=(5,), score_mod=fading_parity)
    out, lse = run(build(spec))
    assert lse[0, 1] == -np.inf
    assert (out[0, 1] == 0).all()
    problem = build(spec.replace(sinks=True))
    out, lse = run(problem)
    assert lse[0, 1] == problem.options["sinks"][1]
    assert (out[0, 1] == 0).all()


@pytest.mark.parametrize("spec", SOME[:3], ids=lambda spec: spec.q_dtype)
def test_torch_tensors_in_torch_tensors_out(spec):
    problem = build(spec.replace(seq_lens=(SPLIT + 1, 20), query_lens=(9, 20), kv_scales="per head", sinks=True))
    expected, expected_lse = run(problem)
    args = [as_torch(x) for x in problem.args]
    options = {name: as_torch(x) if isinstance(x, np.ndarray) else x for name, x in problem.options.items()}
    out, lse = pagedkv.prefill_attention(*args, **options, return_lse=True)
    assert out.dtype == getattr(torch, spec.q_dtype)
    np.testing.assert_array_equal(out.float().numpy(), expected.astype(np.float32))
    assert torch.equal(out, as_torch(expected))
    np.testing.assert_array_equal(lse.numpy(), expected_lse)


@pytest.mark.parametrize("view", ["repeated heads", "repeated rows", "backwards", "heads first"])
def test_strides_of_q(view):
    problem = build(Spec(seq_lens=(90, 33), query_lens=(20, 33)))
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


@pytest.mark.parametrize("spec", [SOME[2], SOME[2].replace(layout="HND")], ids=lambda spec: spec.layout)
def test_caches_of_more_than_2_31_elements(spec):
    problem = build(spec.replace(seq_lens=(600,), query_lens=(50,), block_size=256, num_kv_heads=4, strides="own"))
    expected = run(problem)
    move_past_2_31_elements(problem)
    for a, b in zip(run(problem), expected, strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_call_with_a_score_mod_is_taken_for_a_long_one(monkeypatch):
    """What it computes may take any time: an interrupt should not wait for it."""
    estimates = []
    for module in (prefill, decode):
        monkeypatch.setattr(module, "run", lambda *args, estimate, **options: estimates.append(estimate))
    spec = Spec(seq_lens=(90,), query_lens=(90,))
    for fields in ({}, {"softcap": 2.0}, {"layout": "vllm"}, {"score_mod": fading_parity}):
        run(build(spec.replace(**fields)))
    plain, capped, dimwise, modified = estimates
    assert plain < capped < threads.PATIENCE_NS
    assert plain < dimwise < threads.PATIENCE_NS
    assert modified > threads.PATIENCE_NS
