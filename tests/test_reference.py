"""The oracle against attention written as loops over numbers, against torch, and at the corners of the contract."""

import math

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from pagedkv import reference

from .support.problems import FLOATS, Spec, build, expect, in_layout
from .support.strategies import DECODE_KERNELS, PREFILL_KERNELS, own_parity, specs


def attention_by_numbers(problem):
    """(out, lse) as lists of Python floats, one (row, head) at a time, reading the pool element by element."""
    spec, options = problem.spec, problem.options
    starts = range(len(problem.seq_lens) + 1) if problem.query_starts is None else problem.query_starts.tolist()
    scale = options["scale"] if options["scale"] is not None else 1 / math.sqrt(spec.head_dim)
    slopes = np.broadcast_to(options.get("alibi_slopes", np.nan), (len(spec.seq_lens), spec.num_heads)).astype(float)
    outs, lses = [], []
    for seq, length in enumerate(spec.seq_lens):
        for row in range(starts[seq], starts[seq + 1]):
            p = length - (starts[seq + 1] - row)
            for head in range(spec.num_heads):
                kv_head = head // spec.group_size
                logits = []
                for j in range(length):
                    if (spec.causal and j > p) or (spec.window is not None and j <= p - spec.window):
                        continue
                    if spec.window_right is not None and j > p + spec.window_right:
                        continue
                    if (spec.leftpad and j < options["leftpad"][seq]) or not is_in_mask(problem, seq, row, j):
                        continue
                    key = [element(problem, "k", seq, j, kv_head, d) for d in range(spec.head_dim)]
                    score = scale * math.fsum(float(a) * b for a, b in zip(problem.q[row, head], key, strict=True))
                    if spec.softcap is not None:
                        score = spec.softcap * math.tanh(score / spec.softcap)
                    if spec.alibi:
                        score -= float(slopes[seq, head]) * abs(p - j)
                    if spec.score_mod is not None:
                        score = spec.score_mod(score, p, j, head, seq)
                    logits.append((score, j))
                terms = [(math.exp(score), j) for score, j in logits]
                sink = math.exp(options["sinks"][head]) if spec.sinks and length else 0.0
                total = math.fsum(term for term, _ in terms) + sink
                lses.append(math.log(total) if total else -math.inf)
                for d in range(spec.head_dim):
                    values = (term * element(problem, "v", seq, j, kv_head, d) for term, j in terms if term)
                    outs.append(math.fsum(values) / total if total else 0.0)
    return np.reshape(outs, (-1, spec.num_heads, spec.head_dim)), np.reshape(lses, (-1, spec.num_heads))


