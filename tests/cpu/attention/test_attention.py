"""What attention on the CPU alone does: work items, vectors that are partly filled, rows of many heads, estimates."""

import sys

import numpy as np
import pytest

import pagedkv
from pagedkv.cpu import threads
from pagedkv.cpu.attention import decode, launch

from ...attention.kernels import CPU, CPU_DECODE, CPU_PREFILL, each_kernel
from ...support.problems import Spec, assert_close, build, run
from ...support.programs import printed_by
from ...support.strategies import SPLIT, fading_parity


def test_splits_are_where_the_tests_think_they_are():
    assert decode.SPLIT == SPLIT


@each_kernel(*CPU)
def test_any_group_size_is_right(kernel, open_device):
    lengths = {"seq_lens": (90, 40), "query_lens": (9, 40)} if kernel.is_prefill else {"seq_lens": (SPLIT + 70, 3, 0)}
    for group_size in (1, 3, 5, 7, 8, 16, 48) if kernel.is_prefill else (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 48):
        problem = kernel.build(**lengths, group_size=group_size, num_kv_heads=3, scale=0.3)
        assert_close(problem, *kernel.attend(problem))


@each_kernel(*CPU_DECODE)
def test_any_head_dim_is_right(kernel, open_device):
    step = kernel.spec.head_dim & -kernel.spec.head_dim  # those of the same kernel
    for head_dim in range(step, 513, 2 * step):
        problem = kernel.build(seq_lens=(67, 1), head_dim=head_dim, sinks=True)
        assert_close(problem, *kernel.attend(problem))


@each_kernel(*CPU_PREFILL)
def test_a_window_begins_between_the_rows_of_a_group(kernel, open_device):
    """In a tile that the first of four rows sees whole, and the others do not."""
    problem = kernel.build(seq_lens=(257,), query_lens=(257,), group_size=1, window=102)
    assert_close(problem, *kernel.attend(problem))


@each_kernel(*CPU_PREFILL)
def test_a_mixed_batch_of_prompts_chunks_decodes_and_nothing(kernel, open_device):
    lengths, query_lens = (70, SPLIT + 1, 300, 40, 0, 2 * SPLIT + 3), (70, 1, 5, 0, 0, 130)
    problem = kernel.build(seq_lens=lengths, query_lens=query_lens, padding_rows=3, sinks=True, alibi=True)
    assert_close(problem, *kernel.attend(problem))


@pytest.mark.parametrize("query_lens", [None, (70,)], ids=["decode", "prefill"])
def test_sums_of_int8_rows_fit_and_scales_of_0_are_0(query_lens):
    """The longest rows of codes of -128, which write_kv makes none of, with the largest numbers of q."""
    problem = build(Spec(seq_lens=(70,), query_lens=query_lens, num_kv_heads=1, head_dim=512, kv_dtype="int8"))
    problem.q[...], problem.k_cache[...], problem.v_cache[:, ::2] = -3, -128, -128
    k_scales, v_scales = problem.options["k_scales"], problem.options["v_scales"]
    k_scales[...] = np.where(np.arange(16)[:, None] % 5, 1e-3, 0)
    v_scales[:, 3::4] = 0
    assert_close(problem, *run(problem))


@pytest.mark.skipif(sys.platform == "win32", reason="this platform has no mprotect")
def test_no_byte_outside_the_arrays_is_read():
    """Not even one that changes no result."""
    assert printed_by("cpu.attention.bounds") == ["472"]


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


def test_a_call_with_a_score_mod_is_taken_for_a_long_one(monkeypatch):
    """What it computes may take any time: an interrupt should not wait for it."""
    estimates = []
    monkeypatch.setattr(launch, "run_items", lambda *args, estimate, **options: estimates.append(estimate))
    spec = Spec(seq_lens=(90,), query_lens=(90,))
    for fields in ({}, {"softcap": 2.0}, {"layout": "vllm"}, {"score_mod": fading_parity}):
        run(build(spec.replace(**fields)))
    plain, capped, dimwise, modified = estimates
    assert plain < capped < threads.PATIENCE_NS
    assert plain < dimwise < threads.PATIENCE_NS
    assert modified > threads.PATIENCE_NS