def is_in_mask(problem, seq, row, j):
    """What the mask says of a key and a row of q, found by counting."""
    if problem.spec.mask is None:
        return True
    starts, lens, mask = problem.query_starts.tolist(), problem.seq_lens.tolist(), problem.options["mask"]
    sizes = [(starts[i + 1] - starts[i]) * lens[i] for i in range(len(lens))]
    key = (row - starts[seq]) * lens[seq] + j
    if problem.spec.mask == "bool":
        return mask[sum(sizes[:seq]) + key]
    byte = mask[sum((size + 7) // 8 for size in sizes[:seq]) + key // 8]
    return byte & 1 << key % 8


def element(problem, which, seq, position, head, d):
    """One number of K or V, from its place in the layout."""
    spec = problem.spec
    cache = problem.k_cache if which == "k" else problem.v_cache
    block = problem.block_tables[seq, position // spec.block_size]
    offset = position % spec.block_size
    if spec.layout == "NHD":
        index = (block, offset, head, d)
    elif spec.layout == "HND":
        index = (block, head, offset, d)
    elif which == "k":
        index = (block, head, d // cache.shape[4], offset, d % cache.shape[4])
    else:
        index = (block, head, d, offset)
    value = cache[index]
    if spec.has_scales:
        row = (block, offset, head) if spec.layout == "NHD" else (block, head, offset)
        return float(value) * float(problem.options[f"{which}_scales"][row])
    if not spec.is_fp8:
        return float(value)
    scale = problem.options.get(f"{which}_scale", 1.0)
    return float(value.view(reference.FP8_DTYPES[spec.kv_dtype])) * float(scale if np.ndim(scale) == 0 else scale[head])


SMALL = {"seq_lens": (9, 0, 1, 4), "num_kv_heads": 2, "group_size": 3, "head_dim": 8, "block_size": 3}
BY_NUMBERS = [
    Spec(**SMALL),
    Spec(**SMALL, layout="HND", strides="halves", scale=0.7, softcap=0.5, sinks=True),
    Spec(**SMALL, alibi=True, window=3, score_mod=own_parity),
    Spec(**SMALL, kv_dtype="fp8_e4m3", kv_scales="per head", q_dtype="bfloat16", strides="strided", sinks=True),
    Spec(**{**SMALL, "block_size": 8, "head_dim": 16}, kv_dtype="fp8_e5m2", layout="vllm", kv_scales="scalar"),
    Spec(**SMALL, kv_dtype="int8", strides="strided", window=3),
    Spec(**{**SMALL, "block_size": 8, "head_dim": 16}, kv_dtype="int8", layout="vllm", q_dtype="float16"),
    Spec(**{**SMALL, "block_size": 8}, layout="vllm", strides="halves", score_mod=own_parity, sinks=True),
    Spec(**SMALL, query_lens=(5, 0, 1, 4), padding_rows=2, alibi=True, window=2, sinks=True),
    Spec(**SMALL, query_lens=(9, 0, 0, 2), causal=False, alibi=True, window=4, softcap=2.0),
    Spec(**SMALL, query_lens=(5, 0, 1, 4), causal=False, window_right=1, leftpad=True, mask="bits", window=4),
    Spec(**SMALL, query_lens=(5, 0, 1, 4), mask="bool", alibi=True, seq_slopes=True),
]


@pytest.mark.parametrize("spec", BY_NUMBERS, ids=lambda spec: f"{spec.layout}-{spec.kv_dtype}")
def test_matches_attention_written_as_loops_over_numbers(spec):
    problem = build(spec)
    out, lse = expect(problem)
    by_numbers, lse_by_numbers = attention_by_numbers(problem)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, by_numbers, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, lse_by_numbers, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("causal", [True, False])
def test_matches_torch(causal):
    problem = build(Spec(seq_lens=(70,), query_lens=(70,), num_kv_heads=2, group_size=3, head_dim=40, causal=causal))
    k, v = reference.gather_kv(problem.k_cache, problem.v_cache, problem.block_tables[0], 70)
    q, k, v = (torch.from_numpy(x.astype(np.float64)).transpose(0, 1) for x in (problem.q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    np.testing.assert_allclose(expect(problem)[0], expected.transpose(0, 1).numpy(), rtol=1e-12, atol=1e-14)


@settings(max_examples=25)
@given(
    spec=st.sampled_from(DECODE_KERNELS).flatmap(specs)
    | st.sampled_from(PREFILL_KERNELS).flatmap(lambda kernel: specs(kernel, prefill=True))
)
def test_never_nan_from_poison_or_masks(spec):
    out, lse = expect(build(spec.replace(poison="nan")))
    assert np.isfinite(out).all()
    assert not np.isnan(lse).any()


def test_rows_past_the_last_query_are_nan():
    problem = build(Spec(seq_lens=(4,), query_lens=(2,), padding_rows=3))
    out = reference.prefill_attention(*problem.args, **problem.options)
    np.testing.assert_array_equal(np.isnan(out).all(axis=(1, 2)), [False, False, True, True, True])


def test_empty_sequences_and_masked_rows():
    sinks = np.array([2.0, -1.0], np.float32)
    problem = build(Spec(seq_lens=(0, 1), num_kv_heads=1, score_mod=own_parity))
    out, lse = reference.decode_attention(*problem.args, **problem.options, return_lse=True)
    assert (out[0] == 0).all()
    np.testing.assert_array_equal(lse == -np.inf, [[True, True], [False, True]])
    with_sinks, lse = reference.decode_attention(*problem.args, **problem.options, sinks=sinks, return_lse=True)
    assert (with_sinks[0] == 0).all()
    assert (with_sinks[1, 1] == 0).all()
    np.testing.assert_array_equal(lse[0], [-np.inf, -np.inf])
    assert lse[1, 1] == sinks[1]


def test_scale_zero_is_the_mean_of_v():
    problem = build(Spec(seq_lens=(33,), scale=0.0, group_size=1))
    _, v = reference.gather_kv(problem.k_cache, problem.v_cache, problem.block_tables[0], 33)
    out, lse = expect(problem)
    np.testing.assert_allclose(out[0], v.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(lse, math.log(33), rtol=1e-15)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rounding_is_of_the_size_of_the_dtype(dtype):
    problem = build(Spec(seq_lens=(300, 40), q_dtype=dtype, kv_dtype=dtype))
    exact, _ = expect(problem)
    rounded, _ = expect(problem, FLOATS[dtype])
    assert rounded.dtype == np.float64  # holds numbers of the dtype
    np.testing.assert_array_equal(rounded, rounded.astype(FLOATS[dtype]))
    error = np.abs(rounded - exact).max()
    ulp = float(ml_dtypes.finfo(FLOATS[dtype]).eps) * np.abs(exact).max()
    assert 0.01 * ulp < error < 4 * ulp


def test_merging_the_halves_gives_the_whole():
    problem = build(Spec(seq_lens=(40, 0), sinks=False))
    k, v = reference.gather_kv(problem.k_cache, problem.v_cache, problem.block_tables[0], 40)
    parts = []
    for part in (slice(0, 16), slice(16, 40), slice(0, 0)):
        cache, table = (x[part][None] for x in (k, v)), np.zeros((2, 1), np.int64)
        lengths = np.array([len(k[part]), 0])
        k_part, v_part = cache
        if lengths[0]:
            parts.append(reference.decode_attention(problem.q, k_part, v_part, table, lengths, return_lse=True))
        else:
            parts.append((np.zeros_like(parts[0][0]), np.full_like(parts[0][1], -np.inf)))
    outs, lses = zip(*parts, strict=True)
    out, lse = reference.merge_states(outs, lses)
    expected, expected_lse = expect(problem)
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_codes_widen_to_their_values(kv_dtype):
    exponent_bits, bias = (4, 7) if kv_dtype == "fp8_e4m3" else (5, 15)
    mantissa_bits = 7 - exponent_bits
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256, 1, 1)
    k, v = reference.gather_kv(codes, codes, np.array([0]), 256, kv_dtype=kv_dtype, k_scale=2.0)
    for code in range(256):
        sign, exponent = (-1) ** (code >> 7), (code & 0x7F) >> mantissa_bits
        mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        expected = sign * (2.0 ** (exponent - bias) * (1 + mantissa) if exponent else 2.0 ** (1 - bias) * mantissa)
        if kv_dtype == "fp8_e4m3" and code & 0x7F == 0x7F:
            expected = math.nan
        elif kv_dtype == "fp8_e5m2" and exponent == 31:
            expected = math.nan if mantissa else sign * math.inf
        np.testing.assert_array_equal([v.flat[code], k.flat[code]], [expected, 2 * expected])


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_writing_rounds_to_nearest_saturates_and_keeps_nan(kv_dtype):
    all_codes = np.arange(256, dtype=np.uint8).view(reference.FP8_DTYPES[kv_dtype]).astype(np.float64)
    numbers = np.unique(all_codes[np.isfinite(all_codes)])
    rng = np.random.default_rng(0)
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, middles, rng.standard_normal(1000) * 10.0 ** rng.integers(-6, 6, 1000)])
    x = x.astype(np.float32)[:, None, None]
    cache = np.zeros((len(x), 1, 1, 1), np.uint8)
    reference.write_kv(x, x, cache, cache.copy(), np.arange(len(x)), kv_dtype=kv_dtype, k_scale=1.0)
    written, _ = reference.gather_kv(cache, cache, np.arange(len(x)), len(x), kv_dtype=kv_dtype)
    wanted = np.clip(x.astype(np.float64), numbers[0], numbers[-1])
    distance = np.abs(numbers - wanted.reshape(-1, 1))
    np.testing.assert_array_equal(np.abs(written - wanted).ravel(), distance.min(axis=1))
    even = cache.ravel() % 2 == 0
    assert even[len(numbers) : len(numbers) + len(middles)].all()  # ties go to the even code
    special = np.array([np.nan, np.inf, -np.inf], np.float32)[:, None, None]
    reference.write_kv(special, special, cache, cache.copy(), np.arange(3), kv_dtype=kv_dtype)
    written, _ = reference.gather_kv(cache, cache, np.arange(3), 3, kv_dtype=kv_dtype)
    np.testing.assert_array_equal(written.ravel(), [np.nan, numbers[-1], numbers[0]])


@pytest.mark.parametrize("layout", ["NHD", "HND", "vllm"])
def test_rows_of_int8_come_back_within_half_a_code(layout):
    """Also where 128 codes a side would be exact: the largest of a row is exact, and keeps its sign."""
    k, v = np.random.default_rng(0).standard_normal((2, 20, 3, 16), np.float32)
    k_cache, v_cache = in_layout(*np.zeros((2, 5, 8, 3, 16), np.int8), layout)
    k_scales, v_scales = in_layout(*np.full((2, 5, 8, 3), np.nan, np.float32), layout)
    options = {"layout": layout, "kv_dtype": "int8", "k_scales": k_scales, "v_scales": v_scales}
    reference.write_kv(k, v, k_cache, v_cache, np.arange(20), **options)
    back = reference.gather_kv(k_cache, v_cache, np.arange(3), 20, **options)
    for x, y in zip((k, v), back, strict=True):
        largest = np.abs(x).max(axis=2, keepdims=True)
        assert (np.abs(x - y) <= largest / 254 * (1 + 1e-6)).all()
        np.testing.assert_allclose(np.abs(y).max(axis=2, keepdims=True), largest, rtol=1e-6)
    assert np.isnan(k_scales).sum() == (40 - 20) * 3


@pytest.mark.parametrize("layout", ["NHD", "HND", "vllm"])
def test_write_then_gather_is_the_identity(layout):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 20, 2, 16), np.float32)
    k_cache, v_cache = (np.array(x) for x in in_layout(*np.full((2, 5, 8, 2, 16), np.nan, np.float32), layout))
    table = np.array([3, 0, 4])
    slots = table[np.arange(20) // 8] * 8 + np.arange(20) % 8
    reference.write_kv(k, v, k_cache, v_cache, np.where(np.arange(20) == 6, -1, slots), layout=layout)
    k_back, v_back = reference.gather_kv(k_cache, v_cache, table, 20, layout=layout)
    assert np.isnan(k_back[6]).all()
    assert np.isnan(k_cache).sum() == 21 * 2 * 16
    kept = np.arange(20) != 6
    np.testing.assert_array_equal(k_back[kept], k[kept])
    np.testing.assert_array_equal(v_back[kept], v[kept])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_a_product_of_complex_numbers(interleaved):
    rng = np.random.default_rng(7)
    q, angles, positions = rng.standard_normal((5, 3, 12)), rng.uniform(0, 6, (9, 4)), rng.integers(0, 9, 5)
    rotated, nothing = reference.apply_rotary(
        q, None, np.cos(angles), np.sin(angles), positions, interleaved=interleaved
    )
    real, imaginary = (np.s_[..., 0:8:2], np.s_[..., 1:8:2]) if interleaved else (np.s_[..., :4], np.s_[..., 4:8])
    product = (q[real] + 1j * q[imaginary]) * np.exp(1j * angles[positions])[:, None]
    np.testing.assert_allclose(rotated[real], product.real, rtol=0, atol=1e-14)
    np.testing.assert_allclose(rotated[imaginary], product.imag, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(rotated[..., 8:], q[..., 8:])
    assert nothing is None
